package dev.edgespec.engine

import kotlin.math.abs

private val SIZES = listOf(8, 16, 32, 64, 128) // rows of a chunk
internal const val FIRST = 16 // while nothing is known; a prompt with no more left is read to its end
private const val ALONE = 0.08 // seconds of a chunk: as long as somebody who comes now has to wait
private const val BESIDE = 0.03 // as long as somebody who is there has to
private const val GAIN = 0.9 // a larger chunk is worth its time where a row of it costs at most so much of a smaller one's
private const val FORGET = 256 // chunks after which larger ones are tried again

/**
 * Bounds chunks of a prompt by time, from what the latest ones took.  A request that is alone takes larger chunks where they
 * are cheaper by the row; beside others the time alone decides.  A row has the same bits whatever chunk it is in.
 */
internal class Pace {
    private var cost = LinkedHashMap<Int, Double>() // seconds of a row, by rows of the chunk
    private var chunks = 0

    /** Rows of the next chunk, at most [most]; [alone]: no other request is there. */
    fun rows(most: Int, alone: Boolean): Int {
        val sizes = SIZES.filter { it <= most }.ifEmpty { listOf(most) }
        var at = maxOf(0, sizes.indexOfLast { fits(it, alone) })
        while (alone && cost.isNotEmpty() && at + 1 < sizes.size) {
            val here = cost[sizes[at]] ?: break
            val next = cost[sizes[at + 1]]
            if (next != null && next > GAIN * here) break
            at++
        }
        return sizes[at]
    }

    /** Whether a chunk of this size is short enough. */
    private fun fits(size: Int, alone: Boolean): Boolean {
        if (cost.isEmpty()) return size <= FIRST
        val nearest = cost.keys.minBy { abs(it - size) }
        return size * cost.getValue(nearest) <= if (alone) ALONE else BESIDE
    }

    /** A chunk took so long.  What changed since, the depth or other load, changed for all sizes. */
    fun took(rows: Int, seconds: Double) {
        if (rows !in SIZES) return // the last one of a prompt
        val now = seconds / rows
        val change = now / (cost[rows] ?: now)
        for ((size, old) in cost) cost[size] = old * change
        cost[rows] = now
        chunks++
        if (chunks % FORGET == 0) cost.keys.removeAll { it > rows }
    }
}
