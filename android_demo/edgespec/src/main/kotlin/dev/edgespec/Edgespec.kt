package dev.edgespec

import dev.edgespec.engine.Engine
import dev.edgespec.planning.Heat
import dev.edgespec.planning.MemoryFacts
import java.io.File

object Edgespec {
    const val VERSION = "0.1.0"

    /**
     * Load a bundle that `edgespec export` wrote.
     *
     * @param bundle its folder.
     * @param threads of passes; null = the large cores, at most four.
     * @param context maximum tokens of a sequence; null = the limit of the export.  Memory grows with use.
     * @param check compare the SHA-256 of every file first.
     * @param library the native library, `libedgespec.so`: a file, or a bare name, which the system finds.
     * @param attention KV-cache format: f32, f16 or int8; null = the export's default.
     * @param ngramStore a file of `edgespec ngram build`, which method ngram also searches.
     * @param cache a folder of the app, such as `cacheDir`, for computed prompts; null = none are stored.
     * @param promptCache maximum bytes of those prompts, also limited to a tenth of the free disk; 0 = prompts are not stored.
     * @param memory the system's memory information, read before every request: texts end where it does; null = memory is not checked.
     * @param adapters folders of LoRA adapters by the names that [dev.edgespec.decoding.Settings.adapter] takes; native operators only.
     * @param heat temperature level of the device, read while it decodes: a hot device uses fewer threads, with the same text.
     * @throws EdgespecError [BundleError], [BudgetError] or [InvalidRequest], each with what to do.
     */
    @JvmStatic
    @JvmOverloads
    fun load(
        bundle: File, threads: Int? = null, context: Int? = null, check: Boolean = true, library: File = File("libedgespec.so"),
        attention: String? = null, ngramStore: File? = null, cache: File? = null, promptCache: Long = 1L shl 30, memory: MemoryFacts? = null,
        heat: Heat? = null, adapters: Map<String, File> = emptyMap(),
    ): Engine = Engine(bundle, threads, context, check, library, attention, ngramStore, cache, promptCache, memory, heat, adapters)
}

/** Base of all errors raised on purpose, as on the Python side; [hint]: what the reader can do about it. */
open class EdgespecError(val what: String, val hint: String? = null, cause: Throwable? = null) :
    RuntimeException(if (hint == null) what else "$what\nhint: $hint", cause)

/** A bundle is missing a part, was altered, or is newer than this program. */
class BundleError(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** The free memory is not enough for any method, or for the requested one. */
class BudgetError(what: String, hint: String? = null) : EdgespecError(what, hint)

/** A generation request that cannot be served: an empty or long prompt, invalid settings. */
class InvalidRequest(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** The first line of a library's error message. */
fun firstLine(error: Throwable): String =
    (error.message ?: "").lineSequence().firstOrNull { it.isNotBlank() } ?: error.javaClass.simpleName
