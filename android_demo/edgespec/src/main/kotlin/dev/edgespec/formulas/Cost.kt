package dev.edgespec.formulas

/*
 * What speculation costs and gains:  speedup = E(a, gamma) / (gamma * c + v(gamma + 1)),  a = acceptance, E = expected
 * tokens per round, c = time of one draft step and v(n) = time of a target pass over n rows, both in passes over one row
 * (arXiv 2211.17192, theorem 3.8, with the verify curve in place of a free verification).
 */

/** Used until something was measured on the device at hand. */
val ASSUMED_VERIFY: Map<Int, Double> = mapOf(1 to 1.0, 4 to 1.67, 8 to 2.57, 16 to 3.95)
const val ASSUMED_DRAFT = 0.05
const val ENOUGH = 3 // timings before they count
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

/**
 * d(k), the time of k draft steps, and v(n): given, and corrected by what is observed.  Both are linear between their
 * points and go on with the last slope.  [first]: of a round's first step, where it takes another time than [draft].
 */
class CostModel(verify: Map<Int, Double>? = null, draft: Double? = null, private val first: Double? = null) {
    private val given: Map<Int, Double>
    private val givenC = draft ?: ASSUMED_DRAFT
    private val timings = Timings()
    private var unread = 0
    private var points: List<Pair<Int, Double>>
    private var steps: List<Pair<Int, Double>> = 
        listOf(0 to 0.0) + (first?.let { listOf(1 to it, 2 to it + givenC) } ?: listOf(1 to givenC))
    private val table = ArrayList<Double>()
    private var currentPlainMs: Double? = null

    /** Whether these numbers are still the assumptions of this file. */
    var assumed = verify == null && draft == null
        private set

    init {
        val known = (verify ?: ASSUMED_VERIFY).toSortedMap()
        require(known.isNotEmpty() && known.firstKey() >= 1 && known.values.min() > 0 && minOf(draft ?: 0.0, first ?: 0.0) >= 0) {
            "expected {rows >= 1: cost > 0} and draft cost >= 0, got $known, $draft and $first"
        }
        val one = known[1] ?: known.getValue(known.firstKey())
        given = (mapOf(1 to 1.0) + known.mapValues { it.value / one }).toSortedMap()
        points = given.toList()
    }

    /** A model of the numbers this one was made of, without what it observed since: the same in every run. */
    fun given() = CostModel(given, givenC, first)

    /** Time of the first draft step over the time of a one-row pass. */
    val c: Double get() = d(1)

    /** Time of [k] draft steps over the time of a one-row pass. */
    fun d(k: Int): Double {
        refresh()
        return interpolate(steps, k)
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

    fun observeVerify(n: Int, ms: Double, times: Int = 1) {
        timings.addPass(n, ms, times)
        unread += times
    }

    /** [n] draft steps took [ms]. */
    fun observeDraft(n: Int, ms: Double, times: Int = 1) {
        if (n <= 0) return
        timings.addDraft(n, ms, times)
        unread += times
    }

    /** Drafting in [steps] steps and verifying [n] rows took [ms] together: draft steps are the rest. */
    fun observeRound(n: Int, steps: Int, ms: Double) {
        val one = timings.passes[1]?.let { median(it) } ?: return
        if (one > 0 && steps > 0) observeDraft(steps, maxOf(0.0, ms - one * v(n)))
    }

    private fun refresh() {
        if (unread < REFRESH) return
        unread = 0
        val ms = timings.passes.filterValues { it.size >= ENOUGH }.mapValues { median(it.value) }.toSortedMap()
        if (ms.isEmpty()) return
        assumed = false
        // one-row passes may never happen (each round drafts): then the given curve says what one would take
        val one = ms.getValue(ms.firstKey()) / interpolate(given.toList(), ms.firstKey())
        currentPlainMs = one
        val all = (given + ms.mapValues { it.value / one } + (1 to 1.0)).toSortedMap()
        // what was measured stands; a given point between measured ones may contradict them
        val known = all.filterKeys { it in ms || it == 1 || !(ms.firstKey() < it && it < ms.lastKey()) }
        points = rising(known)
        table.clear()
        val drafts = timings.drafts.filterValues { it.size >= ENOUGH }.mapValues { median(it.value) / one }
        if (drafts.isNotEmpty()) steps = rising((mapOf(0 to 0.0) + drafts).toSortedMap())
    }
}

/** The points, in order.  More never costs less: a dip is noise, and argmax would dig it out. */
private fun rising(points: Map<Int, Double>): List<Pair<Int, Double>> {
    var top = 0.0
    return points.map { (n, cost) ->
        top = maxOf(top, cost)
        n to top
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
