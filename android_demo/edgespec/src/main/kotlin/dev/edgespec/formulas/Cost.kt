package dev.edgespec.formulas

import java.util.PriorityQueue

/*
 * Cost and gain of speculation:  speedup = E(a, gamma) / (gamma * c + v(gamma + 1)),  a = acceptance, E = expected tokens per round, c =
 * time of one draft step and v(n) = time of a target pass over n rows, both in passes over one row (arXiv 2211.17192, theorem 3.8, with
 * the verify curve in place of a free verification).
 */

/** Used until something was measured on this device. */
val ASSUMED_VERIFY: Map<Int, Double> = mapOf(1 to 1.0, 4 to 1.67, 8 to 2.57, 16 to 3.95)
const val ASSUMED_DRAFT = 0.05
const val ENOUGH = 3 // timings before they count
private const val REFRESH = 8 // timings between two evaluations of the medians

/** Speed over plain decoding. */
fun speedup(acceptance: Double, gamma: Int, c: Double, v: (Int) -> Double): Double {
    var expected = 1.0
    var chance = 1.0
    repeat(gamma) {
        chance *= acceptance
        expected += chance
    }
    return expected / (gamma * c + v(gamma + 1))
}

internal fun median(values: Collection<Double>): Double {
    val sorted = values.sorted()
    val half = sorted.size / 2
    return if (sorted.size % 2 == 1) sorted[half] else (sorted[half - 1] + sorted[half]) / 2
}

/**
 * d(k), the time of k draft steps, and v(n): given, and corrected by measurements.  Both are linear between their points and continue with
 * the last slope.  [first]: of a round's first step, if its time differs from that of [draft].
 */
class CostModel(verify: Map<Int, Double>? = null, draft: Double? = null, private val first: Double? = null) {
    private val given: Map<Int, Double>
    private val givenC = draft ?: ASSUMED_DRAFT
    private val timings = Timings()
    private var unread = 0
    private var points: List<Pair<Int, Double>>
    private var steps: List<Pair<Int, Double>> = 
        listOf(0 to 0.0) + (first?.let { listOf(1 to it, 2 to it + givenC) } ?: listOf(1 to givenC))
    private var currentPlainMs: Double? = null

    init {
        val known = (verify ?: ASSUMED_VERIFY).toSortedMap()
        require(known.isNotEmpty() && known.firstKey() >= 1 && known.values.min() > 0 && minOf(draft ?: 0.0, first ?: 0.0) >= 0) {
            "expected {rows >= 1: cost > 0} and draft cost >= 0, got $known, $draft and $first"
        }
        val one = known[1] ?: known.getValue(known.firstKey())
        given = (mapOf(1 to 1.0) + known.mapValues { it.value / one }).toSortedMap()
        points = given.toList()
    }

    /** A model of the numbers given to this one, without its measurements: the same in every run. */
    fun given() = CostModel(given, givenC, first)

    val c: Double get() = d(1) // time of the first draft step over the time of a one-row pass

    /** Time of [k] draft steps over the time of a one-row pass. */
    fun d(k: Int): Double {
        refresh()
        return interpolate(steps, k)
    }

    fun v(n: Int): Double {
        refresh()
        return interpolate(points, n)
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
        // one-row passes may never happen (each round drafts): then the given curve estimates their time
        val one = ms.getValue(ms.firstKey()) / interpolate(given.toList(), ms.firstKey())
        currentPlainMs = one
        val all = (given + ms.mapValues { it.value / one } + (1 to 1.0)).toSortedMap()
        // measured points take precedence; a given point between measured ones may contradict them
        val known = all.filterKeys { it in ms || it == 1 || !(ms.firstKey() < it && it < ms.lastKey()) }
        points = rising(known)
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
fun measure(sizes: List<Int>, repeats: Int, run: (Int) -> Unit): Map<Int, Double> =
    timeTurns(sizes.associateWith { n -> { run(n) } }, 0.0, repeats, repeats).mapValues { median(it.value) }

/**
 * Time each run -> milliseconds of its turns: after one untimed turn at least [least], and at most [most], none of which begins after
 * [seconds].  [prepare] comes before each and is not timed.
 */
internal fun <K> timeTurns(
    runs: Map<K, () -> Any>, seconds: Double, least: Int = 3, most: Int = 15, prepare: (K) -> Unit = {},
): Map<K, List<Double>> {
    val times = runs.mapValues { ArrayList<Double>() }
    val begun = System.nanoTime()
    for (turn in 0..most) {
        if (turn > least && (System.nanoTime() - begun) / 1e9 > seconds) break
        for ((name, run) in runs) {
            prepare(name)
            val start = System.nanoTime()
            run()
            if (turn > 0) times.getValue(name).add((System.nanoTime() - start) / 1e6)
        }
    }
    return times
}

private const val WINDOW = 15 // latest timings of a size
private const val KNOWN = 3 // timings of a size before a change can be detected
private const val SIZES = 32 // pass sizes whose timings are kept
private const val IN_A_ROW = 5 // passes in a row,
private const val BEYOND = 1.1 // all so far off in one direction: another pace

private class Window {
    private val all = ArrayDeque<Pair<Double, Int>>() // milliseconds, and when it was timed
    val ms: List<Double> get() = all.map { it.first }

    fun add(taken: Double, times: Int, now: Int) = repeat(times) {
        all.addLast(taken to now)
        if (all.size > WINDOW) all.removeFirst()
    }

    /** Median of what was timed before that moment; null = too little. */
    fun usual(before: Int): Double? {
        val known = all.filter { it.second < before }.map { it.first }.sorted()
        return if (known.size >= KNOWN) known[known.size / 2] else null
    }

    fun scale(factor: Double, before: Int) = all.replaceAll { (taken, made) -> (if (made < before) taken * factor else taken) to made }
}

/**
 * Milliseconds of passes by rows, and of drafts by steps, kept comparable while the machine changes its pace.
 *
 * Sizes are timed at different moments.  A phone that gets hot makes all of them slower.  A size that is not used then would look cheap,
 * or expensive when the slow time is over.  So if several passes in a row, of any sizes, deviate from those sizes' earlier times, all
 * earlier timings are scaled by the same factor.
 */
internal class Timings {
    private val ofPasses = LinkedHashMap<Int, Window>() // the size timed last is last
    private val ofDrafts = LinkedHashMap<Int, Window>()
    private var now = 0
    private val run = ArrayList<Double>() // passes in a row that took clearly longer, or shorter, than usual: how much
    private var since = 0 // when the first of them was timed
    val passes: Map<Int, List<Double>> get() = ofPasses.mapValues { it.value.ms } // rows -> the latest timings, oldest first
    val drafts: Map<Int, List<Double>> get() = ofDrafts.mapValues { it.value.ms }

    /** Record a pass over [rows] rows that took [ms]; [times]: as the median of this many. */
    fun addPass(rows: Int, ms: Double, times: Int = 1) {
        val usual = add(ofPasses, rows, ms, times).usual(if (run.isEmpty()) now else since)
        if (usual != null && usual > 0 && ms > 0) compare(ms / usual)
    }

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

    /** The latest pass took [ratio] times as long as usual; scale older timings if that is not chance. */
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

/* Choice of the fastest draft tree; (0, 1) is head 1's second token after head 0's first (arXiv 2401.10774, section 2.3.3). */

typealias Path = List<Int> // rank of each head's guess, from the root down
typealias Ranks = List<List<Double>> // [head][rank]: share of positions where that guess is right

internal val BY_PATH = Comparator<Path> { a, b ->
    for (at in 0 until minOf(a.size, b.size)) if (a[at] != b[at]) return@Comparator a[at] - b[at]
    a.size - b.size
}

/** The [most] nodes that are right most often, the best first, each with its chance; every prefix is a tree. */
fun grow(ranks: Ranks, most: Int): List<Pair<Path, Double>> {
    val found = ArrayList<Pair<Path, Double>>()
    // guesses of a head by their shares: those of few positions need not fall with the rank
    val orders = ranks.map { head -> head.indices.sortedByDescending { head[it] } }
    val shares = ranks.zip(orders) { head, order -> order.map { head[it] } }
    if (shares.isEmpty() || shares[0].isEmpty()) return found
    val best = PriorityQueue(compareBy<Pair<Double, Path>> { it.first }.thenComparing({ it.second }, BY_PATH))
    best.add(-shares[0][0] to listOf(0))
    while (best.isNotEmpty() && found.size < most) {
        val (negative, places) = best.poll() // ranks in those orders of a path's tokens
        if (negative >= 0) break // never right: no more of these
        found.add(places.mapIndexed { head, place -> orders[head][place] } to -negative)
        val depth = places.size
        val place = places.last()
        val above = -negative / shares[depth - 1][place]
        if (place + 1 < shares[depth - 1].size) best.add(-above * shares[depth - 1][place + 1] to places.dropLast(1) + (place + 1))
        if (depth < shares.size && shares[depth].isNotEmpty()) best.add(negative * shares[depth][0] to places + 0)
    }
    return found
}

/** The paths of the highest predicted speed, (1 + sum of chances) / (v(1 + nodes) + heads); none if no tree is faster. */
fun bestTree(ranks: Ranks, v: (Int) -> Double, heads: Double, most: Int): List<Path> {
    val nodes = grow(ranks, most)
    var tokens = 1.0
    var size = 0
    var gain = 1.0
    nodes.forEachIndexed { at, (_, chance) ->
        tokens += chance
        val speed = tokens / (v(2 + at) + heads)
        if (speed > gain) {
            size = at + 1
            gain = speed
        }
    }
    return nodes.take(size).map { it.first }
}

fun chainOf(heads: Int, length: Int): List<Path> = (1..minOf(length, heads)).map { depth -> List(depth) { 0 } }

/** Parents before children, the likelier sibling first: the parent of every node (-1 = the root), its head, its rank. */
class Layout(paths: List<Path>) {
    private val ordered = paths.sortedWith(compareBy<Path> { it.size }.then(BY_PATH))
    private val index = ordered.withIndex().associate { it.value to it.index }
    val parents = IntArray(ordered.size) { at -> ordered[at].let { if (it.size > 1) index.getValue(it.dropLast(1)) else -1 } }
    val heads = IntArray(ordered.size) { ordered[it].size - 1 }
    val ranks = IntArray(ordered.size) { ordered[it].last() }
}
