package dev.edgespec.formulas

import java.util.PriorityQueue

/*
 * Which tree of guesses pays.  A node is the path of ranks that leads to it: (0, 1) is the second guess of head 1 after
 * the first guess of head 0.  Heads are taken to be independent (arXiv 2401.10774, section 2.3.3).
 */

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
    val best = PriorityQueue<Pair<Double, Path>> { a, b -> a.first.compareTo(b.first).let { if (it != 0) it else BY_PATH.compare(a.second, b.second) } }
    best.add(-shares[0][0] to listOf(0))
    while (best.isNotEmpty() && found.size < most) {
        val (negative, places) = best.poll() // where in those orders a path's guesses stand
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

/** The paths of the highest predicted speed, (1 + sum of chances) / (v(1 + nodes) + heads); none where no tree pays. */
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

/** First guesses only. */
fun chainOf(heads: Int, length: Int): List<Path> = (1..minOf(length, heads)).map { depth -> List(depth) { 0 } }

/** Parents before children, the likelier sibling first: the parent of every node (-1 = the root), its head, its rank. */
class Layout(paths: List<Path>) {
    private val ordered = paths.sortedWith(compareBy<Path> { it.size }.then(BY_PATH))
    private val index = ordered.withIndex().associate { it.value to it.index }
    val parents = IntArray(ordered.size) { at -> ordered[at].let { if (it.size > 1) index.getValue(it.dropLast(1)) else -1 } }
    val heads = IntArray(ordered.size) { ordered[it].size - 1 }
    val ranks = IntArray(ordered.size) { ordered[it].last() }
}
