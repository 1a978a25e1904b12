package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import kotlin.math.exp
import kotlin.math.ln

/*
 * Drawing guesses from draft logits: chains, trees, and chains whose nodes may have siblings.
 *
 * Greedy guesses are deterministic.  Rejection sampling draws from q, the draft's adjusted distribution, with noise of
 * its own for each round and reports q; coupled sampling draws with the target's noise (arXiv 2408.07978) and needs no q.
 */

private fun streamOf(params: SamplingParams, tokens: Tokens) = if (params.rejects) DRAFT + tokens.size else TARGET

internal fun noFiniteLogits() = EdgespecError("expected finite draft logits, got NaN or infinity")

/**
 * Up to [length] guesses, one after the other; none AFTER one whose unadjusted draft probability is below [stop].
 *
 * [step]: draft logits [>= vocab] after one guess more (null = after the committed tokens).  [best]: instead of it for
 * greedy requests without [stop]: the likeliest token and its logit.
 */
fun drawChain(
    step: (Int?) -> FloatArray,
    tokens: Tokens,
    length: Int,
    vocab: Int,
    params: SamplingParams,
    noise: Noise,
    stop: Double = 0.0,
    best: ((Int?) -> Pair<Int, Float>)? = null,
): Proposal {
    if (length < 1) return Proposal.EMPTY
    val sampled = params.rejects
    val stream = streamOf(params, tokens)
    val guesses = Tokens()
    val prefix = Prefix(tokens, guesses)
    val probs = ArrayList<DoubleArray>()
    val least = if (stop > 0) ln(stop) else Double.NEGATIVE_INFINITY
    while (true) {
        val last = if (guesses.size > 0) guesses.at(-1) else null
        if (best != null && params.plainGreedy && stop <= 0) {
            val (guess, logit) = best(last)
            if (!logit.isFinite()) throw noFiniteLogits()
            guesses.push(guess)
            if (guesses.size == length) return Proposal(guesses.toIntArray())
            continue
        }
        val logits = cut(step(last), vocab)
        val guess: Int
        if (params.plainGreedy) {
            guess = argmax(logits)
            if (!logits[guess].isFinite()) throw noFiniteLogits()
        } else {
            val found = support(logits, params, prefix)
            guess = found.draw(noise, prefix.size, stream)
            if (sampled) probs.add(found.spread(vocab))
        }
        guesses.push(guess)
        if (guesses.size == length || (stop > 0 && logSoftmaxAt(logits, guess) < least)) {
            return Proposal(guesses.toIntArray(), null, if (sampled) probs.toTypedArray() else null)
        }
    }
}

/** Draft logits beyond the target's vocabulary are padding and ignored. */
internal fun cut(logits: FloatArray, vocab: Int) = if (logits.size > vocab) logits.copyOf(vocab) else logits

// -- trees ---------------------------------------------------------------------------------------------------------------

/** Children of each expanded node by depth: one number of [branch] is a chain whose nodes have so many, several a full tree. */
fun widthsOf(branch: List<Int>, length: Int): List<Int> =
    if (branch.size == 1) List(minOf(length, MOST_NODES / branch[0])) { branch[0] } else branch.take(length)

/** [length + 1]: rows of the pass that verifies the tree cut at each depth. */
fun rowsOf(branch: List<Int>, length: Int): IntArray {
    val rows = Tokens(intArrayOf(1))
    var level = 1
    for (width in widthsOf(branch, length)) {
        level = if (branch.size == 1) width else level * width
        rows.push(rows.at(-1) + level)
    }
    while (rows.size < length + 1) rows.push(rows.at(-1))
    return rows.toIntArray()
}

/** (nodes to expand, guesses so far, their parents) -> draft logits, a row for each node; node -1 is the pending token. */
typealias Level = (IntArray, IntArray, IntArray) -> Matrix

/** A tree of up to [length] levels; siblings are drawn without replacement (Gumbel top-k, arXiv 1903.06059). */
fun drawTree(
    level: Level,
    tokens: Tokens,
    branch: List<Int>,
    length: Int,
    vocab: Int,
    params: SamplingParams,
    noise: Noise,
): Proposal {
    if (length < 1) return Proposal.EMPTY
    val sampled = params.rejects
    val stream = streamOf(params, tokens)
    val guesses = Tokens()
    val parents = Tokens()
    val drawnFrom = ArrayList<DoubleArray>()
    var expanded = intArrayOf(-1)
    for ((depth, width) in widthsOf(branch, length).withIndex()) {
        val rows = level(expanded, guesses.toIntArray(), parents.toIntArray())
        val below = Tokens()
        for ((at, node) in expanded.withIndex()) {
            val logits = cut(rows.row(at), vocab)
            val prefix = Prefix(tokens, if (params.repetitionPenalty != 1.0) pathTo(node, guesses, parents) else emptyList())
            val chosen: IntArray
            if (params.greedy) {
                val scores = adjusted(logits, params, prefix)
                chosen = bestOf(doubles(scores), width)
                // a NaN is never among the best, but wins every argmax
                if (chosen.isEmpty() || !scores[argmax(scores)].isFinite()) throw noFiniteLogits()
            } else {
                val found = support(logits, params, prefix)
                val position = tokens.size + depth
                chosen = noisiest(found, noise, position, stream, width)
                if (sampled) {
                    val q = found.spread(vocab)
                    repeat(chosen.size) { drawnFrom.add(q) }
                }
            }
            for (token in chosen) {
                below.push(guesses.size)
                guesses.push(token)
                parents.push(node)
            }
        }
        expanded = if (branch.size == 1) below.slice(0, minOf(1, below.size)) else below.toIntArray()
        if (expanded.isEmpty()) break
    }
    return Proposal(guesses.toIntArray(), parents.toIntArray(), if (sampled) drawnFrom.toTypedArray() else null, replacement = false)
}

/** The [width] tokens of the largest noisy logits, in the order of drawing. */
private fun noisiest(found: Support, noise: Noise, position: Int, stream: Long, width: Int): IntArray {
    val gumbel = noise.gumbel(position, found.ids, stream)
    val noisy = DoubleArray(gumbel.size) { found.logits[it] + gumbel[it] }
    return bestOf(noisy, width).map { found.ids[it] }.toIntArray()
}

private fun pathTo(node: Int, guesses: Tokens, parents: Tokens): List<Int> {
    val path = ArrayDeque<Int>()
    var at = node
    while (at >= 0) {
        path.addFirst(guesses.at(at))
        at = parents.at(at)
    }
    return path
}

// -- siblings: the trees of SWIFT (arXiv 2410.06916) --------------------------------------------------------------------------

private const val MOST_ROWS = 32
private val ABOVE = doubleArrayOf(0.95, 0.8, 0.5) // confidence, and the paper's guesses per node above it, ...
private val GREEDY_WIDTHS = intArrayOf(3, 5, 8, 10)
private val SAMPLED_WIDTHS = intArrayOf(1, 3, 5, 10)

/**
 * How many siblings to offer: at most [most] guesses per node by depth; [price]: (depth, expected tokens of the chain,
 * rows) -> expected tokens that one row more must gain, null = all; no row is cheaper than [least].
 */
class SiblingPolicy(val most: List<Int>, val price: ((Int, Double, Int) -> Double)? = null, val least: Double = 0.0)

/** Guesses at one depth, the chain's own first; what the draft gives each rank, the first, and what they were drawn from. */
private class SiblingLevel(val tokens: IntArray, val chances: DoubleArray, val sure: Double, val q: DoubleArray?)

/** A chain of up to [length] guesses with siblings where they help; arguments as for [drawChain]. */
fun drawSiblings(
    step: (Int?) -> FloatArray,
    tokens: Tokens,
    length: Int,
    vocab: Int,
    params: SamplingParams,
    noise: Noise,
    stop: Double,
    policy: SiblingPolicy,
    bucket: Int = 0,
): Proposal {
    if (length < 1) return Proposal.EMPTY
    val sampled = params.rejects
    val stream = streamOf(params, tokens)
    val chain = Tokens()
    val prefix = Prefix(tokens, chain)
    val levels = ArrayList<SiblingLevel>()
    var reach = 1.0 // chance that the chain so far is accepted
    while (levels.size < length) {
        val logits = cut(step(levels.lastOrNull()?.tokens?.get(0)), vocab)
        val top = logits[argmax(logits)]
        if (!top.isFinite()) throw noFiniteLogits()
        val spread = ln(logits.sumOf { exp((it - top).toDouble()).toFloat().toDouble() })
        val confidence = exp(-spread)
        fun chance(token: Int) = exp(logits[token].toDouble() - top - spread)
        val paper = (if (params.greedy) GREEDY_WIDTHS else SAMPLED_WIDTHS)[ABOVE.count { confidence <= it }]
        var width = maxOf(1, minOf(policy.most[minOf(levels.size, policy.most.size - 1)], paper, logits.size))
        if (policy.price != null && reach * (1 - confidence) <= policy.least) width = 1 // not even all that is left would be worth a row
        val level = if (params.greedy) {
            val found = bestOf(doubles(adjusted(logits, params, prefix)), width)
            val chances = DoubleArray(found.size) { chance(found[it]) }
            SiblingLevel(found, chances, chances[0], null)
        } else {
            val drawable = support(logits, params, prefix)
            val single = width == 1
            val found = if (single) {
                intArrayOf(drawable.draw(noise, prefix.size, stream))
            } else {
                noisiest(drawable, noise, prefix.size, stream, width)
            }
            // by rank, whatever was drawn
            val chances = if (single) doubleArrayOf(1.0) else drawable.probs().sortedDescending().take(found.size).toDoubleArray()
            SiblingLevel(found, chances, chance(found[0]), if (sampled) drawable.spread(vocab) else null)
        }
        levels.add(level)
        chain.push(level.tokens[0])
        reach *= level.sure
        if (level.sure < stop) break
    }
    return assemble(levels, siblings(levels, policy), bucket)
}

/** How many siblings the node at each depth gets. */
private fun siblings(levels: List<SiblingLevel>, policy: SiblingPolicy): IntArray {
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

/** The chain first, so that its rows stand in the cache where plain decoding's would, then all siblings. */
private fun assemble(levels: List<SiblingLevel>, siblings: IntArray, bucket: Int): Proposal {
    val depths = levels.indices + siblings.flatMapIndexed { depth, count -> List(count) { depth } }
    val ranks = levels.map { 0 } + siblings.flatMap { count -> List(count) { it + 1 } }
    val tokens = IntArray(depths.size) { levels[depths[it]].tokens[ranks[it]] }
    val probs = if (levels[0].q == null) null else Array(depths.size) { levels[depths[it]].q!! }
    val chain = siblings.all { it == 0 }
    return Proposal(tokens, if (chain) null else IntArray(depths.size) { depths[it] - 1 }, probs, chain, bucket)
}
