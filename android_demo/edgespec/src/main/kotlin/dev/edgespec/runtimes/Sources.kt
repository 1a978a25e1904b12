package dev.edgespec.runtimes

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.Constraint
import java.io.File

/* A manifest's part about encoder-decoders, and their source texts: languages, tokens around texts, rules of generation. */

/**
 * How sound becomes the encoder's input rows: frames of [bands] features, [frames] of a whole recording.  A row has three parts of
 * [columns] each: see [dev.edgespec.audio.encoderRows].
 */
class FeaturePart(val bands: Int, val frames: Int, val columns: Int)

/**
 * Source that a decoder attends over: at most [most] rows of [width], which an encoder computes from a text or from [features].
 * [sharesEncoder]: the draft uses the output of the target's encoder.
 */
class SourcePart(val kind: String, val most: Int, val width: Int, val features: FeaturePart?, val sharesEncoder: Boolean)

/** Rules of generation_config.json that bind every text, by any method; lengths but [leastNew] count what the text begins with. */
data class WritingRules(
    val suppressed: List<Int> = emptyList(), val beginSuppressed: List<Int> = emptyList(), val badWords: List<List<Int>> = emptyList(),
    val noRepeat: Int = 0, val least: Int = 0, val leastNew: Int = 0, val most: Int? = null, val forcedEnd: Int? = null,
    val lengthPenalty: Double = 1.0, val earlyStopping: String = "false",
) {
    /** Whether they constrain any token. */
    val needed: Boolean
        get() = listOf(suppressed, beginSuppressed, badWords).any { it.isNotEmpty() } || maxOf(noRepeat, least, leastNew) > 0 ||
            forcedEnd != null
}

private val PLACES = listOf("text", "from", "to") // in the lists of a [TextForm]: -1, -2, -3
private const val TEXT = -1
private const val FROM = -2

/**
 * Texts of an encoder-decoder.  [source]: the encoder's input, [begin]: first tokens of the decoder's text, both as tokens and places of
 * the text and of the source and target language; [languages]: the token of each; [prefixes]: words before a source, by task; [from] and
 * [to]: the defaults.
 */
class TextForm(
    val source: List<Int>, val begin: List<Int>, val languages: Map<String, Int>, val prefixes: Map<String, String>, val from: String?,
    val to: String?, val rules: WritingRules,
) {
    /** Whether a token selects the language of the source, and that of the output. */
    val needsFrom: Boolean get() = FROM in source + begin
    val needsTo: Boolean get() = (source + begin).any { it < FROM }
}

internal fun Reader.textForm() = TextForm(
    tokensOr("source", PLACES), tokensOr("prefix_tokens", PLACES), namedInts("languages"), namedTexts("prefixes"), textOrNull("default_from"),
    textOrNull("default_to"), partOrNull("rules") { rules() } ?: WritingRules(),
).also { form ->
    if (form.source.count { it == TEXT } != 1) throw wrong("source", "expected one place of the text")
    if (form.languages.isEmpty() && (form.needsFrom || form.needsTo)) throw wrong("source", "a place of a language without languages")
}

internal fun Reader.rules(): WritingRules {
    ignore("beams")
    return WritingRules(
        ints("suppress_tokens", 0), ints("begin_suppress_tokens", 0), tokenLists("bad_words_ids"), intOrNull("no_repeat_ngram_size", 0) ?: 0,
        intOrNull("min_length", 0) ?: 0, intOrNull("min_new_tokens", 0) ?: 0, intOrNull("max_length", 0), intOrNull("forced_eos_token_id", 0),
        numberOrNull("length_penalty") ?: 1.0,
        wordOrFlag("early_stopping") ?: "false",
    )
}

/** A model of Whisper's kind (arXiv 2212.04356): the first tokens of a transcript; timestamps come after [noTimestamps]. */
class SpeechPart(
    val start: Int, val languages: Map<String, Int>, val tasks: Map<String, Int>, val noTimestamps: Int, val previous: Int?,
    val noSpeech: Int?, val suppressed: List<Int>, val suppressedFirst: List<Int>, val latestFirst: Int?,
) {
    /** Tokens that a text begins with; [language]: one of [languages], null = English or the first. */
    fun begin(language: String? = null, task: String = "transcribe", timestamps: Boolean = false): IntArray {
        val spoken = language ?: if ("en" in languages) "en" else languages.keys.firstOrNull()
        return listOfNotNull(start, languages[spoken], tasks[task], noTimestamps.takeUnless { timestamps }).toIntArray()
    }
}

internal fun Reader.speech() = SpeechPart(
    int("start", 0), namedInts("languages"), namedInts("tasks"), int("no_timestamps", 0), intOrNull("previous", 0),
    intOrNull("no_speech", 0), ints("suppress_tokens", 0), ints("begin_suppress_tokens", 0), intOrNull("max_initial_timestamp_index", 0),
)

private val ALIASES: Map<String, Set<String>> by lazy { // all names of a language by each of them
    LANGUAGES.trim().split("|", "\n").map { it.trim().split(" ", limit = 3) }.flatMap { (two, three, name) ->
        val names = setOf(two, three, name.lowercase(), MEMBERS[three] ?: three)
        names.map { it to names }
    }.toMap()
}

/** All names of a language, in lower case, script and country left out; of one that is not listed, its own. */
internal fun namesOf(language: String): Set<String> {
    val base = language.lowercase().split("_", "-")[0]
    return ALIASES[language.lowercase()] ?: ALIASES[base] ?: setOf(base)
}

/** The code that a model has for a language, which is [wanted] by that code, by another one, or by its English name. */
internal fun chooseLanguage(wanted: String, known: Collection<String>): String {
    known.firstOrNull { it.equals(wanted.trim(), ignoreCase = true) }?.let { return it }
    val names = namesOf(wanted.trim())
    val found = known.filter { it.lowercase() in names || it.lowercase().split("_", "-")[0] in names }
    if (found.size == 1) return found[0]
    if (found.isNotEmpty()) throw InvalidRequest("language '$wanted' is several of this model's", "say which: ${found.joinToString(", ")}")
    throw InvalidRequest("this model has no language '$wanted'; it has: ${known.sorted().joinToString(", ")}")
}

private fun same(one: String?, other: String): Boolean = one == null || namesOf(one).any { it in namesOf(other) }

internal const val SOURCE_TOKENIZER = "source_tokenizer.json" // of a model with a separate tokenizer for sources

/** The encoder's input, and the first tokens of the decoder's text, in the languages of a request. */
class SourceTexts(folder: File, val form: TextForm, shared: TextCodec) : AutoCloseable {
    private val pairs = form.prefixes.keys.map { it.split("_") }.filter { it[0] == "translation" && it.size == 4 } // translation_en_to_de
    private val own = if (File(folder, SOURCE_TOKENIZER).isFile) TextCodec(folder, SOURCE_TOKENIZER) else null
    private val codec = own ?: shared

    /** Languages that a request may choose from, the model's default first; the empty one names none; an empty list without a choice. */
    val origins: List<String> = choices(form.needsFrom, form.from, 1)
    val targets: List<String> = choices(form.needsTo, form.to, 3)

    private fun choices(told: Boolean, first: String?, at: Int): List<String> =
        if (told) (listOfNotNull(first?.let { chooseLanguage(it, form.languages.keys) }) + form.languages.keys.sorted()).distinct()
        else if (pairs.isEmpty()) emptyList() else listOf("") + pairs.map { it[at] }.distinct()

    fun encode(text: String, from: String? = null, to: String? = null): IntArray =
        filled(form.source, codec.encode(prefix(from, to) + text, withSpecial = false), from, to)

    fun begin(from: String? = null, to: String? = null): IntArray = filled(form.begin, IntArray(0), from, to)

    private fun filled(places: List<Int>, words: IntArray, from: String?, to: String?): IntArray = places.flatMap { place ->
        when (place) {
            TEXT -> words.asList()
            FROM -> listOf(language("from", from ?: form.from))
            else -> listOf(if (place >= 0) place else language("to", to ?: form.to))
        }
    }.toIntArray()

    private fun language(way: String, wanted: String?): Int {
        val known = form.languages.keys.sorted()
        wanted ?: throw InvalidRequest(
            "this model must be told the language that it translates $way",
            "${if (way == "from") "source" else "target"}Language: it has ${known.take(8).joinToString(", ")}" +
                if (known.size > 8) " and ${known.size - 8} more" else "",
        )
        return form.languages.getValue(chooseLanguage(wanted, known))
    }

    /** Words before the source that tell the languages, where they do; languages that nothing can tell are refused. */
    private fun prefix(from: String?, to: String?): String {
        if (from == null && to == null) return ""
        pairs.firstOrNull { same(from, it[1]) && same(to, it[3]) }?.let { return form.prefixes.getValue(it.joinToString("_")) }
        if (pairs.isNotEmpty()) throw InvalidRequest(
            "this model does not translate $from to $to; it knows: ${pairs.joinToString(", ") { "${it[1]} to ${it[3]}" }}",
        )
        if (!form.needsTo && to != null && (form.to == null || !same(to, form.to))) throw InvalidRequest(
            "this model cannot be told to write $to" + if (form.to != null) "; it writes ${form.to}" else ": it has no languages to choose from",
        )
        val fixed = form.from?.takeIf { form.languages.isEmpty() }
        if (from != null && fixed != null && !same(from, fixed)) throw InvalidRequest("this model reads $fixed, not $from")
        return ""
    }

    override fun close() = own?.close() ?: Unit
}

/**
 * [WritingRules] as a constraint of sampling, so that every method keeps them.  [ends]: tokens that end a text; [prompt]: tokens that
 * it begins with; [length]: tokens that it may come to have, those included.
 */
internal class RuledText(
    private val rules: WritingRules, vocab: Int, ends: Collection<Int>, private val prompt: Int, length: Int,
) : Constraint {
    private val ends = ends.filter { it < vocab }
    private val last = if (rules.forcedEnd != null) length - 1 else -1
    private val always = BooleanArray(vocab) { true }
    private val longer = rules.badWords.filter { it.size > 1 }

    init {
        val single = rules.badWords.filter { it.size == 1 && it[0] !in this.ends }.map { it[0] }
        for (token in rules.suppressed + single) if (token < vocab) always[token] = false
    }

    override fun forced(prefix: List<Int>): Int? = rules.forcedEnd.takeIf { prefix.size == last }

    override fun allowed(prefix: List<Int>, row: FloatArray): BooleanArray {
        if (prefix.size == last) return BooleanArray(always.size) { it == rules.forcedEnd }
        val mask = always.copyOf()
        for (token in banned(prefix)) if (token < mask.size) mask[token] = false
        return mask
    }

    private fun banned(prefix: List<Int>): List<Int> {
        val found = ArrayList<Int>()
        val size = prefix.size
        if (size < maxOf(rules.least, prompt + rules.leastNew)) found += ends
        if (size == prompt) found += rules.beginSuppressed
        for (words in longer) {
            if (size >= words.size - 1 && prefix.subList(size - words.size + 1, size) == words.dropLast(1)) found += words.last()
        }
        val count = rules.noRepeat // no n-gram of this length may occur twice
        if (count in 1..size) {
            val tail = prefix.subList(size - count + 1, size)
            for (at in 0..size - count) if (prefix.subList(at, at + count - 1) == tail) found += prefix[at + count - 1]
        }
        return found
    }
}
