package dev.edgespec.formulas

/*
 * What speculation costs and gains:  speedup = E(a, gamma) / (gamma * c + v(gamma + 1)),  a = acceptance, E = expected
 * tokens per round, c = time of one draft step and v(n) = time of a target pass over n rows, both in passes over one row
 * (arXiv 2211.17192, theorem 3.8, with the verify curve in place of a free verification).
 */

/** Used until something was measured on the device at hand. */
val ASSUMED_VERIFY: Map<Int, Double> = mapOf(1 to 1.0, 4 to 1.67, 8 to 2.57, 16 to 3.95)
const val ASSUMED_DRAFT = 0.05
const val WORTH = 1.05 // predicted gain below which a drafting method is not picked unasked
const val ENOUGH = 3 // timings before they count
private const val SIZES = 32 // pass sizes whose timings are kept
private const val TIMINGS = 15 // latest timings of one pass size
private const val REFRESH = 8 // timings between two evaluations of the medians

/** Expected tokens of a round that drafts [gamma] guesses at [acceptance] by position, the last used beyond it. */
fun expectedTokens(acceptance: List<Double>, gamma: Int): Double {
    var total = 1.0
    var chance = 1.0
    for (i in 0 until gamma) {
        chance *= if (acceptance.isEmpty()) 0.0 else acceptance[minOf(i, acceptance.size - 1)]
        total += chance
    }
    return total
}

/** Speed over plain decoding. */
fun speedup(acceptance: Double, gamma: Int, c: Double, v: (Int) -> Double): Double =
    expectedTokens(listOf(acceptance), gamma) / (gamma * c + v(gamma + 1))

internal fun median(values: Collection<Double>): Double {
    val sorted = values.sorted()
    val half = sorted.size / 2
    return if (sorted.size % 2 == 1) sorted[half] else (sorted[half - 1] + sorted[half]) / 2
}

/** c and v(n): given, and corrected by what is observed.  v is linear between its points and goes on with the last slope. */
class CostModel(verify: Map<Int, Double>? = null, draft: Double? = null) {
    private val given: Map<Int, Double>
    private val givenC = draft ?: ASSUMED_DRAFT
    private val verifyMs = LinkedHashMap<Int, ArrayDeque<Double>>()
    private val draftMs = ArrayDeque<Double>()
    private var unread = 0
    private var points: List<Pair<Int, Double>>
    private var currentC = givenC
    private val table = ArrayList<Double>()
    private var currentPlainMs: Double? = null

    /** Whether these numbers are still the assumptions of this file. */
    var assumed = verify == null && draft == null
        private set

    init {
        val known = (verify ?: ASSUMED_VERIFY).toSortedMap()
        require(known.isNotEmpty() && known.firstKey() >= 1 && known.values.min() > 0 && (draft == null || draft >= 0)) {
            "expected {rows >= 1: cost > 0} and draft cost >= 0, got $known and $draft"
        }
        val one = known[1] ?: known.getValue(known.firstKey())
        given = (mapOf(1 to 1.0) + known.mapValues { it.value / one }).toSortedMap()
        points = given.toList()
    }

    /** A model of the numbers this one was made of, without what it observed since: the same in every run. */
    fun given() = CostModel(given, givenC)

    val c: Double
        get() {
            refresh()
            return currentC
        }

    fun v(n: Int): Double {
        refresh()
        while (table.size <= n) table.add(interpolate(points, table.size))
        return table[n]
    }

    /** Milliseconds of a one-row pass; null = nothing was measured. */
    val plainMs: Double?
        get() {
            refresh()
            return currentPlainMs
        }

    private fun push(to: ArrayDeque<Double>, value: Double, times: Int) {
        repeat(times) {
            to.addLast(value)
            if (to.size > TIMINGS) to.removeFirst()
        }
        unread += times
    }

    fun observeVerify(n: Int, ms: Double, times: Int = 1) {
        val known = verifyMs.remove(n) ?: ArrayDeque()
        verifyMs[n] = known // the last
        if (verifyMs.size > SIZES) verifyMs.remove(verifyMs.keys.first { it > 1 })
        push(known, ms, times)
    }

    fun observeDraft(n: Int, ms: Double, times: Int = 1) {
        if (n > 0) push(draftMs, ms / n, times)
    }

    /** Drafting in [steps] steps and verifying [n] rows took [ms] together: draft steps are the rest. */
    fun observeRound(n: Int, steps: Int, ms: Double) {
        val one = verifyMs[1]?.let { median(it) } ?: return
        if (one > 0 && steps > 0) observeDraft(steps, maxOf(0.0, ms - one * v(n)))
    }

    private fun refresh() {
        if (unread < REFRESH) return
        unread = 0
        val ms = verifyMs.filterValues { it.size >= ENOUGH }.mapValues { median(it.value) }.toSortedMap()
        if (ms.isEmpty()) return
        assumed = false
        // one-row passes may never happen (each round drafts): then the given curve says what one would take
        val one = ms.getValue(ms.firstKey()) / interpolate(given.toList(), ms.firstKey())
        currentPlainMs = one
        val all = (given + ms.mapValues { it.value / one } + (1 to 1.0)).toSortedMap()
        // what was measured stands; a given point between measured ones may contradict them
        val known = all.filterKeys { it in ms || it == 1 || !(ms.firstKey() < it && it < ms.lastKey()) }
        var top = 0.0 // more rows never cost less: a dip is noise, and argmax would dig it out
        points = known.map { (n, cost) ->
            top = maxOf(top, cost)
            n to top
        }
        table.clear()
        if (draftMs.size >= ENOUGH) currentC = median(draftMs) / one
    }
}

private fun interpolate(points: List<Pair<Int, Double>>, n: Int): Double {
    if (n <= points[0].first || points.size == 1) return points[0].second
    val at = (1 until points.size).firstOrNull { n <= points[it].first } ?: (points.size - 1)
    val (left, low) = points[at - 1]
    val (right, high) = points[at]
    return low + (high - low) * (n - left) / (right - left)
}

/** Time passes of several sizes; they take turns, and the median of each is taken -> {n: milliseconds}. */
fun measure(sizes: List<Int>, repeats: Int, run: (Int) -> Unit): Map<Int, Double> {
    val times = sizes.associateWith { ArrayList<Double>() }
    sizes.forEach(run)
    repeat(repeats) {
        for ((n, taken) in times) {
            val start = System.nanoTime()
            run(n)
            taken.add((System.nanoTime() - start) / 1e6)
        }
    }
    return times.mapValues { median(it.value) }
}
