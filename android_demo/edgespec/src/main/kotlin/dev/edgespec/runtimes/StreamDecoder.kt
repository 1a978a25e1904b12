package dev.edgespec.runtimes

private const val CONTEXT = 8 // tokens of the prompt that are enough context, if no character is cut
private const val HALF = 3 // most bytes of a character that is not whole yet, each perhaps written as U+FFFD

/**
 * Text of a growing token list, given out as soon as it is complete UTF-8 and cannot begin a stop string.  The window is
 * the last tokens that gave text and those after them: enough for the space of the next word, and for characters that are
 * written by several tokens.
 */
class StreamDecoder(private val decode: (IntArray) -> String, prompt: IntArray = IntArray(0), stop: List<String> = emptyList()) {
    private val stop = stop.filter { it.isNotEmpty() }
    private val given = StringBuilder()
    private var window: IntArray = tail(prompt)
    private var settled = window.size // tokens of the window whose text is out
    private var out = decode(window).length // of the window's text, what is out
    private var held = "" // complete text that may begin a stop string

    /** Everything given out so far. */
    val text: String get() = given.toString()

    /** The stop string that ended the text; null = none did. */
    var stopped: String? = null
        private set

    /** Add a token -> new text, possibly empty.  Once stopped, nothing more comes. */
    fun push(token: Int): String {
        if (stopped != null) return ""
        window += token
        val text = decode(window)
        val whole = whole(text)
        val fresh = if (whole > out) text.substring(out, whole) else ""
        out = minOf(maxOf(out, whole), text.length) // a prompt may end within a character
        if (whole == text.length) {
            if (fresh.trim(' ').isNotEmpty()) { // others stay: some decoders strip the spaces before the first word they see
                window = window.copyOfRange(settled, window.size)
                out = decode(window).length
            }
            settled = window.size
        }
        return give(held + fresh)
    }

    /** The text held back, at the end. */
    fun finish(): String {
        if (stopped != null) return ""
        val text = decode(window)
        val rest = if (out < text.length) text.substring(out) else ""
        out = text.length
        settled = window.size
        val now = give(held + rest)
        val last = held // empty if a stop string was found
        held = ""
        given.append(last)
        return now + last
    }

    /** The length of a text without those at its end that may be the beginning of another character. */
    private fun whole(text: String): Int = text.length - minOf(text.length - text.trimEnd('\ufffd').length, HALF)

    /** The end of the prompt, long enough to be written as in the whole. */
    private fun tail(prompt: IntArray): IntArray {
        val whole = decode(prompt)
        var count = CONTEXT
        while (count < prompt.size) {
            val part = decode(prompt.copyOfRange(prompt.size - count, prompt.size))
            if (part.isNotEmpty() && whole.endsWith(part)) break
            count *= 2
        }
        return prompt.copyOfRange(maxOf(0, prompt.size - count), prompt.size)
    }

    private fun give(candidate: String): String {
        held = ""
        var now = candidate
        val found = stop.map { candidate.indexOf(it) to it }.filter { it.first >= 0 }
        if (found.isNotEmpty()) {
            val (at, string) = found.minWith(compareBy({ it.first }, { it.second }))
            stopped = string
            now = candidate.take(at)
        } else {
            val keep = stop.maxOfOrNull { overlap(candidate, it) } ?: 0
            held = candidate.takeLast(keep)
            now = candidate.dropLast(keep)
        }
        given.append(now)
        return now
    }
}

/** Length of the longest end of [text] that begins [string]. */
private fun overlap(text: String, string: String): Int =
    (minOf(text.length, string.length - 1) downTo 1).firstOrNull { string.startsWith(text.takeLast(it)) } ?: 0
