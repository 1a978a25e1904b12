package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.drafters.hex
import java.io.File
import java.io.IOException
import java.math.BigDecimal
import java.security.MessageDigest

/* The manifest of a bundle (`edgespec.json`): reading it with errors a person can act on. */

const val SCHEMA = 5
private const val OLDEST = 2 // whose stock graphs call their inputs otherwise: see Binding
const val MANIFEST = "edgespec.json"
val DRAFTERS = listOf("eagle", "mtp", "dflash") // methods whose drafter reads hidden states, a kind each
val METHODS = listOf("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode") + DRAFTERS
val ELSEWHERE = listOf("eagle1", "peagle", "dspark", "assistant") // methods of bundles that this runtime does not have
private val OPERATORS = listOf("stock", "native")
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
 * a pass that guesses, of a drafter of blocks, with token [mask] where guesses will be.  [borrows]: it reads the target's keys.
 */
class DecoderPart(val kind: String, val columns: Int, val block: Int?, val mask: Int?, val borrows: Boolean)

/** The tokens that a cut LM head scores: little-endian int32 [size]. */
class HeadVocab(val file: String, val size: Int)

/** A model of the bundle: its facts, its format and its graphs over one weight file. */
class ModelPart(
    val facts: ModelFacts, val format: String, val graphs: Map<String, Graph>, val weights: String, val index: String?,
    val layout: String, val headroom: Int, val minRows: Int, val attention: AttentionPart?, val heads: List<HeadGroup>,
    val headVocab: HeadVocab?, val cut: Boolean, val origin: String, val tapped: List<Int>, val decoder: DecoderPart?,
    val headFormat: String?, val embeddingFormat: String?, val planes: Boolean, val source: SourcePart?, val encoder: ModelPart?,
) {
    /** The graph that can run every method: gated if there is one, else strict, else plain, else for native operators alone. */
    val main: String get() = MAIN_GRAPHS.first { it in graphs }

    /** Whether of int8 weights in two planes only the high ones are read: a model of 4 bits. */
    var highAlone = false
        internal set

    fun named(): List<String> =
        listOfNotNull(weights, index, attention?.tables, headVocab?.file) + graphs.values.map { it.file } +
            (encoder?.named() ?: emptyList())
}

class MethodPart(
    val gamma: Int = 4, val skip: SkipSet? = null, val heads: List<String> = emptyList(),
    val ranks: List<List<Double>> = emptyList(), val threshold: Double? = null, val acceptance: List<Double>? = null,
    val confidence: List<Double> = emptyList(), val draftCost: Double? = null, val firstCost: Double? = null, val predictedSpeedup: Double? = null,
)

class FileEntry(val size: Long, val sha256: String)

/**
 * A prompt and the tokens that this bundle's own plain decoding wrote: another runtime must write the same.  [begin]: of an
 * encoder-decoder, whose prompt is what the encoder reads: what the decoder's text begins with.
 */
class GoldenVector(val prompt: IntArray, val method: String, val tokens: IntArray, val begin: IntArray?)

/**
 * The whole manifest; [sampling]: how the model itself asks for tokens to be chosen; [text] and [speech]: what stands around the
 * texts of an encoder-decoder, and what transcripts begin with.
 */
class Manifest(
    val target: ModelPart, val draft: ModelPart?, val drafter: ModelPart?, val methods: Map<String, MethodPart>, val bos: Int?,
    val eos: List<Int>, val sampling: SamplingParams, val text: TextForm?, val speech: SpeechPart?,
    val cost: JsonObject, val provenance: JsonObject, val golden: List<GoldenVector>, val files: Map<String, FileEntry>,
) {
    /** Every model of the bundle, the target first; encoders stand last. */
    val models: List<ModelPart> get() = listOfNotNull(target, draft, drafter).let { all -> all + all.mapNotNull { it.encoder } }

    /**
     * What of this can run: with [high], the high planes of int8 alone, of which nothing else was measured.  Only native operators
     * ([native]) that have low planes, too, can draft by leaving these out.
     */
    internal fun runAs(native: Boolean, high: Boolean): Manifest {
        if (high && !(native && target.planes)) throw InvalidRequest(
            "precision high: expected int8 weights in two planes and native operators, got ${target.format}",
            "export with `--format int8`, or leave it out",
        )
        models.forEach { it.highAlone = high && it.planes }
        val kept = methods.filter { (name, part) -> name != "self-spec" || part.skip?.size != 0 || (native && target.planes && !high) }
        val (measured, wrote) = if (high) JsonObject() to emptyList() else cost to golden
        return Manifest(target, draft, drafter, kept, bos, eos, sampling, text, speech, measured, provenance, wrote, files)
    }

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
    fun wrong(name: String, what: String, hint: String? = EXPORT_AGAIN): BundleError = BundleError("$file: ${at(name)}: $what", hint)

    private fun <T> find(name: String, value: (String, JsonElement) -> T): T? {
        read.add(name)
        return data[name]?.takeIf { !it.isJsonNull }?.let { value(name, it) }
    }

    private fun <T> need(name: String, found: T?): T = found ?: throw wrong(name, "Field required")

    private inline fun primitive(name: String, it: JsonElement, what: String, fits: (JsonPrimitive) -> Boolean): JsonPrimitive =
        (it as? JsonPrimitive)?.takeIf(fits) ?: throw wrong(name, "Input should be a valid $what")

    private fun string(name: String, it: JsonElement): String = primitive(name, it, "string") { found -> found.isString }.asString
    private fun number(name: String, it: JsonElement): Double = primitive(name, it, "number") { found -> found.isNumber }.asDouble
    private fun json(name: String, it: JsonElement): JsonObject = it as? JsonObject ?: throw wrong(name, "Input should be an object")

    private fun array(name: String, it: JsonElement): List<JsonElement> =
        (it as? JsonArray ?: throw wrong(name, "Input should be a valid list")).toList()

    private fun whole(name: String, it: JsonElement, least: Long, most: Long): Long {
        val number = try {
            BigDecimal(primitive(name, it, "integer") { found -> found.isNumber }.asString).longValueExact()
        } catch (_: ArithmeticException) {
            throw wrong(name, "Input should be a valid integer")
        }
        if (number < least) throw wrong(name, "Input should be greater than ${least - 1}")
        if (number > most) throw wrong(name, "Input should be at most $most")
        return number
    }

    private fun <T> part(name: String, it: JsonElement, make: Reader.() -> T): T =
        Reader(file, json(name, it), at(name)).let { reader -> reader.make().also { reader.done() } }

    private fun <T> each(name: String, value: (String, JsonElement) -> T): List<T> =
        (find(name, ::array) ?: emptyList()).map { value(name, it) }

    fun textOrNull(name: String, allowed: List<String>? = null): String? = find(name, ::string)?.also {
        if (allowed != null && it !in allowed) throw wrong(name, "Input should be ${allowed.joinToString(", ") { one -> "'$one'" }}")
    }

    fun text(name: String, allowed: List<String>? = null): String = need(name, textOrNull(name, allowed))
    fun pathOrNull(name: String): String? = textOrNull(name)?.also { checkInside(name, it) }
    fun path(name: String): String = need(name, pathOrNull(name))

    fun checkInside(name: String, path: String) {
        if (path.isEmpty() || path.startsWith("/") || path.split("/").any { it == ".." } || "\\" in path || ":" in path) {
            throw wrong(name, "Value error, path '$path' leaves the bundle: only relative paths inside the folder are allowed")
        }
    }

    fun long(name: String): Long = need(name, find(name) { _, it -> whole(name, it, Long.MIN_VALUE, Long.MAX_VALUE) })
    fun int(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): Int = need(name, intOrNull(name, least, most))

    fun intOrNull(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): Int? =
        find(name) { _, it -> whole(name, it, least.toLong(), most.toLong()).toInt() }

    fun numberOrNull(name: String): Double? = find(name, ::number)

    fun flag(name: String): Boolean =
        find(name) { _, it -> primitive(name, it, "boolean") { found -> found.isBoolean }.asBoolean } ?: false

    fun wordOrFlag(name: String): String? = find(name) { _, it -> primitive(name, it, "boolean or string") { found -> !found.isNumber }.asString }

    fun jsonOrNull(name: String): JsonObject? = find(name, ::json)
    fun <T> partOrNull(name: String, make: Reader.() -> T): T? = find(name) { _, it -> part(name, it, make) }
    fun <T> part(name: String, make: Reader.() -> T): T = need(name, partOrNull(name, make))

    private fun <T> named(name: String, value: (String, JsonElement) -> T): Map<String, T> =
        jsonOrNull(name)?.entrySet()?.associate { (key, it) -> key to value("$name.$key", it) } ?: emptyMap()

    fun <T> members(name: String, make: Reader.(String) -> T): Map<String, T> =
        named(name) { at, it -> part(at, it) { make(at.removePrefix("$name.")) } }

    fun namedInts(name: String): Map<String, Int> = named(name) { at, it -> whole(at, it, 0, MOST_TOKEN).toInt() }
    fun namedTexts(name: String): Map<String, String> = named(name, ::string)

    fun <T> parts(name: String, make: Reader.() -> T): List<T> =
        (find(name, ::array) ?: emptyList()).mapIndexed { at, value -> part("$name.$at", value, make) }

    fun intsOrNull(name: String): List<Int>? = if (data[name] == null) null else ints(name)
    fun ints(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): List<Int> =
        each(name) { _, it -> whole(name, it, least.toLong(), most.toLong()).toInt() }

    /** Tokens, and places for which -1 - their index in [places] stands. */
    fun tokensOr(name: String, places: List<String>): List<Int> = each(name) { _, it ->
        val at = places.indexOf((it as? JsonPrimitive)?.takeIf { word -> word.isString }?.asString)
        if (at < 0) whole(name, it, 0, MOST_TOKEN).toInt() else -1 - at
    }

    fun texts(name: String): List<String> = each(name, ::string)
    fun numbers(name: String): List<Double> = each(name, ::number)
    fun lists(name: String): List<List<Double>> = each(name) { _, row -> array(name, row).map { number(name, it) } }
    fun tokenLists(name: String): List<List<Int>> = each(name) { _, row -> array(name, row).map { whole(name, it, 0, MOST_TOKEN).toInt() } }
    fun ignore(vararg names: String) = read.addAll(names) // let keys stand that this runtime has no use for

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
    fun unreadable(error: Throwable, why: String?) = BundleError("$path: not readable as JSON: $why", EXPORT_AGAIN, error)
    val data = try {
        JsonParser.parseString(Charsets.UTF_8.newDecoder().decode(java.nio.ByteBuffer.wrap(path.readBytes())).toString())
    } catch (error: JsonParseException) {
        throw unreadable(error, error.message)
    } catch (error: IOException) {
        throw unreadable(error, error.message)
    } catch (error: StackOverflowError) {
        throw unreadable(error, "nested too deeply")
    }
    val given = (data as? JsonObject)?.get("schema_version")
    val version = given?.takeIf { it.isJsonPrimitive && it.asJsonPrimitive.isNumber }?.asString?.toIntOrNull()
        ?: throw BundleError("$path: expected an object with an integer schema_version, got ${given ?: "None"}")
    if (version < OLDEST) throw BundleError(
        "$path: schema $version is older than this edgespec, which reads from schema $OLDEST on",
        "export the bundle again with this version",
    )
    if (version > SCHEMA) throw BundleError(
        "$path: schema $version is newer than this edgespec, which reads up to schema $SCHEMA",
        "upgrade edgespec, or export the bundle with this version",
    )
    try {
        return Reader(path, data.asJsonObject).manifest()
    } catch (error: NumberFormatException) { // a number that is none, such as 1e999999999
        throw BundleError("$path: ${error.message}", EXPORT_AGAIN, error)
    }
}

private fun Reader.manifest(): Manifest {
    ignore("schema_version", "parity", "memory", "pooling")
    text("edgespec_version")
    val (bos, eos) = part("tokenizer") {
        flag("chat_template")
        intOrNull("bos") to ints("eos")
    }
    val target = part("target") { model() }
    val found = Manifest(
        target, partOrNull("draft") { model() }, partOrNull("drafter") { model() },
        members("methods") { method() }.filterKeys { it in METHODS }, bos, eos,
        partOrNull("sampling") { sampling(this@manifest) } ?: SamplingParams(),
        partOrNull("text") { textForm() }, partOrNull("speech") { speech() },
        jsonOrNull("cost") ?: JsonObject(), jsonOrNull("provenance") ?: JsonObject(),
        parts("golden") {
            GoldenVector(ints("prompt").toIntArray(), text("method"), ints("tokens").toIntArray(), intsOrNull("begin")?.toIntArray())
        },
        members("files") { name ->
            this@manifest.checkInside("files", name)
            FileEntry(long("size"), text("sha256"))
        },
    )
    done()
    found.drafter?.let {
        val columns = (1 + target.tapped.size) * target.facts.hidden
        val narrow = it.decoder?.borrows != true && it.facts.hidden != target.facts.hidden
        if (narrow || it.facts.vocab != target.facts.vocab || it.decoder?.columns != columns) {
            throw wrong("drafter", "of another hidden size, vocabulary or number of auxiliary hidden states than the target")
        }
    }
    return found
}

private fun Reader.model(): ModelPart {
    ignore("quantizer", "fine", "converted", "final_norm")
    if (jsonOrNull("image") != null) throw wrong("image", "a model that reads images, which this library does not run")
    val decoder = partOrNull("decoder") {
        val kind = text("kind", DRAFTERS + ELSEWHERE)
        val borrows = ints("reads", 0).isNotEmpty()
        ignore("anchor", "confidence", "masked") // of dspark and peagle alone
        DecoderPart(kind, int("columns", 1, MOST_WIDTH), intOrNull("block", 2, MOST_WIDTH), intOrNull("mask", 0), borrows)
    }
    val found = ModelPart(
        part("facts") { facts(decoder?.borrows == true) }, text("format", FORMATS),
        members("graphs") {
            ignore("precision") // of graphs for devices, which also leave out layers for good
            skipSet()
            Graph(
                path("file"), textOrNull("device", listOf("cpu", "webgpu")) ?: "cpu", flag("gated"), flag("padded"), flag("hidden"),
                textOrNull("operators", OPERATORS) ?: "stock", intOrNull("least_length", 1, 1 shl 10) ?: 0,
            )
        },
        path("weights"), pathOrNull("index"), textOrNull("layout", OPERATORS) ?: "stock", int("headroom", 1, 1 shl 12),
        int("min_rows", 0, 1),
        partOrNull("attention") {
            ignore("positions", "depth", "text", "text_sha256")
            val gates = members("gates") {
                ignore("perplexity_change", "agreement")
                flag("passed")
            }
            AttentionPart(text("default", ATTENTION.keys.toList()), pathOrNull("tables"), texts("learnt"), gates)
        },
        parts("heads") {
            val kind = text("kind", listOf("medusa", "blockwise", "exit", "markov", "embedding"))
            val inner = intOrNull("inner", 0, MOST_WIDTH) ?: 0
            HeadGroup(text("name"), kind, int("count", 1), intOrNull("layer", 0) ?: 0, inner, flag("own"))
        },
        partOrNull("head_vocab") { HeadVocab(path("file"), int("size", 1)) }, flag("cut"),
        textOrNull("origin", listOf("edgespec", "optimum")) ?: "edgespec", ints("tapped", 0), decoder,
        textOrNull("head_format", FORMATS), textOrNull("embedding_format", FORMATS), (numberOrNull("low_bytes") ?: 0.0) > 0,
        partOrNull("source") {
            fun Reader.width(name: String) = int(name, 1, MOST_WIDTH)
            val features = partOrNull("features") { FeaturePart(width("bands"), width("frames"), width("columns")) }
            SourcePart(text("kind", listOf("text", "features")), int("most", 1), width("width"), features, flag("shares_encoder"))
        },
        partOrNull("encoder") { model() },
    )
    val (layers, hidden) = found.facts.layers to found.facts.hidden
    if (MAIN_GRAPHS.none { it in found.graphs }) throw wrong("graphs", "there is none to decode with")
    if (found.tapped.any { it > layers }) throw wrong("tapped", "after more than $layers layers")
    decoder?.let { if (it.columns <= hidden) throw wrong("decoder", "${it.columns} columns, of which the embedding has $hidden") }
    if (found.cut && found.headVocab == null) throw wrong("cut", "without head_vocab")
    return found
}

/** Without a temperature the model says nothing of sampling, and plain decoding's default stands. */
private fun Reader.sampling(whole: Reader): SamplingParams = try {
    SamplingParams(
        numberOrNull("temperature") ?: 0.0, intOrNull("top_k") ?: 0, numberOrNull("top_p") ?: 1.0,
        numberOrNull("min_p") ?: 0.0, numberOrNull("repetition_penalty") ?: 1.0,
    )
} catch (error: InvalidRequest) {
    throw whole.wrong("sampling", error.what)
}

private fun Reader.skipSet(): SkipSet? = partOrNull("skip") {
    SkipSet(ints("attention", 0), ints("mlp", 0), ints("high_attention", 0), ints("high_mlp", 0), flag("high_head"), intOrNull("head_rows", 0) ?: 0)
}

private fun Reader.method(): MethodPart {
    ignore("branch", "notes")
    val measured = parts("measured") {
        ignore("positions", "text", "text_sha256")
        numbers("acceptance") to numbers("confidence")
    }.firstOrNull()
    return MethodPart(
        intOrNull("gamma", 1) ?: 4, skipSet(), texts("heads"), lists("ranks"), numberOrNull("threshold"), measured?.first,
        measured?.second ?: emptyList(), numberOrNull("draft_cost"), numberOrNull("first_cost"), numberOrNull("predicted_speedup"),
    )
}

/* What decoding and planning need to know of a model: its sizes. */

private const val MOST_TOKEN = Int.MAX_VALUE.toLong()
private const val MOST_LAYERS = 1 shl 10 // every number of a manifest becomes a size, a count or an offset
internal const val MOST_WIDTH = 1 shl 20
private const val MOST_VOCAB = 1 shl 24
private const val MOST_CONTEXT = 1 shl 24
private const val MOST_TAPS = 16

/** The heads of gated delta rules: [values] states [keyDim, valueDim] a layer, on [keys] queries and keys. */
class DeltaHeads(val keys: Int, val values: Int, val keyDim: Int, val valueDim: Int) {
    val mixed: Int get() = 2 * keys * keyDim + values * valueDim // queries, keys and values of a token, side by side
}

/** Mixtures of experts: each row goes to [chosen] of [count] MLPs of width [inner]. */
class ExpertFacts(val count: Int, val chosen: Int, val inner: Int)

/**
 * What decoding and planning need to know of a model; sizes in elements.  Layers of [convolutions] have a short one, of [taps]
 * tokens, instead of attention, with gated [delta] rules behind; [shared] last layers read keys and values of earlier ones;
 * [layerEmbedding]: width of a layer's own embedding of tokens; [angles]: channels that each table of angles turns, empty =
 * positions are learned; [tied]: LM head and embedding are one matrix.
 */
class ModelFacts(
    val architecture: String, val layers: Int, val hidden: Int, val intermediate: Int, val heads: Int, val kvHeads: Int,
    val headDim: Int, val vocab: Int, val context: Int, val convolutions: List<Int>, val taps: Int, val delta: DeltaHeads?,
    headDims: List<Int>, val shared: Int, val layerEmbedding: Int, val angles: List<Int>, val tied: Boolean, val experts: ExpertFacts?,
) {
    val kvLayers: Int = layers - convolutions.size - shared // layers with keys and values

    /** Size of a head of each layer with keys and values. */
    val dims: List<Int> = headDims.ifEmpty { List(maxOf(0, kvLayers)) { headDim } }
}

/** Facts of a manifest, as far as they go together; [borrows]: all layers read another model's keys. */
internal fun Reader.facts(borrows: Boolean): ModelFacts {
    ignore("parameters") // what people are told
    fun Reader.width(name: String) = int(name, 1, MOST_WIDTH)
    val headDims = ints("head_dims", 1, MOST_WIDTH)
    val layers = int("layers", 1, MOST_LAYERS)
    val found = ModelFacts(
        text("architecture"), layers, width("hidden"), width("intermediate"), width("heads"), width("kv_heads"), width("head_dim"),
        int("vocab", 1, MOST_VOCAB), int("context", 1, MOST_CONTEXT), ints("convolutions", 0, MOST_LAYERS),
        intOrNull("taps", 0, MOST_TAPS) ?: 0,
        partOrNull("delta") {
            flag("space") // Mamba-2: another rule, in the graph, on states of the same kind
            DeltaHeads(width("keys"), width("values"), width("key_dim"), width("value_dim"))
        },
        headDims, intOrNull("shared", 0, MOST_LAYERS) ?: 0, intOrNull("layer_embedding", 0, MOST_WIDTH) ?: 0, angles(), flag("tied"),
        partOrNull("experts") {
            val mixed = ExpertFacts(width("count"), width("chosen"), width("inner"))
            val those = ints("layers", 0, MOST_LAYERS)
            val always = intOrNull("always", 0, MOST_WIDTH) ?: 0 // of both, which get every row
            if (always >= mixed.chosen || mixed.chosen > mixed.count || those.any { it >= layers }) {
                throw this@facts.wrong("experts", "${mixed.chosen} of ${mixed.count} experts in layers $those")
            }
            mixed
        },
    )
    val short = found.convolutions
    val (heads, kvHeads) = found.heads to found.kvHeads
    when {
        short.isNotEmpty() && (short != short.distinct().sorted().filter { it < layers } || found.taps < 2) ->
            throw wrong("convolutions", "$short of ${found.taps} tokens in $layers layers")
        found.delta != null && short.isEmpty() -> throw wrong("delta", "without convolutions")
        (found.shared >= layers && !borrows) || found.shared > layers || (headDims.isNotEmpty() && headDims.size != found.kvLayers) ->
            throw wrong("head_dims", "of ${headDims.size} layers, ${found.shared} of $layers shared")
        heads % kvHeads != 0 || (found.kvLayers < 1 && !borrows) ->
            throw wrong("kv_heads", "$heads heads do not share $kvHeads KV heads evenly")
    }
    return found
}

/** Channels that each table of angles turns; Gemma has one for windowed layers and one for the others. */
private fun Reader.angles(): List<Int> {
    val rope = jsonOrNull("rope")?.takeIf { it.size() > 0 } ?: return emptyList()
    try {
        val others = (rope["other_dims"] as? JsonArray)?.map { it.asDouble.toInt() } ?: emptyList()
        return listOf(rope["dims"]?.asDouble?.toInt() ?: int("head_dim")) + others
    } catch (error: RuntimeException) { // no number
        throw wrong("rope", "dims: ${error.message}")
    }
}

fun sha256(path: File): String {
    val digest = MessageDigest.getInstance("SHA-256")
    val piece = ByteArray(1 shl 20)
    path.inputStream().use { file ->
        while (true) {
            val count = file.read(piece)
            if (count < 0) break
            digest.update(piece, 0, count)
        }
    }
    return hex(digest.digest())
}

class Bundle private constructor(val path: File, val manifest: Manifest) {
    internal fun runAs(native: Boolean, high: Boolean) = Bundle(path, manifest.runAs(native, high))

    fun part(name: String): ModelPart = when (name) {
        "target" -> manifest.target
        "draft" -> manifest.draft ?: throw BundleError("$path: has no draft model", "export with `--method speculative --draft MODEL2`")
        else -> manifest.drafter ?: throw BundleError("$path: has no drafter model", "export with `--method eagle --drafter DRAFTER`")
    }

    companion object {
        /** Open a bundle; presence and size of every file are always checked, with [check] their SHA-256 too. */
        fun open(folder: File, check: Boolean = true): Bundle {
            val manifest = readManifest(folder)
            for (name in listOfNotNull(manifest.target, manifest.draft, manifest.drafter).flatMap { it.named() }) {
                if (name !in manifest.files) throw BundleError("${File(folder, MANIFEST)}: uses '$name' but does not list it under files")
            }
            for ((name, entry) in manifest.files) {
                val file = File(folder, name)
                if (!file.isFile) throw BundleError("$file: missing from the bundle", "copy the whole folder, or export again")
                try {
                    if (!file.toPath().toRealPath().startsWith(folder.toPath().toRealPath())) {
                        throw BundleError("$file: a link that leaves the bundle is not allowed")
                    }
                    val size = file.length()
                    if (size != entry.size) {
                        val word = if (size < entry.size) "truncated" else "altered"
                        throw BundleError("$file: $word: expected ${entry.size} bytes, got $size", "copy or export it again")
                    }
                    if (!check) continue
                    val got = sha256(file)
                    if (got != entry.sha256) throw BundleError(
                        "$file: altered: expected SHA-256 ${entry.sha256.take(12)}..., got ${got.take(12)}...",
                        "export it again, or pass --no-check if you changed it on purpose",
                    )
                } catch (error: IOException) {
                    throw BundleError("$file: cannot read it: ${error.message}", "copy it again", error)
                }
            }
            return Bundle(folder, manifest)
        }
    }
}
