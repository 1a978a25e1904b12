package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.runtimes.Slot
import kotlin.math.*

internal fun noFiniteLogits() = EdgespecError("expected finite draft logits, got NaN or infinity")

/** A drafter that chooses its guesses as the request chooses tokens. */
abstract class Drawer : Drafter {
    protected var request = DraftRequest(Tokens())
    protected val params: SamplingParams get() = request.params

    override fun begin(request: DraftRequest): Int? {
        this.request = request
        return null
    }

    protected fun drawing(tokens: Tokens, length: Int, vocab: Int) = Drawing(tokens, length, vocab, params, request.noise)
}

/** [rows] of the [logits] [r, columns] of a [slot], of the tokens [named], as [rows, vocab]: one without a column cannot be guessed. */
internal fun whole(logits: Matrix, rows: IntArray, slot: Slot, named: IntArray? = slot.headTokens?.takeIf { slot.model.part.cut }): Matrix {
    if (named == null && rows.size == 1) return logits.part(rows[0], 1)
    val found = FloatArray(rows.size * slot.vocabSize) { Float.NEGATIVE_INFINITY }
    for ((at, row) in rows.withIndex()) {
        val from = logits.row(row)
        for (column in 0 until logits.columns) found[at * slot.vocabSize + (named?.get(column) ?: column)] = from[column]
    }
    return Matrix.of(found, rows.size, slot.vocabSize)
}

/** Children of each expanded node by depth: one number in [branch] is a chain whose nodes have that many, several are a full tree. */
fun widthsOf(branch: List<Int>, length: Int): List<Int> =
    if (branch.size == 1) List(minOf(length, MOST_NODES / branch[0])) { branch[0] } else branch.take(length)

/** [length + 1]: rows of the pass that verifies the tree cut at each depth. */
fun rowsOf(branch: List<Int>, length: Int): IntArray {
    val widths = widthsOf(branch, length)
    var level = 1
    val levels = widths.map { width -> (if (branch.size == 1) width else level * width).also { level = it } }
    return levels.runningFold(1, Int::plus).let { rows -> IntArray(length + 1) { rows[minOf(it, rows.size - 1)] } }
}

/** (nodes to expand, guesses so far, their parents) -> draft logits, a row for each node; node -1 is the pending token. */
typealias Level = (IntArray, IntArray, IntArray) -> Matrix

/** The draft probability of a guess -> whether none should follow it. */
typealias Weak = (Double) -> Boolean

private const val MOST_ROWS = 32
private val ABOVE = doubleArrayOf(0.95, 0.8, 0.5) // confidence, and the paper's guesses per node above it, ...
private val GREEDY_WIDTHS = intArrayOf(3, 5, 8, 10)
private val SAMPLED_WIDTHS = intArrayOf(1, 3, 5, 10)

/**
 * How many siblings to offer: at most [most] guesses per node by depth; [price]: (depth, expected tokens of the chain,
 * rows) -> expected tokens that one row more must gain, null = all; no row is cheaper than [least].
 */
class SiblingPolicy(val most: List<Int>, val price: ((Int, Double, Int) -> Double)? = null, val least: Double = 0.0)

/** Draft tokens at one depth, the chain's own first; the probability of each rank, that of the first, and their distribution. */
private class SiblingLevel(val tokens: IntArray, val chances: DoubleArray, val sure: Double, val q: DoubleArray?)

/**
 * Samples draft tokens from draft logits: chains, trees, and chains whose nodes may have siblings.
 *
 * Greedy draft tokens are deterministic.  Rejection sampling samples from q, the draft's adjusted distribution, with separate noise for
 * each round, and reports q.  Coupled sampling uses the target's noise (arXiv 2408.07978) and needs no q.  Draft logits beyond [vocab] are
 * padding and ignored.
 */
class Drawing(
    private val tokens: Tokens, private val length: Int, private val vocab: Int, private val params: SamplingParams,
    private val noise: Noise,
) {
    private val sampled = params.rejects
    private val stream = if (sampled) DRAFT + tokens.size else TARGET

    private fun cut(logits: FloatArray) = if (logits.size > vocab) logits.copyOf(vocab) else logits

    /** Up to [width] draft tokens after [prefix], siblings without replacement (Gumbel top-k, arXiv 1903.06059); null = greedy. */
    private fun choose(logits: FloatArray, prefix: List<Int>, position: Int, width: Int): Pair<IntArray, Support?> {
        if (params.greedy) {
            val scores = adjusted(logits, params, prefix)
            val best = argmax(scores) // a NaN wins every argmax, so looking at the winner is enough
            if (!scores[best].isFinite()) throw noFiniteLogits()
            return (if (width == 1) intArrayOf(best) else bestOf(doubles(scores), width)) to null
        }
        val found = support(logits, params, prefix)
        if (width == 1) return intArrayOf(found.draw(noise, position, stream)) to found
        val gumbel = noise.gumbel(position, found.ids, stream)
        val best = bestOf(DoubleArray(gumbel.size) { found.logits[it] + gumbel[it] }, width)
        return IntArray(best.size) { found.ids[best[it]] } to found
    }

    /**
     * A chain; no draft token AFTER one that is [weak], which gets the unadjusted draft probability of each except the last.  [step]:
     * draft logits [>= vocab] after one more draft token (null = after the committed tokens).  [best]: the likeliest token and its logit
     * instead, for greedy requests.
     */
    fun chain(step: (Int?) -> FloatArray, weak: Weak? = null, best: ((Int?) -> Pair<Int, Float>)? = null): Proposal {
        val guesses = Tokens()
        val prefix = Prefix(tokens, guesses)
        val probs = ArrayList<DoubleArray>()
        val quick = best?.takeIf { params.plainGreedy && weak == null }
        while (guesses.size < length) {
            val last = guesses.lastOrNull()
            if (quick != null) {
                val (guess, logit) = quick(last)
                if (!logit.isFinite()) throw noFiniteLogits()
                guesses.push(guess)
                continue
            }
            val logits = cut(step(last))
            val (chosen, support) = choose(logits, prefix, prefix.size, 1)
            if (sampled) probs.add(support!!.spread(vocab))
            guesses.push(chosen[0])
            if (weak != null && guesses.size < length && weak(exp(logSoftmaxAt(logits, chosen[0])))) break
        }
        return Proposal(guesses.toIntArray(), null, if (sampled) probs.toTypedArray() else null)
    }

    fun tree(level: Level, branch: List<Int>): Proposal {
        val guesses = Tokens()
        val parents = Tokens()
        val probs = ArrayList<DoubleArray>()
        var expanded = intArrayOf(-1)
        for ((depth, width) in widthsOf(branch, length).withIndex()) {
            val rows = level(expanded, guesses.toIntArray(), parents.toIntArray())
            val below = Tokens()
            for ((at, node) in expanded.withIndex()) {
                val path = if (params.readsPrefix) pathTo(node, parents::at).map(guesses::at) else emptyList()
                val (chosen, support) = choose(cut(rows.row(at)), Prefix(tokens, path), tokens.size + depth, width)
                val q = if (sampled) support!!.spread(vocab) else null
                for (token in chosen) {
                    below.push(guesses.size)
                    guesses.push(token)
                    parents.push(node)
                    q?.let(probs::add)
                }
            }
            expanded = below.slice(0, if (branch.size == 1) minOf(1, below.size) else below.size)
            if (expanded.isEmpty()) break
        }
        return Proposal(guesses.toIntArray(), parents.toIntArray(), if (sampled) probs.toTypedArray() else null, replacement = false)
    }

    /** A chain with siblings where they help: the trees of SWIFT (arXiv 2410.06916); [step] and [weak] as for [chain]. */
    fun siblings(step: (Int?) -> FloatArray, weak: Weak?, policy: SiblingPolicy, bucket: Int = 0): Proposal {
        val chain = Tokens()
        val prefix = Prefix(tokens, chain)
        val levels = ArrayList<SiblingLevel>()
        var reach = 1.0 // chance that the chain so far is accepted
        while (levels.size < length) {
            val logits = cut(step(chain.lastOrNull()))
            val top = logits[argmax(logits)]
            if (!top.isFinite()) throw noFiniteLogits()
            val spread = ln(logits.sumOf { exp((it - top).toDouble()).toFloat().toDouble() })
            val confidence = exp(-spread)
            fun chance(token: Int) = exp(logits[token].toDouble() - top - spread)
            val paper = (if (params.greedy) GREEDY_WIDTHS else SAMPLED_WIDTHS)[ABOVE.count { confidence <= it }]
            var width = maxOf(1, minOf(policy.most[minOf(levels.size, policy.most.size - 1)], paper, logits.size))
            if (policy.price != null && reach * (1 - confidence) <= policy.least) width = 1 // all that is left is not worth a row
            val (found, support) = choose(logits, prefix, prefix.size, width)
            val chances = when {
                support == null -> DoubleArray(found.size) { chance(found[it]) }
                width == 1 -> doubleArrayOf(1.0)
                else -> support.probs().sortedDescending().take(found.size).toDoubleArray() // by rank, independent of the sampled tokens
            }
            levels.add(SiblingLevel(found, chances, chance(found[0]), if (sampled) support!!.spread(vocab) else null))
            chain.push(found[0])
            reach *= levels.last().sure
            if (weak != null && levels.size < length && weak(levels.last().sure)) break
        }
        return assemble(levels, counts(levels, policy), bucket)
    }
}

private fun counts(levels: List<SiblingLevel>, policy: SiblingPolicy): IntArray {
    val counts = IntArray(levels.size)
    var reach = 1.0
    var expected = 1.0
    val offers = ArrayList<Pair<Double, Int>>()
    for ((depth, level) in levels.withIndex()) {
        for (at in 1 until level.chances.size) offers.add(-reach * level.chances[at] to depth)
        reach *= level.sure
        expected += reach
    }
    var rows = 1 + levels.size
    for ((gain, depth) in offers.sortedWith(compareBy({ it.first }, { it.second }))) {
        if (rows > MOST_ROWS || (policy.price != null && -gain <= policy.price.invoke(levels.size, expected, rows))) break
        counts[depth]++
        rows++
    }
    return counts
}

/** The chain first, so that its rows have plain decoding's cache slots, then all siblings. */
private fun assemble(levels: List<SiblingLevel>, siblings: IntArray, bucket: Int): Proposal {
    val depths = levels.indices + siblings.flatMapIndexed { depth, count -> List(count) { depth } }
    val ranks = levels.map { 0 } + siblings.flatMap { count -> List(count) { it + 1 } }
    val tokens = IntArray(depths.size) { levels[depths[it]].tokens[ranks[it]] }
    val probs = if (levels[0].q == null) null else Array(depths.size) { levels[depths[it]].q!! }
    val chain = siblings.all { it == 0 }
    return Proposal(tokens, if (chain) null else IntArray(depths.size) { depths[it] - 1 }, probs, chain, bucket)
}
