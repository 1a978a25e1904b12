package dev.edgespec.planning

import dev.edgespec.runtimes.Manifest

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

/** Every method of a bundle: the longest context, [most] at most, that [budget] bytes have room for; fastest first. */
fun plan(manifest: Manifest, allowance: Allowance, most: Int, budget: Long): List<PlannedRun> = manifest.methods.map { (method, part) ->
    fun bytes(tokens: Int) = allowance.parts(method, tokens).sumOf { it.bytes }
    var least = 0
    var steps = most / SHORTEST // the last one may be shorter
    while (least < steps) {
        val middle = (least + steps + 1) / 2
        if (bytes(middle * SHORTEST) <= budget) least = middle else steps = middle - 1
    }
    val context = if (bytes(most) <= budget) most else least * SHORTEST
    PlannedRun(method, context, allowance.parts(method, if (context > 0) context else minOf(SHORTEST, most)), part.predictedSpeedup)
}.sortedByDescending { (if (it.fits) 1000.0 else 0.0) + (it.speedup ?: 1.0) }
