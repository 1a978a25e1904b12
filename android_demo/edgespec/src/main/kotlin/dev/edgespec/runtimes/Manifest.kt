package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.SamplingParams
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer

/* The part of a bundle's manifest (`edgespec.json`) that an app needs: the library reads the rest itself. */

const val SCHEMA = 6
private const val OLDEST = 5
const val MANIFEST = "edgespec.json"
private const val EXPORT_AGAIN = "export the bundle again with this version"

/** Methods that the library's sessions have, and those of models whose passes ONNX Runtime runs. */
val METHODS = listOf("ar", "ngram", "speculative", "self-spec", "medusa", "blockwise", "eagle", "mtp", "dflash")
private val HOSTED = listOf("ar", "ngram", "speculative")

/** Parts of a model that read more than tokens, and what such a model does. */
private val BEYOND = mapOf(
    "source" to "reads a source with an encoder", "image" to "reads pictures", "sound" to "reads sound",
)

class FileEntry(val size: Long, val sha256: String)

/** A prompt and the tokens that this bundle's own plain decoding wrote: another runtime must write the same. */
class GoldenVector(val prompt: IntArray, val method: String, val tokens: IntArray)

/**
 * A manifest; [methods]: those that run here, [elsewhere]: the others of the bundle; [sampling]: the model's own recommendation;
 * [native]: its weights are laid out for native operators, and not for those of ONNX Runtime; [target] and [draft]: the models.
 */
class Manifest(
    val methods: List<String>, val elsewhere: Set<String>, val format: String, val native: Boolean, val sampling: SamplingParams,
    val approximations: List<String>, val provenance: JsonObject, val golden: List<GoldenVector>, val files: Map<String, FileEntry>,
    internal val target: JsonObject, internal val draft: JsonObject?,
)

/** Read and check `folder/edgespec.json`. */
fun readManifest(folder: File): Manifest {
    val path = File(folder, MANIFEST)
    if (!path.isFile) {
        val what = if (folder.isDirectory) "has no $MANIFEST" else "is not a folder"
        throw BundleError("$folder: expected a bundle, but it $what", "make one with `edgespec export MODEL`")
    }
    fun unreadable(error: Throwable, why: String?) = BundleError("$path: not readable as JSON: $why", EXPORT_AGAIN, error)
    val data = try {
        JsonParser.parseString(Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(path.readBytes())).toString())
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
    if (version < OLDEST) throw BundleError("$path: schema $version is older than this edgespec, which reads from schema $OLDEST on", EXPORT_AGAIN)
    if (version > SCHEMA) throw BundleError(
        "$path: schema $version is newer than this edgespec, which reads up to schema $SCHEMA",
        "upgrade edgespec, or export the bundle with this version",
    )
    try {
        return manifest(data.asJsonObject)
    } catch (error: RuntimeException) { // a part of another type, or none
        if (error is BundleError) throw error
        throw BundleError("$path: not a manifest: ${(error as? EdgespecError)?.what ?: firstLine(error)}", EXPORT_AGAIN, error)
    }
}

private fun JsonObject.part(name: String): JsonObject = this[name]?.takeIf { it.isJsonObject }?.asJsonObject ?: throw BundleError("no $name in it", EXPORT_AGAIN)
private fun JsonObject.within(name: String): JsonObject? = this[name]?.takeUnless { it.isJsonNull }?.asJsonObject
private fun JsonObject.number(name: String): Double? = this[name]?.takeUnless { it.isJsonNull }?.asDouble
private fun JsonElement.ints() = asJsonArray.map { it.asInt }.toIntArray()

private fun manifest(data: JsonObject): Manifest {
    val target = data.part("target")
    for ((name, does) in BEYOND) if (target.within(name) != null) throw BundleError(
        "this model $does, which Kotlin does not run", "use a model that reads text alone, or Python",
    )
    val rules = listOf("rules", "text", "speech", "codes").firstOrNull { data[it]?.isJsonNull == false }
    if (rules != null) throw BundleError("this model has rules of writing ($rules), which Kotlin does not follow", "use Python")
    // a draft with another tokenizer is not run here
    val native = target["layout"]?.asString == "native"
    val all = if (native) METHODS else HOSTED
    val here = if (data.within("translation") == null) all else all - "speculative"
    val methods = data.part("methods").keySet()
    val sampling = data.within("sampling")
    val source = data.within("provenance") ?: JsonObject()
    return Manifest(
        methods.filter { it in here }, methods - here.toSet(), target["format"].asString, native,
        SamplingParams(
            sampling?.number("temperature") ?: 0.0, sampling?.number("top_k")?.toInt() ?: 0, sampling?.number("top_p") ?: 1.0,
            sampling?.number("min_p") ?: 0.0, sampling?.number("repetition_penalty") ?: 1.0,
        ),
        source["approximations"]?.asJsonArray?.map { it.asString } ?: emptyList(), source,
        data["golden"]?.asJsonArray?.map { it.asJsonObject }?.map { GoldenVector(it["prompt"].ints(), it["method"].asString, it["tokens"].ints()) } ?: emptyList(),
        data.part("files").entrySet().associate { (name, entry) -> name to entry.asJsonObject.let { FileEntry(it["size"].asLong, it["sha256"].asString) } },
        target, data.within("draft"),
    )
}
