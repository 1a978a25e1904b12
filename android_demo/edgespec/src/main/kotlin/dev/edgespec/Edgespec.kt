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
     * @param threads of passes; null = as many as there are processors, at most four.
     * @param context maximum tokens of a sequence; null = the limit of the export.  Memory grows with use.
     * @param strict use the graph whose rows have the same bits in every pass.
     * @param check compare the SHA-256 of every file first.
     * @param operators auto, stock or native.
     * @param library the native operators, `libedgespec.so`; null = there are none.
     * @param attention KV-cache format of native operators; null = the export's default.
     * @param draftAttention int4, nomad or nomad2: format of the keys that self-drafts read.
     * @param ngramStore a file of `edgespec ngram build`, which method ngram also searches.
     * @param cache a folder of the app, such as `cacheDir`, for computed prompts and results of method swift; null = none.
     * @param promptCache maximum bytes of those prompts, also limited to a tenth of the free disk; 0 = prompts are not stored.
     * @param memory the system's memory information, read before every request: a request that would not fit gets a cheaper method, with
     *   the reason, or is refused; null = memory is not checked.
     * @param precision full, or high: for int8 weights in two planes only the high one is read.  That is a model of 4 bits, with a
     *   different text and less memory; native operators only.
     * @param onOnnxRuntime run native operators in ONNX Runtime; otherwise only their library runs them, with the same bits.
     * @param heat temperature level of the device, read while it decodes: a hot device uses fewer threads and draft tokens, with the same
     *   text.
     * @throws EdgespecError [BundleError], [BudgetError], [InvalidRequest] or [StoreError], each with what to do.
     */
    @JvmStatic
    @JvmOverloads
    fun load(
        bundle: File, threads: Int? = null, context: Int? = null, strict: Boolean = true, check: Boolean = true,
        operators: String = "auto", library: File? = null, attention: String? = null, draftAttention: String? = null,
        ngramStore: File? = null, cache: File? = null, promptCache: Long = 1L shl 30, memory: MemoryFacts? = null,
        precision: String = "full", onOnnxRuntime: Boolean = false, heat: Heat? = null,
    ): Engine = Engine(
        bundle, threads, context, strict, check, operators, library, attention, draftAttention, ngramStore, cache, promptCache, memory,
        precision, onOnnxRuntime, heat,
    )
}

/** Base of all errors raised on purpose, as on the Python side; [hint]: what the reader can do about it. */
open class EdgespecError(val what: String, val hint: String? = null, cause: Throwable? = null) :
    RuntimeException(if (hint == null) what else "$what\nhint: $hint", cause)

/** A bundle is missing a part, was altered, or is newer than this program. */
class BundleError(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** The free memory is not enough for any method, or for the requested one. */
class BudgetError(what: String, hint: String? = null) : EdgespecError(what, hint)

/** An n-gram store cannot be read: it is not a store, damaged, newer than this version, or of another tokenizer. */
class StoreError(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** A generation request that cannot be served: an empty or long prompt, invalid settings. */
class InvalidRequest(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** The first line of a library's error message. */
fun firstLine(error: Throwable): String =
    (error.message ?: "").lineSequence().firstOrNull { it.isNotBlank() } ?: error.javaClass.simpleName
