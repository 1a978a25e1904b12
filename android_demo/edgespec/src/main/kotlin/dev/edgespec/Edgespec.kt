package dev.edgespec

import dev.edgespec.engine.Engine
import dev.edgespec.engine.LoadOptions
import dev.edgespec.planning.MemoryFacts
import java.io.File

/** The front door. */
object Edgespec {
    const val VERSION = "0.1.0"

    /**
     * Load a bundle that `edgespec export` wrote.
     *
     * @param bundle its folder.
     * @param threads of ONNX Runtime; null = as many as there are processors, at most four.
     * @param context most tokens of a sequence; null = what the bundle was exported for.  Memory grows with use.
     * @param strict use the graph whose rows have the same bits in every pass.
     * @param check compare the SHA-256 of every file first.
     * @param operators auto, stock or native.
     * @param library the native operators, `libedgespec.so`; null = there are none.
     * @param attention how native operators keep keys and values; null = what the bundle was exported for.
     * @param draftAttention int4, nomad or nomad2: what self-drafts read.
     * @param ngramStore a file of `edgespec ngram build`, where method ngram looks too.
     * @param cache a folder where method swift keeps what it finds; null = nowhere.
     * @param memory what the system says of memory: requests get a cheaper method, with the reason, or are refused where
     *   they would not fit; null = nothing is counted.
     * @throws EdgespecError [BundleError], [BudgetError], [InvalidRequest] or [StoreError], each with what to do.
     */
    fun load(
        bundle: File,
        threads: Int? = null,
        context: Int? = null,
        strict: Boolean = true,
        check: Boolean = true,
        operators: String = "auto",
        library: File? = null,
        attention: String? = null,
        draftAttention: String? = null,
        ngramStore: File? = null,
        cache: File? = null,
        memory: MemoryFacts? = null,
    ): Engine = Engine(
        bundle,
        LoadOptions(threads, context, strict, check, operators, library, attention, draftAttention, ngramStore, cache, memory),
    )
}
