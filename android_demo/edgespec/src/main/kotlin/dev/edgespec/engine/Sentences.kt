package dev.edgespec.engine

/* Long texts for a model that reads short ones: cut at ends of sentences (edgespec/engine/sentences.py). */

// after a full stop and closing characters, where white space or, in scripts without it, anything comes next
private val ENDS = Regex("(?<=[.!?\u2026])[\"'\u2019\u201d)\\]]*[\\s\u0085\u001c-\u001f\\p{Z}]+|(?<=[\u3002\uff01\uff1f])[\u300d\u300f\uff09]*[\\s\\p{Z}]*|\n+")
private val WORDS = Regex("\\S+\\s*|\\s+")

/** Cut a text after every sentence, without losing a character. */
private fun sentences(text: String): List<String> {
    var begin = 0
    val found = ENDS.findAll(text).map { end -> text.substring(begin, end.range.last + 1).also { begin = end.range.last + 1 } }.toList()
    return (found + text.substring(begin)).filter { it.isNotEmpty() }
}

/** Cut a text into as few pieces as fit, each of whole sentences where one [fits]; joined they are the text. */
internal fun pieces(text: String, fits: (String) -> Boolean): List<String> {
    val found = ArrayList<String>()
    for (part in fitting(text, fits)) {
        if (found.isNotEmpty() && fits((found.last() + part).trim())) found[found.size - 1] = found.last() + part else found.add(part)
    }
    return found.ifEmpty { listOf(text) }
}

/** Sentences, and parts of those that do not fit: at white space, else anywhere. */
private fun fitting(text: String, fits: (String) -> Boolean): List<String> = sentences(text).flatMap { sentence ->
    if (fits(sentence.trim()) || sentence.length < 2) return@flatMap listOf(sentence)
    val words = WORDS.findAll(sentence).map { it.value }.toList()
    val middle = if (words.size > 1) words.take(words.size / 2).sumOf { it.length } else sentence.length / 2
    fitting(sentence.take(middle), fits) + fitting(sentence.drop(middle), fits)
}
