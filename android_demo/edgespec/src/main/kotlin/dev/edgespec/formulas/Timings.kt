package dev.edgespec.formulas

private const val WINDOW = 15 // latest timings of a size
private const val KNOWN = 3 // timings of a size before it can be told that it changed
private const val SIZES = 32 // pass sizes whose timings are kept
private const val IN_A_ROW = 5 // so many passes,
private const val BEYOND = 1.25 // all so far off in one direction: another pace

/** Latest timings of one size, and when each was made. */
private class Window {
    val ms = ArrayDeque<Double>()
    private val made = ArrayDeque<Int>()

    fun add(taken: Double, times: Int, now: Int) = repeat(times) {
        ms.addLast(taken)
        made.addLast(now)
        if (ms.size > WINDOW) {
            ms.removeFirst()
            made.removeFirst()
        }
    }

    /** Median of what was timed before that moment; null = too little. */
    fun usual(before: Int): Double? {
        val known = ms.take(made.count { it < before }).sorted()
        return if (known.size >= KNOWN) known[known.size / 2] else null
    }

    /** Take what was timed before that moment to be so much longer. */
    fun scale(factor: Double, before: Int) {
        for (at in ms.indices) if (made[at] < before) ms[at] *= factor
    }
}

/**
 * Milliseconds of passes by rows, and of drafts by steps, kept comparable while the machine changes its pace.
 *
 * Sizes are timed at different moments.  A phone that gets hot makes all of them slower; a size that is not used then
 * would look cheap, or dear when the slow time is over.  So where several passes in a row, of whatever sizes, take another
 * time than those sizes did before, everything that was timed before is taken to have changed with them.
 */
internal class Timings {
    private val ofPasses = LinkedHashMap<Int, Window>() // the size timed last is last
    private val ofDrafts = LinkedHashMap<Int, Window>()
    private var now = 0
    private val run = ArrayList<Double>() // passes in a row that took clearly longer, or shorter, than usual: how much
    private var since = 0 // when the first of them was timed

    /** Rows -> the latest timings, oldest first. */
    val passes: Map<Int, List<Double>> get() = ofPasses.mapValues { it.value.ms }

    /** The same of drafts by steps. */
    val drafts: Map<Int, List<Double>> get() = ofDrafts.mapValues { it.value.ms }

    /** A pass over so many rows took [ms]; [times]: as the median of so many. */
    fun addPass(rows: Int, ms: Double, times: Int = 1) {
        val usual = add(ofPasses, rows, ms, times).usual(if (run.isEmpty()) now else since)
        if (usual != null && usual > 0 && ms > 0) compare(ms / usual)
    }

    /** The same of so many draft steps. */
    fun addDraft(steps: Int, ms: Double, times: Int = 1) {
        add(ofDrafts, steps, ms, times)
    }

    private fun add(windows: LinkedHashMap<Int, Window>, size: Int, ms: Double, times: Int): Window {
        now++
        val mine = windows.remove(size) ?: Window()
        windows[size] = mine
        if (windows.size > SIZES) windows.remove(windows.keys.first { it > 1 })
        mine.add(ms, times, now)
        return mine
    }

    /** The latest pass took [ratio] times as long as usual; scale what is older where that is no chance. */
    private fun compare(ratio: Double) {
        if (ratio in 1 / BEYOND..BEYOND || run.isNotEmpty() && run[0] > 1 != ratio > 1) run.clear()
        if (ratio in 1 / BEYOND..BEYOND) return
        if (run.isEmpty()) since = now
        run.add(ratio)
        if (run.size == IN_A_ROW) {
            val factor = median(run)
            for (window in ofPasses.values + ofDrafts.values) window.scale(factor, since)
            run.clear()
        }
    }
}
