package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.*
import java.io.File
import java.io.IOException

/* The manifest of a bundle (`edgespec.json`): reading it with errors a person can act on. */

const val SCHEMA = 6
private const val RENAMING = 6 // the first schema with today's names of keys
private const val OLDEST = 2 // whose stock graphs call their inputs otherwise: see Binding
const val MANIFEST = "edgespec.json"
val DRAFTERS = listOf("eagle", "mtp", "dflash") // methods whose drafter reads hidden states, a kind each
val METHODS = listOf("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode") + DRAFTERS
private val OPERATORS = listOf("stock", "native")
private val MAIN_GRAPHS = listOf("gated", "strict", "plain", "native")

/** One ONNX file of a model; see the Python side for what the flags mean. */
class Graph(
    val file: String, val device: String, val gated: Boolean, val padded: Boolean, val hidden: Boolean, val operators: String,
    val leastLength: Int,
)

/** How native operators keep keys and values of a model, and whether a learnt format passed its gate. */
class AttentionPart(val default: String, val tables: String?, val learnt: List<String>, val passed: Map<String, Boolean>)

/** Heads next to the LM head that a graph can compute from hidden states; one gate switches a group. */
class HeadGroup(val name: String, val kind: String, val count: Int, val layer: Int, val inner: Int, val own: Boolean)

/**
 * A small decoder conditioned on hidden states of the target; [columns]: of its input rows.  [block]: rows of a drafting pass of a drafter
 * of blocks, with token [mask] in place of draft tokens.  [borrows]: it reads the target's keys.
 */
class DecoderPart(val kind: String, val columns: Int, val block: Int?, val mask: Int?, val borrows: Boolean)

/** The tokens that a cut LM head scores: little-endian int32 [size]. */
class HeadVocab(val file: String, val size: Int)

/** Mean bytes of a weight that is stored as its file has it, of format "file". */
class BytesPerWeight(val layers: Double, val head: Double, val embedding: Double)

/** A model of the bundle: its facts, its format and its graphs over one weight file. */
class ModelPart(
    val facts: ModelFacts, val format: String, val graphs: Map<String, Graph>, val weights: String, val index: String?,
    val layout: String, val headroom: Int, val minRows: Int, val attention: AttentionPart?, val heads: List<HeadGroup>,
    val headVocab: HeadVocab?, val cut: Boolean, val origin: String, val tapped: List<Int>, val decoder: DecoderPart?,
    val headFormat: String?, val embeddingFormat: String?, val planes: Boolean, val source: SourcePart?, val encoder: ModelPart?,
    val image: ImagePart?, val tower: ModelPart?, val projectors: List<ModelPart>, val bytesPerWeight: BytesPerWeight?,
) {
    /** The graph that can run every method: gated if there is one, else strict, else plain, else one only for native operators. */
    val main: String get() = MAIN_GRAPHS.first { it in graphs }

    /** Whether of int8 weights in two planes only the high ones are read: a model of 4 bits. */
    var highAlone = false
        internal set

    /** Its encoders. */
    val sides: List<ModelPart> get() = listOfNotNull(encoder, tower) + projectors

    fun named(): List<String> = listOfNotNull(weights, index, attention?.tables, headVocab?.file, image?.places?.file) +
        graphs.values.map { it.file } + sides.flatMap { it.named() }
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
 * The whole manifest; [sampling]: the model's own recommendation; [text] and [speech]: tokens around the texts of an encoder-decoder, and
 * the first tokens of transcripts.
 */
data class Manifest(
    val target: ModelPart, val draft: ModelPart?, val drafter: ModelPart?, val methods: Map<String, MethodPart>, val bos: Int?,
    val eos: List<Int>, val sampling: SamplingParams, val rules: WritingRules?, val text: TextForm?, val speech: SpeechPart?,
    val cost: JsonObject, val provenance: JsonObject, val golden: List<GoldenVector>, val files: Map<String, FileEntry>,
    val elsewhere: Set<String>, // methods of the bundle that this runtime does not have
) {
    /** Every model of the bundle, the target first and encoders last. */
    val models: List<ModelPart> get() = listOfNotNull(target, draft, drafter).let { all -> all + all.flatMap { it.sides } }

    /**
     * The manifest of methods that can run: with [high], only the high planes of int8, for which nothing else was measured.  Self-drafts
     * that skip low planes need native operators ([native]) and a target with low planes.
     */
    internal fun runAs(native: Boolean, high: Boolean): Manifest {
        if (high && !(native && target.planes)) throw InvalidRequest(
            "precision high: expected int8 weights in two planes and native operators, got ${target.format}",
            "export with `--format int8`, or leave it out",
        )
        models.forEach { it.highAlone = high && it.planes }
        val kept = methods.filter { (name, part) -> name != "self-spec" || part.skip?.size != 0 || (native && target.planes && !high) }
        return copy(methods = kept).let { if (high) it.copy(cost = JsonObject(), golden = emptyList()) else it }
    }

    /** A number among the measured costs; null if it is not there. */
    fun costNumber(name: String): Double? = cost[name]?.takeIf { it.isJsonPrimitive && it.asJsonPrimitive.isNumber }?.asDouble

    /** Milliseconds of passes by rows, as the export measured them; null if it did not. */
    val verifyMs: Map<Int, Double>?
        get() = (cost["verify_ms"] as? JsonObject)?.entrySet()?.associate { it.key.toInt() to it.value.asDouble }?.ifEmpty { null }
}

/** [data] of schema [version] with today's names of keys, as in edgespec/runtimes/files/migration.py; it is not changed. */
internal fun withNewNames(data: JsonObject, version: Int): JsonObject {
    if (version >= RENAMING) return data
    val found = data.deepCopy()
    for ((place, names) in RENAMED) for (part in parts(found, place.split("/"))) for ((old, new) in names) {
        if (part.has(old) && !part.has(new)) part.add(new, part.remove(old))
    }
    return found
}

private val ENCODERS = listOf(listOf("encoder"), listOf("tower"), listOf("projectors", "*"), listOf("convolutions", "*"))

/** The objects at a place of [RENAMED]. */
private fun parts(data: JsonObject, place: List<String>): List<JsonObject> {
    fun models(part: JsonObject): List<JsonObject> = listOf(part) + ENCODERS.flatMap { at(part, it) }.flatMap { models(it) }
    if (place[0] != "model") return at(data, place)
    return listOf("target", "draft", "drafter").flatMap { at(data, listOf(it)) }.flatMap { models(it) }.flatMap { at(it, place.drop(1)) }
}

private fun at(value: JsonElement?, path: List<String>): List<JsonObject> = when {
    path.isEmpty() -> listOfNotNull(value as? JsonObject)
    path[0] == "*" -> ((value as? JsonObject)?.entrySet()?.map { it.value } ?: (value as? JsonArray) ?: emptyList<JsonElement>()).flatMap { at(it, path.drop(1)) }
    else -> at((value as? JsonObject)?.get(path[0]), path.drop(1))
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
        return Reader(path, withNewNames(data.asJsonObject, version)).manifest()
    } catch (error: NumberFormatException) { // not a valid number, such as 1e999999999
        throw BundleError("$path: ${error.message}", EXPORT_AGAIN, error)
    }
}

private fun Reader.manifest(): Manifest {
    ignore("schema_version", "parity", "memory", "pooling", "embedding")
    text("edgespec_version")
    val (bos, eos) = part("tokenizer") {
        flag("chat_template")
        intOrNull("bos") to ints("eos")
    }
    val target = part("target") { model() }
    val methods = members("methods") { method() }
    // drafts with another tokenizer are not run here
    val here = if (jsonOrNull("translation") == null) METHODS else METHODS - "speculative"
    val found = Manifest(
        target, partOrNull("draft") { model() }, partOrNull("drafter") { model() }, methods.filterKeys { it in here }, bos, eos,
        partOrNull("sampling") { sampling(this@manifest) } ?: SamplingParams(),
        partOrNull("rules") { rules() }, partOrNull("text") { textForm() }, partOrNull("speech") { speech() },
        jsonOrNull("cost") ?: JsonObject(), jsonOrNull("provenance") ?: JsonObject(),
        parts("golden") {
            GoldenVector(ints("prompt").toIntArray(), text("method"), ints("tokens").toIntArray(), intsOrNull("prefix_tokens")?.toIntArray())
        },
        members("files") { name ->
            this@manifest.checkInside("files", name)
            FileEntry(long("size"), text("sha256"))
        },
        methods.keys - here.toSet(),
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
    ignore("quantizer", "int8_fraction", "converted", "final_norm")
    val decoder = partOrNull("decoder") {
        val kind = text("kind")
        val borrows = ints("reads", 0).isNotEmpty()
        ignore("anchor", "confidence", "masked") // only of dspark and peagle
        DecoderPart(kind, int("columns", 1, MOST_WIDTH), intOrNull("block", 2, MOST_WIDTH), intOrNull("mask", 0), borrows)
    }
    val found = ModelPart(
        part("facts") { facts(decoder?.borrows == true) }, text("format", FORMATS),
        members("graphs") {
            ignore("precision") // of graphs for devices, which also leave out layers for good
            skipSet()
            Graph(
                path("file"), textOrNull("device", listOf("cpu", "webgpu")) ?: "cpu", flag("gated"), flag("padded"), flag("hidden"),
                textOrNull("operators", OPERATORS) ?: "stock", intOrNull("min_length", 1, 1 shl 10) ?: 0,
            )
        },
        path("weights"), pathOrNull("index"), textOrNull("layout", OPERATORS) ?: "stock", int("extra_rows", 1, 1 shl 12),
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
        textOrNull("origin", listOf("edgespec", "optimum", "transformers")) ?: "edgespec", ints("aux_hidden_layers", 0), decoder,
        textOrNull("head_format", FORMATS), textOrNull("embedding_format", FORMATS), (numberOrNull("low_nibble_bytes") ?: 0.0) > 0,
        partOrNull("source") {
            fun Reader.width(name: String) = int(name, 1, MOST_WIDTH)
            val features = partOrNull("features") { FeaturePart(width("bands"), width("frames"), width("columns")) }
            SourcePart(text("kind", listOf("text", "features")), int("max_rows", 1), width("width"), features, flag("shares_encoder"))
        },
        partOrNull("encoder") { model() }, partOrNull("image") { image() }, partOrNull("tower") { model() }, parts("projectors") { model() },
        partOrNull("bytes_per_weight") {
            ignore("planes")
            fun Reader.bytes(name: String) = numberOrNull(name)?.takeIf { it > 0 && it <= 4 } ?: throw wrong(name, "expected more than 0, at most 4")
            BytesPerWeight(bytes("layers"), bytes("head"), bytes("embedding"))
        },
    )
    val (layers, hidden) = found.facts.layers to found.facts.hidden
    if (MAIN_GRAPHS.none { it in found.graphs }) throw wrong("graphs", "there is none to decode with")
    if (found.tapped.any { it > layers }) throw wrong("aux_hidden_layers", "after more than $layers layers")
    decoder?.let { if (it.columns <= hidden) throw wrong("decoder", "${it.columns} columns, of which the embedding has $hidden") }
    if (found.image != null && (found.tower == null || found.projectors.size != 1)) throw wrong("image", "expected a tower and a projector beside it")
    if (found.cut && found.headVocab == null) throw wrong("cut", "without head_vocab")
    return found
}

/** Without a temperature the model does not recommend sampling, and plain decoding's default applies. */
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
