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
     * @param context most tokens of a sequence; null = what the bundle was exported for.  Memory grows with use.
     * @param strict use the graph whose rows have the same bits in every pass.
     * @param check compare the SHA-256 of every file first.
     * @param operators auto, stock or native.
     * @param library the native operators, `libedgespec.so`; null = there are none.
     * @param attention how native operators keep keys and values; null = what the bundle was exported for.
     * @param draftAttention int4, nomad or nomad2: what self-drafts read.
     * @param ngramStore a file of `edgespec ngram build`, where method ngram looks too.
     * @param cache a folder of the app's own, as `cacheDir`, for prompts that were read and what method swift finds; null = none.
     * @param promptCache most bytes that those prompts take, and at most a tenth of the free disk; 0 = none is kept.
     * @param memory what the system says of memory, asked before every request: requests get a cheaper method, with the reason, or are refused where
     *   they would not fit; null = nothing is counted.
     * @param precision full, or high: of int8 weights in two planes only the high one is read, a model of 4 bits with a text of its
     *   own, in the memory that it takes; native operators.
     * @param onOnnxRuntime run native operators as ONNX Runtime's, too; else their library runs them alone, with the same bits.
     * @param heat how hot the device is, asked while it decodes: a hot one is spared threads and guesses, and writes the same text.
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

/** Nothing fits the memory that there is, or what was asked for does not. */
class BudgetError(what: String, hint: String? = null) : EdgespecError(what, hint)

/** An n-gram store cannot be read: not a store, damaged, too new, or of another tokenizer. */
class StoreError(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** A generation request that cannot be served: empty prompt, too long, nonsense settings. */
class InvalidRequest(what: String, hint: String? = null, cause: Throwable? = null) : EdgespecError(what, hint, cause)

/** What a library's error says, in a line. */
fun firstLine(error: Throwable): String =
    (error.message ?: "").lineSequence().firstOrNull { it.isNotBlank() } ?: error.javaClass.simpleName
