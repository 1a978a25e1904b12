package dev.edgespec.planning

import dev.edgespec.engine.Engine
import dev.edgespec.engine.MemoryPart

/* What of a bundle fits a memory budget. */

private const val SHORTEST = 64 // tokens

/**
 * A method under a budget.
 *
 * @property context most tokens that fit; 0 = not even [SHORTEST].
 * @property parts of the memory with that context, or with [SHORTEST] tokens where nothing fits.
 * @property speedup over plain decoding, as the export predicted; null = it did not.
 */
class PlannedRun(val method: String, val context: Int, val parts: List<MemoryPart>, val speedup: Double?) {
    val fits: Boolean get() = context > 0
    val bytes: Long get() = parts.sumOf { it.bytes }
}

/** Every method of a loaded bundle: the longest context that [budget] bytes have room for, fastest first. */
fun plan(engine: Engine, budget: Long): List<PlannedRun> = engine.methods.map { method ->
    fun bytes(tokens: Int) = engine.allowance.parts(method, tokens).sumOf { it.bytes }
    var least = 0
    var most = engine.context / SHORTEST // in steps of SHORTEST; the last one may be shorter
    while (least < most) {
        val middle = (least + most + 1) / 2
        if (bytes(middle * SHORTEST) <= budget) least = middle else most = middle - 1
    }
    val whole = bytes(engine.context) <= budget
    val context = if (whole) engine.context else least * SHORTEST
    val parts = engine.allowance.parts(method, if (context > 0) context else minOf(SHORTEST, engine.context))
    PlannedRun(method, context, parts, engine.bundle.manifest.methods.getValue(method).predictedSpeedup)
}.sortedByDescending { (if (it.fits) 1000.0 else 0.0) + (it.speedup ?: 1.0) }
