package dev.edgespec.runtimes

import dev.edgespec.*
import java.io.File
import java.nio.ByteBuffer
import java.util.TreeMap

/* KV cache of native operators: sizes, the operator's control numbers, and the choice of a session's format. */

/** Formats of one model's cache: keys, values, a coarser copy of the keys for drafts, and how many keys are exact. */
data class KvFormat(
    val keys: String, val values: String, val codes: String? = null, val window: Int = 0, val sinks: Int = 0, val draftWindow: Int = 0,
) {
    val ring: Int
        get() = maxOf(window, draftWindow).let { if (it > 0) up(it + LONGEST_PASS, TILE) else 0 }

    /** Bytes of states and exact keys, all layers. */
    fun headerBytes(facts: ModelFacts): Long {
        val rows = if (ring > 0) ring + SINK_ROWS else 0
        return stateBytes(facts) + 2L * facts.kvHeads * rows * facts.dims.sumOf { up(it, TILE) }
    }

    /** Bytes of 128 tokens, all layers. */
    fun blockBytes(facts: ModelFacts): Long =
        facts.kvHeads * facts.dims.sumOf { dim -> listOfNotNull(keys, values, codes).sumOf { headBytes(it, up(dim, TILE)) } }

    /** Bytes of a cache of at least this many tokens. */
    fun nbytes(facts: ModelFacts, tokens: Int): Long = headerBytes(facts) + up(tokens, KV_BLOCK) / KV_BLOCK * blockBytes(facts)

    /** Controls 1 to 7 of the operator: keys, values, codes, whether to read those, window, sinks, ring. */
    fun controls(): LongArray = longArrayOf(
        KEYS.getValue(keys).number, KEYS.getValue(values).number, codes?.let { KEYS.getValue(it).number } ?: NO_KEYS.toLong(), 0,
        window.toLong(), if (window > 0) sinks.toLong() else 0, ring.toLong(),
    )

    /** All that is set, as Python says it. */
    fun named(): String = listOf(
        "keys" to keys, "values" to values, "codes" to codes, "window" to window, "sinks" to sinks, "draft_window" to draftWindow,
    ).filter { it.second != null && it.second != 0 }.joinToString(", ") { (name, value) -> "$name $value" }

    val approximations: List<String>
        get() {
            val exact = if (window > 0 && keys !in listOf("f32", "f16")) ", float16 for the newest $window" else ""
            val found = if (keys == "f32") emptyList() else listOf("${KEYS.getValue(keys).title} keys$exact")
            return if (values == "f32") found else found + "${KEYS.getValue(values).title} values"
        }
}

internal fun up(value: Int, to: Int): Int = (value + to - 1) / to * to

/** The largest head's size, rounded up to vectors. */
internal fun paddedDim(facts: ModelFacts) = up(facts.dims.max(), TILE)

/**
 * Bytes of all states of layers without attention: the same for every length of text.  A layer has a convolution's inputs from the last
 * tokens, [144, width] float32.  A delta rule also has its states and, in 64 separate bytes, the number of tokens in them.
 */
internal fun stateBytes(facts: ModelFacts): Long =
    facts.convolutions.size * (4L * STATE_ROWS * stateWidth(facts) + matrixBytes(facts))

/** Bytes of a checkpoint of all states: their matrices, and what the next token's convolutions see. */
internal fun checkpointBytes(facts: ModelFacts): Long =
    if (facts.convolutions.isEmpty()) 0 else facts.convolutions.size * (4L * (facts.taps - 1) * stateWidth(facts) + matrixBytes(facts))

/** Numbers that a layer without attention keeps of a token; of a delta rule also decays and changes. */
internal fun stateWidth(facts: ModelFacts): Int = facts.delta?.let { it.mixed + 2 * up(it.values, TILE) } ?: facts.hidden

/** Bytes of the states of a layer with a delta rule, and of how many tokens they hold. */
private fun matrixBytes(facts: ModelFacts): Long = facts.delta?.let { 4L * it.values * it.keyDim * it.valueDim + HELD_BYTES } ?: 0

private fun headBytes(name: String, dim: Int): Long = KEYS.getValue(name).let { it.channel.toLong() * dim + it.scales }

/** The default attention format of a model: exact up to rounding. */
fun exactAttention(part: ModelPart): String = if (part.format == "fp32") "f32" else "f16"

/** How an encoder keeps keys during a pass: those of int4 and int8 lose nothing by int8, and passes over hundreds of rows are faster. */
internal fun encoderKeys(part: ModelPart): KvFormat = ATTENTION.getValue(if (part.format == "fp32") "f32" else "int8")

/** How a session keeps keys and values: the attention that decides the text, and the coarser one that self-drafts read. */
class AttentionChoice(val name: String, val draft: String? = null, val kv: KvFormat? = null)

fun chooseAttention(part: ModelPart, operators: String, wanted: String? = null, draft: String? = null): AttentionChoice {
    for ((name, known, option) in listOf(
        Triple(wanted, ATTENTION.keys.toList(), "attention"), Triple(draft, DRAFT_ATTENTION, "draft attention"),
    )) {
        if (name != null && name !in known) throw InvalidRequest("unknown $option '$name'", "$option: ${known.joinToString(", ")}")
    }
    if (operators == "stock") {
        if (draft == null && wanted in listOf(null, "f32")) return AttentionChoice("f32")
        val what = if (wanted !in listOf(null, "f32")) "attention $wanted" else "draft attention $draft"
        throw InvalidRequest("$what needs native operators", "see `edgespec info` for why they are off")
    }
    val name = wanted ?: part.attention?.default ?: exactAttention(part)
    checkLearnt(part, name, "attention")
    if (name == "nomad2" && part.attention?.passed?.get(name) == false) throw InvalidRequest(
        "attention nomad2 failed this bundle's quality gate",
        "use nomad or int4; draft attention nomad2 stays possible, because drafts change no text",
    )
    val kv = ATTENTION.getValue(name)
    if (draft == null) return AttentionChoice(name, null, kv)
    if (draft == name) throw InvalidRequest("drafts read $draft keys anyway: that is the attention", "leave the draft attention out")
    checkLearnt(part, draft, "draft attention")
    val codes = ATTENTION.getValue(draft)
    return AttentionChoice(name, draft, kv.copy(codes = codes.keys, draftWindow = codes.window, sinks = maxOf(kv.sinks, EXACT_SINKS)))
}

private fun checkLearnt(part: ModelPart, name: String, option: String) {
    val keys = ATTENTION.getValue(name).keys
    if (keys in LEARNT && (part.attention == null || keys !in part.attention.learnt)) throw InvalidRequest(
        "$option $name needs tables learnt from text, and this bundle has none for it", "export it with `--attention $name`",
    )
}

/** Learned tables of the keys' format, then of the codes' format, as the operator reads them; empty for formats without tables. */
internal fun readTables(folder: File, part: ModelPart, kv: KvFormat): FloatArray {
    val needed = listOfNotNull(kv.keys, kv.codes).filter { it in LEARNT }
    if (needed.isEmpty()) return FloatArray(0)
    val name = part.attention?.tables
        ?: throw BundleError("$folder: ${needed[0]} keys need tables, and there are none", "export the bundle again")
    val file = File(folder, name)
    return needed.map { name -> readTensor(file, name, tableSize(name, part.facts)) }.reduce { all, more -> all + more }
}

private fun tableSize(name: String, facts: ModelFacts): Int {
    val dim = paddedDim(facts)
    return facts.kvLayers * facts.kvHeads * if (name == "int4") 2 * dim else CENTROIDS * dim
}

private fun readTensor(file: File, name: String, size: Int): FloatArray = try {
    java.io.RandomAccessFile(file, "r").use { data ->
        val length = java.lang.Long.reverseBytes(data.readLong())
        require(length in 2..(1L shl 20)) { "a header of $length bytes" }
        val header = com.google.gson.JsonParser.parseString(String(ByteArray(length.toInt()).also(data::readFully))).asJsonObject
        val entry = header.getAsJsonObject(name) ?: throw IllegalArgumentException("$name: expected float32, got nothing")
        val (first, last) = entry.getAsJsonArray("data_offsets").map { it.asLong }
        require(entry["dtype"].asString == "F32" && last - first == 4L * size) {
            "$name: expected $size float32, got ${entry["dtype"]} of ${last - first} bytes"
        }
        data.seek(8 + length + first)
        val bytes = ByteArray(4 * size).also(data::readFully)
        val floats = java.nio.ByteBuffer.wrap(bytes).order(java.nio.ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
        FloatArray(size).also { floats.get(it) }
    }
} catch (error: Exception) { // any defect
    throw BundleError("$file: not readable: ${error.message}", "export the bundle again", error)
}

/**
 * One way to run a bundle, nothing left open: what memory is predicted for.  [context] tokens are held at once; [kv] null = what
 * the bundle was exported for; [gamma]: of a tree its nodes; [greedy]: only the likeliest token of a row is needed.
 */
data class RunOptions(
    val method: String = "ar", val operators: String = "native", val context: Int = 512, val kv: KvFormat? = null,
    val gamma: Int = GAMMA, val chunk: Int = PREFILL_CHUNK, val greedy: Boolean = true, val checkpoints: Int = CHECKPOINTS,
)

private const val LEAST = 16 // tokens: shorter beginnings are read again as fast
private const val ASKING = 32 // maximum tokens of a template's request for an answer

/**
 * Checkpoints of one slot's states: copies at chosen lengths of a text, because a state cannot be cropped.
 *
 * A text that is cropped to before the states is read again from the last checkpoint that is still a prefix of it.  A checkpoint holds the
 * matrices, and only the rows of the ring that the next tokens see; keys and values stay in the cache.
 */
internal class Checkpoints(private val facts: ModelFacts) {
    private var most = CHECKPOINTS // that are kept: the first one, usually the end of the system prompt, and the newest ones
    private val kept = TreeMap<Int, ByteArray>() // by tokens of the text
    private val row = 4 * stateWidth(facts)
    private val layer = (stateBytes(facts) / facts.convolutions.size).toInt()
    val lengths: List<Int> get() = kept.keys.toList() // tokens of the text at each
    val nbytes: Long get() = kept.values.sumOf { it.size.toLong() } // bytes of all

    /** Copy the states of a cache; they hold exactly [tokens] tokens, more than any checkpoint's. */
    fun take(cache: ByteBuffer, tokens: Int) {
        crop(tokens - 1)
        if (tokens < LEAST || most == 0) return
        kept[tokens] = copy(cache, tokens)
        bound()
    }

    /** Copy the part of a cache's states that is read after [tokens] tokens, which they hold exactly. */
    fun copy(cache: ByteBuffer, tokens: Int): ByteArray = ByteArray(checkpointBytes(facts).toInt()).also { states ->
        pieces(cache, tokens) { from, at, size -> from.get(states, at, size) }
    }

    /** Restore the states that [copy] saved at [tokens] tokens -> whether the size is right. */
    fun put(cache: ByteBuffer, tokens: Int, states: ByteArray): Boolean {
        val same = states.size.toLong() == checkpointBytes(facts)
        if (same) pieces(cache, tokens) { to, at, size -> to.put(states, at, size) }
        return same
    }

    /** Restore the states of the longest checkpoint of at most [most] tokens -> its length (0: there is none); drops later ones. */
    fun restore(cache: ByteBuffer, most: Int): Int {
        crop(most)
        val (length, states) = kept.lastEntry() ?: return 0
        put(cache, length, states)
        return length
    }

    fun crop(most: Int) = kept.tailMap(most, false).clear()

    fun share(other: Checkpoints, most: Int) {
        kept.clear()
        kept.putAll(other.kept.headMap(most, true))
        bound()
    }

    fun limit(most: Int) {
        this.most = most
        bound()
    }

    private fun bound() {
        while (kept.size > most) kept.remove(lengths[if (most > 0) minOf(1, most - 1) else 0])
    }

    /** Each layer's rows of the ring that the token after [tokens] sees, then what else there is of each. */
    private inline fun pieces(cache: ByteBuffer, tokens: Int, use: (ByteBuffer, Int, Int) -> Unit) {
        val part = cache.duplicate()
        val ring = STATE_ROWS * row
        var at = 0
        val layers = facts.convolutions.indices.map { it * layer }
        val rows = layers.flatMap { first -> (tokens - facts.taps + 1 until tokens).map { first + it % STATE_ROWS * row to row } }
        for ((place, size) in rows + layers.map { it + ring to layer - ring }) {
            part.position(place)
            use(part, at, size)
            at += size
        }
    }
}

/** Likely lengths of common prefixes with other prompts: the first turn, the last, or all except the request for the answer. */
internal fun endsOfTurns(tokens: IntArray, eos: Set<Int>): List<Int> {
    val ends = (1 until tokens.size).filter { tokens[it - 1] in eos }
    val whole = tokens.size - 1
    return (ends.take(1) + ends.takeLast(1) + if (whole - (ends.lastOrNull() ?: 0) > ASKING) listOf(whole) else emptyList()).distinct()
}

/** Length of a prompt without what only asks for an answer: up to its last turn's end, else all of it. */
internal fun endOfQuestion(tokens: IntArray, eos: Set<Int>): Int =
    (tokens.size downTo maxOf(tokens.size - ASKING, 0) + 1).firstOrNull { tokens[it - 1] in eos } ?: tokens.size
