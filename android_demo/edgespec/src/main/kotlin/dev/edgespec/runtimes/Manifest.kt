package dev.edgespec.runtimes

import com.google.gson.JsonArray
import com.google.gson.JsonElement
import com.google.gson.JsonObject
import com.google.gson.JsonParseException
import com.google.gson.JsonParser
import dev.edgespec.BundleError
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.SamplingParams
import dev.edgespec.decoding.SkipSet
import java.io.File
import java.io.IOException
import java.math.BigDecimal

/* The manifest of a bundle (`edgespec.json`): reading it with errors a person can act on. */

const val SCHEMA = 3
private const val OLDEST = 2 // whose stock graphs call their inputs otherwise: see Binding
const val MANIFEST = "edgespec.json"
val METHODS = listOf("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode", "eagle", "mtp", "dflash")
val ELSEWHERE = listOf("assistant") // methods of bundles that this runtime does not have
private val MAIN_GRAPHS = listOf("gated", "strict", "plain", "native")
private const val EXPORT_AGAIN = "export the bundle again"

/** One ONNX file of a model; see the Python side for what the flags mean. */
class Graph(
    val file: String, val device: String, val gated: Boolean, val padded: Boolean, val hidden: Boolean, val operators: String,
    val leastLength: Int,
)

/** How native operators keep keys and values of a model, and whether a learnt format passed its gate. */
class AttentionPart(val default: String, val tables: String?, val learnt: List<String>, val passed: Map<String, Boolean>)

/** Heads beside the LM head that a graph can compute from hidden states; one gate switches a group. */
class HeadGroup(val name: String, val kind: String, val count: Int, val layer: Int, val inner: Int, val own: Boolean)

/**
 * A small decoder conditioned on hidden states of the target: rows that it is given have so many columns.  [block]: rows of
 * a pass that guesses, of a drafter of blocks, with token [mask] where guesses will be.  [lent]: it reads the target's keys.
 */
class DecoderPart(val kind: String, val columns: Int, val block: Int?, val mask: Int?, val lent: Boolean)

/** The tokens that a cut LM head scores: little-endian int32 [size]. */
class HeadVocab(val file: String, val size: Int)

/** A model of the bundle: its facts, its format and its graphs over one weight file. */
class ModelPart(
    val facts: ModelFacts, val format: String, val graphs: Map<String, Graph>, val weights: String, val index: String?,
    val layout: String, val headroom: Int, val minRows: Int, val attention: AttentionPart?, val heads: List<HeadGroup>,
    val headVocab: HeadVocab?, val cut: Boolean, val origin: String, val tapped: List<Int>, val decoder: DecoderPart?, val headFormat: String?,
    val embeddingFormat: String?,
) {
    /** The graph that can run every method: gated if there is one, else strict, else plain, else for native operators alone. */
    val main: String get() = MAIN_GRAPHS.first { it in graphs }

    /** Every file that this entry of the manifest uses. */
    fun named(): List<String> =
        listOfNotNull(weights, index, attention?.tables, headVocab?.file) + graphs.values.map { it.file }
}

/** Parameters of one decoding method. */
class MethodPart(
    val gamma: Int = 4, val skip: SkipSet? = null, val heads: List<String> = emptyList(),
    val ranks: List<List<Double>> = emptyList(), val threshold: Double? = null, val acceptance: List<Double>? = null,
    val draftCost: Double? = null, val firstCost: Double? = null, val predictedSpeedup: Double? = null,
)

class FileEntry(val size: Long, val sha256: String)

/** A prompt and the tokens that this bundle's own plain decoding wrote: another runtime must write the same. */
class GoldenVector(val prompt: IntArray, val method: String, val tokens: IntArray)

/** The whole manifest; [sampling]: how the model itself asks for tokens to be chosen. */
class Manifest(
    val target: ModelPart, val draft: ModelPart?, val drafter: ModelPart?, val methods: Map<String, MethodPart>, val bos: Int?, val eos: List<Int>,
    val sampling: SamplingParams,
    val cost: JsonObject, val provenance: JsonObject, val golden: List<GoldenVector>, val files: Map<String, FileEntry>,
) {
    /** A number among the measured costs; null if it is not there. */
    fun costNumber(name: String): Double? = cost[name]?.takeIf { it.isJsonPrimitive && it.asJsonPrimitive.isNumber }?.asDouble

    /** Milliseconds of passes by rows, as the export measured them; null if it did not. */
    val verifyMs: Map<Int, Double>?
        get() = (cost["verify_ms"] as? JsonObject)?.entrySet()?.associate { it.key.toInt() to it.value.asDouble }?.ifEmpty { null }
}

/** Reads typed values out of JSON, and says where something else stands. */
internal class Reader(private val file: File, private val data: JsonObject, private val where: String = "") {
    private val read = HashSet<String>()

    private fun at(name: String) = if (where.isEmpty()) name else "$where.$name"

    fun wrong(name: String, what: String): BundleError = BundleError("$file: ${at(name)}: $what", EXPORT_AGAIN)

    private fun find(name: String): JsonElement? {
        read.add(name)
        return data[name]?.takeIf { !it.isJsonNull }
    }

    private fun <T> need(name: String, found: T?): T = found ?: throw wrong(name, "Field required")

    fun textOrNull(name: String, allowed: List<String>? = null): String? = find(name)?.let {
        if (!it.isJsonPrimitive || !it.asJsonPrimitive.isString) throw wrong(name, "Input should be a valid string")
        val found = it.asString
        if (allowed != null && found !in allowed) {
            throw wrong(name, "Input should be ${allowed.joinToString(", ") { one -> "'$one'" }}")
        }
        found
    }

    fun text(name: String, allowed: List<String>? = null): String = need(name, textOrNull(name, allowed))

    fun pathOrNull(name: String): String? = textOrNull(name)?.also { checkInside(name, it) }

    fun path(name: String): String = need(name, pathOrNull(name))

    fun checkInside(name: String, path: String) {
        if (path.isEmpty() || path.startsWith("/") || path.split("/").any { it == ".." } || "\\" in path || ":" in path) {
            throw wrong(name, "Value error, path '$path' leaves the bundle: only relative paths inside the folder are allowed")
        }
    }

    fun longOrNull(name: String, least: Long = Long.MIN_VALUE, most: Long = Long.MAX_VALUE): Long? =
        find(name)?.let { whole(name, it, least, most) }

    private fun whole(name: String, it: JsonElement, least: Long, most: Long): Long {
        if (!it.isJsonPrimitive || !it.asJsonPrimitive.isNumber) throw wrong(name, "Input should be a valid integer")
        val number = try {
            BigDecimal(it.asString).longValueExact()
        } catch (_: ArithmeticException) {
            throw wrong(name, "Input should be a valid integer")
        }
        if (number < least) throw wrong(name, "Input should be greater than ${least - 1}")
        if (number > most) throw wrong(name, "Input should be at most $most")
        return number
    }

    fun int(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): Int = need(name, intOrNull(name, least, most))

    fun intOrNull(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): Int? =
        longOrNull(name, least.toLong(), most.toLong())?.toInt()

    fun numberOrNull(name: String): Double? = find(name)?.let {
        if (!it.isJsonPrimitive || !it.asJsonPrimitive.isNumber) throw wrong(name, "Input should be a valid number")
        it.asDouble
    }

    fun flag(name: String): Boolean = find(name)?.let {
        if (!it.isJsonPrimitive || !it.asJsonPrimitive.isBoolean) throw wrong(name, "Input should be a valid boolean")
        it.asBoolean
    } ?: false

    fun jsonOrNull(name: String): JsonObject? = find(name)?.let {
        if (!it.isJsonObject) throw wrong(name, "Input should be an object")
        it.asJsonObject
    }

    fun partOrNull(name: String): Reader? = jsonOrNull(name)?.let { Reader(file, it, at(name)) }

    fun part(name: String): Reader = need(name, partOrNull(name))

    /** Members of an object, by name. */
    fun <T> members(name: String, make: (String, Reader) -> T): Map<String, T> {
        val parent = jsonOrNull(name) ?: return emptyMap()
        return parent.entrySet().associate { (key, value) ->
            if (!value.isJsonObject) throw wrong("$name.$key", "Input should be an object")
            key to Reader(file, value.asJsonObject, at("$name.$key")).let { reader -> make(key, reader).also { reader.done() } }
        }
    }

    private fun array(name: String): List<JsonElement> {
        val found = find(name) ?: return emptyList()
        if (!found.isJsonArray) throw wrong(name, "Input should be a valid list")
        return found.asJsonArray.toList()
    }

    fun <T> parts(name: String, make: (Reader) -> T): List<T> = array(name).mapIndexed { at, value ->
        if (!value.isJsonObject) throw wrong("$name.$at", "Input should be an object")
        Reader(file, value.asJsonObject, at("$name.$at")).let { reader -> make(reader).also { reader.done() } }
    }

    fun ints(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): List<Int> =
        array(name).map { whole(name, it, least.toLong(), most.toLong()).toInt() }

    fun texts(name: String): List<String> = array(name).map {
        if (!it.isJsonPrimitive || !it.asJsonPrimitive.isString) throw wrong(name, "Input should be a valid string")
        it.asString
    }

    fun numbers(name: String): List<Double> = array(name).map { number(name, it) }

    private fun number(name: String, it: JsonElement): Double {
        if (!it.isJsonPrimitive || !it.asJsonPrimitive.isNumber) throw wrong(name, "Input should be a valid number")
        return it.asDouble
    }

    fun lists(name: String): List<List<Double>> = array(name).map { row ->
        if (!row.isJsonArray) throw wrong(name, "Input should be a valid list")
        row.asJsonArray.map { number(name, it) }
    }

    /** What this runtime has no use for. */
    fun ignore(vararg names: String) = read.addAll(names)

    /** Unknown keys are errors, so that a typo in a manifest cannot pass silently. */
    fun done() {
        data.keySet().firstOrNull { it !in read }?.let { throw wrong(it, "Extra inputs are not permitted") }
    }
}

/** Read and validate `folder/edgespec.json`. */
fun readManifest(folder: File): Manifest {
    val path = File(folder, MANIFEST)
    if (!path.isFile) {
        val what = if (folder.isDirectory) "has no $MANIFEST" else "is not a folder"
        throw BundleError("$folder: expected a bundle, but it $what", "make one with `edgespec export MODEL`")
    }
    val data = try {
        JsonParser.parseString(Charsets.UTF_8.newDecoder().decode(java.nio.ByteBuffer.wrap(path.readBytes())).toString())
    } catch (error: JsonParseException) {
        throw BundleError("$path: not readable as JSON: ${error.message}", EXPORT_AGAIN, error)
    } catch (error: IOException) {
        throw BundleError("$path: not readable as JSON: ${error.message}", EXPORT_AGAIN, error)
    } catch (error: StackOverflowError) { // nested without end
        throw BundleError("$path: not readable as JSON: nested too deeply", EXPORT_AGAIN, error)
    }
    val given = (data as? JsonObject)?.get("schema_version")
    val version = given?.takeIf { it.isJsonPrimitive && it.asJsonPrimitive.isNumber }?.asString?.toIntOrNull()
        ?: throw BundleError("$path: expected an object with an integer schema_version, got ${given ?: "None"}")
    if (version < OLDEST) {
        throw BundleError(
            "$path: schema $version is older than this edgespec, which reads from schema $OLDEST on",
            "export the bundle again with this version",
        )
    }
    if (version > SCHEMA) {
        throw BundleError(
            "$path: schema $version is newer than this edgespec, which reads up to schema $SCHEMA",
            "upgrade edgespec, or export the bundle with this version",
        )
    }
    try {
        return manifest(Reader(path, data.asJsonObject))
    } catch (error: NumberFormatException) { // a number that is none, such as 1e999999999
        throw BundleError("$path: ${error.message}", EXPORT_AGAIN, error)
    }
}

private fun manifest(of: Reader): Manifest {
    of.ignore("schema_version", "parity", "memory")
    of.text("edgespec_version")
    val tokenizer = of.part("tokenizer")
    tokenizer.flag("chat_template")
    val found = Manifest(
        target = model(of.part("target")),
        draft = of.partOrNull("draft")?.let(::model),
        drafter = of.partOrNull("drafter")?.let(::model),
        methods = of.members("methods") { _, reader -> method(reader) }.filterKeys { it in METHODS },
        bos = tokenizer.intOrNull("bos"),
        eos = tokenizer.ints("eos"),
        sampling = of.partOrNull("sampling")?.let(::sampling) ?: SamplingParams(),
        cost = of.jsonOrNull("cost") ?: JsonObject(),
        provenance = of.jsonOrNull("provenance") ?: JsonObject(),
        golden = of.parts("golden") { GoldenVector(it.ints("prompt").toIntArray(), it.text("method"), it.ints("tokens").toIntArray()) },
        files = of.members("files") { name, it ->
            of.checkInside("files", name)
            FileEntry(it.longOrNull("size") ?: throw it.wrong("size", "Field required"), it.text("sha256"))
        },
    )
    tokenizer.done()
    of.done()
    found.drafter?.let {
        val columns = (1 + found.target.tapped.size) * found.target.facts.hidden
        if ((it.decoder?.lent != true && it.facts.hidden != found.target.facts.hidden) || it.facts.vocab != found.target.facts.vocab || it.decoder?.columns != columns) {
            throw of.wrong("drafter", "of another hidden size, vocabulary or number of taps than the target")
        }
    }
    return found
}

private fun model(of: Reader): ModelPart {
    of.ignore("quantizer", "fine", "converted")
    val headVocab = of.partOrNull("head_vocab")
    val decoder = of.partOrNull("decoder")?.let {
        val kind = it.text("kind", listOf("eagle", "mtp", "dflash") + ELSEWHERE)
        val lent = it.ints("reads", 0).isNotEmpty()
        DecoderPart(kind, it.int("columns", 1, MOST_WIDTH), it.intOrNull("block", 2, MOST_WIDTH), it.intOrNull("mask", 0), lent).also { _ -> it.done() }
    }
    val found = ModelPart(
        facts = facts(of.part("facts"), decoder?.lent == true),
        format = of.text("format", FORMATS),
        graphs = of.members("graphs") { _, it ->
            it.ignore("precision") // of graphs for devices, which also leave out layers for good
            skipSet(it)
            Graph(
                it.path("file"), it.textOrNull("device", listOf("cpu", "webgpu")) ?: "cpu", it.flag("gated"), it.flag("padded"),
                it.flag("hidden"), it.textOrNull("operators", listOf("stock", "native")) ?: "stock",
                it.intOrNull("least_length", 1, 1 shl 10) ?: 0,
            )
        },
        weights = of.path("weights"),
        index = of.pathOrNull("index"),
        layout = of.textOrNull("layout", listOf("stock", "native")) ?: "stock",
        headroom = of.int("headroom", 1, 1 shl 12),
        minRows = of.int("min_rows", 0, 1),
        attention = of.partOrNull("attention")?.let {
            it.ignore("positions", "depth", "text", "text_sha256")
            AttentionPart(
                it.text("default", ATTENTION.keys.toList()), it.pathOrNull("tables"), it.texts("learnt"),
                it.members("gates") { _, gate ->
                    gate.ignore("perplexity_change", "agreement")
                    gate.flag("passed")
                },
            ).also { _ -> it.done() }
        },
        heads = of.parts("heads") {
            HeadGroup(
                it.text("name"), it.text("kind", listOf("medusa", "blockwise", "exit")), it.int("count", 1), it.intOrNull("layer", 0) ?: 0,
                it.intOrNull("inner", 0, MOST_WIDTH) ?: 0, it.flag("own"),
            )
        },
        headVocab = headVocab?.let { HeadVocab(it.path("file"), it.int("size", 1)) },
        cut = of.flag("cut"),
        origin = of.textOrNull("origin", listOf("edgespec", "optimum")) ?: "edgespec",
        tapped = of.ints("tapped", 0),
        decoder = decoder,
        headFormat = of.textOrNull("head_format", FORMATS),
        embeddingFormat = of.textOrNull("embedding_format", FORMATS),
    )
    headVocab?.done()
    of.done()
    if (MAIN_GRAPHS.none { it in found.graphs }) throw of.wrong("graphs", "there is none to decode with")
    if (found.tapped.any { it > found.facts.layers }) throw of.wrong("tapped", "after more than ${found.facts.layers} layers")
    found.decoder?.let { if (it.columns <= found.facts.hidden) throw of.wrong("decoder", "${it.columns} columns, of which the embedding has ${found.facts.hidden}") }
    if (found.cut && found.headVocab == null) throw of.wrong("cut", "without head_vocab")
    return found
}

/** Without a temperature the model says nothing of sampling, and plain decoding's default stands. */
private fun sampling(of: Reader): SamplingParams = try {
    SamplingParams(
        of.numberOrNull("temperature") ?: 0.0, of.intOrNull("top_k") ?: 0, of.numberOrNull("top_p") ?: 1.0,
        of.numberOrNull("min_p") ?: 0.0, of.numberOrNull("repetition_penalty") ?: 1.0,
    ).also { of.done() }
} catch (error: InvalidRequest) {
    throw of.wrong("sampling", error.what)
}

private fun skipSet(of: Reader): SkipSet? =
    of.partOrNull("skip")?.let { SkipSet(it.ints("attention", 0), it.ints("mlp", 0)).also { _ -> it.done() } }

private fun method(of: Reader): MethodPart {
    of.ignore("branch", "notes")
    return MethodPart(
        gamma = of.intOrNull("gamma", 1) ?: 4,
        skip = skipSet(of),
        heads = of.texts("heads"),
        ranks = of.lists("ranks"),
        threshold = of.numberOrNull("threshold"),
        acceptance = of.parts("measured") {
            it.ignore("positions", "text", "text_sha256")
            it.numbers("acceptance")
        }.firstOrNull(),
        draftCost = of.numberOrNull("draft_cost"),
        firstCost = of.numberOrNull("first_cost"),
        predictedSpeedup = of.numberOrNull("predicted_speedup"),
    )
}

/* What decoding and planning need to know of a model: its sizes. */

private const val MOST_LAYERS = 1 shl 10 // every number of a manifest becomes a size, a count or an offset
internal const val MOST_WIDTH = 1 shl 20
private const val MOST_VOCAB = 1 shl 24
private const val MOST_CONTEXT = 1 shl 24
private const val MOST_TAPS = 16

/** The heads of gated delta rules: [values] states [keyDim, valueDim] a layer, on [keys] queries and keys. */
class DeltaHeads(val keys: Int, val values: Int, val keyDim: Int, val valueDim: Int) {
    /** Queries, keys and values of a token, side by side. */
    val mixed: Int get() = 2 * keys * keyDim + values * valueDim
}

/** Mixtures of experts: each row goes to [chosen] of [count] MLPs of width [inner]. */
class ExpertFacts(val count: Int, val chosen: Int, val inner: Int)

/**
 * What decoding and planning need to know of a model; sizes in elements.
 *
 * @property convolutions layers with a short one instead of attention, each of which sees [taps] tokens.
 * @property delta gated delta rules behind those convolutions.
 * @property shared last layers, which read keys and values of earlier ones.
 * @property layerEmbedding width of a layer's own embedding of tokens.
 * @property angles channels that each table of angles turns; empty = positions are learned.
 * @property tied whether LM head and embedding are one matrix.
 */
class ModelFacts(
    val architecture: String, val layers: Int, val hidden: Int, val intermediate: Int, val heads: Int, val kvHeads: Int,
    val headDim: Int, val vocab: Int, val context: Int, val convolutions: List<Int>, val taps: Int, val delta: DeltaHeads?,
    headDims: List<Int>, val shared: Int, val layerEmbedding: Int, val angles: List<Int>, val tied: Boolean, val experts: ExpertFacts?,
) {
    /** Layers with keys and values. */
    val kvLayers: Int = layers - convolutions.size - shared

    /** Size of a head of each layer with keys and values. */
    val dims: List<Int> = headDims.ifEmpty { List(maxOf(0, kvLayers)) { headDim } }
}

/** Facts of a manifest, as far as they go together; [lent]: all layers read another model's keys. */
internal fun facts(of: Reader, lent: Boolean): ModelFacts {
    of.ignore("parameters") // what people are told
    fun width(name: String, from: Reader = of) = from.int(name, 1, MOST_WIDTH)
    val headDims = of.ints("head_dims", 1, MOST_WIDTH)
    val found = ModelFacts(
        of.text("architecture"), of.int("layers", 1, MOST_LAYERS), width("hidden"), width("intermediate"), width("heads"),
        width("kv_heads"), width("head_dim"), of.int("vocab", 1, MOST_VOCAB), of.int("context", 1, MOST_CONTEXT),
        of.ints("convolutions", 0, MOST_LAYERS), of.intOrNull("taps", 0, MOST_TAPS) ?: 0,
        of.partOrNull("delta")?.let {
            it.flag("space") // Mamba-2: another rule, in the graph, on states of the same kind
            DeltaHeads(width("keys", it), width("values", it), width("key_dim", it), width("value_dim", it)).also { _ -> it.done() }
        },
        headDims, of.intOrNull("shared", 0, MOST_LAYERS) ?: 0, of.intOrNull("layer_embedding", 0, MOST_WIDTH) ?: 0, angles(of), of.flag("tied"),
        of.partOrNull("experts")?.let {
            val mixed = ExpertFacts(width("count", it), width("chosen", it), width("inner", it))
            val layers = it.ints("layers", 0, MOST_LAYERS)
            val always = it.intOrNull("always", 0, MOST_WIDTH) ?: 0 // of both, which get every row
            it.done()
            if (always >= mixed.chosen || mixed.chosen > mixed.count || layers.any { layer -> layer >= of.int("layers") }) {
                throw of.wrong("experts", "${mixed.chosen} of ${mixed.count} experts in layers $layers")
            }
            mixed
        },
    )
    of.done()
    val short = found.convolutions
    val (heads, kvHeads, layers) = Triple(found.heads, found.kvHeads, found.layers)
    when {
        short.isNotEmpty() && (short != short.distinct().sorted().filter { it < layers } || found.taps < 2) ->
            throw of.wrong("convolutions", "$short of ${found.taps} tokens in $layers layers")
        found.delta != null && short.isEmpty() -> throw of.wrong("delta", "without convolutions")
        (found.shared >= layers && !lent) || found.shared > layers || (headDims.isNotEmpty() && headDims.size != found.kvLayers) ->
            throw of.wrong("head_dims", "of ${headDims.size} layers, ${found.shared} of $layers shared")
        heads % kvHeads != 0 || (found.kvLayers < 1 && !lent) -> throw of.wrong("kv_heads", "$heads heads do not share $kvHeads KV heads evenly")
    }
    return found
}

/** Channels that each table of angles turns; Gemma has one for windowed layers and one for the others. */
private fun angles(of: Reader): List<Int> {
    val rope = of.jsonOrNull("rope")?.takeIf { it.size() > 0 } ?: return emptyList()
    try {
        val others = (rope["other_dims"] as? JsonArray)?.map { it.asDouble.toInt() } ?: emptyList()
        return listOf(rope["dims"]?.asDouble?.toInt() ?: of.int("head_dim")) + others
    } catch (error: RuntimeException) { // no number
        throw of.wrong("rope", "dims: ${error.message}")
    }
}
