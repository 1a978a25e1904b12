package dev.edgespec.decoding

/*
 * Which guesses stand: one function for chains and trees, deterministic and sampled guesses.  p is the target's
 * distribution at a row, q the draft's.  All of it is lossless; lossy rules must be asked for (Accept).
 */

/** What verification asks of the rows of a target pass. */
interface VerifiedRows : JudgedRows {
    /** Whether sampled guesses too are verified by matching: greedy, or coupled sampling. */
    val matching: Boolean

    /** Whether sampled chains are verified as a block. */
    val block: Boolean

    /** The token that plain decoding emits there. */
    fun choose(row: Int): Int

    /** Index, in the sequence, of the token that the row predicts. */
    fun position(row: Int): Int
}

/** Verify [proposal] against the rows of the target's pass over it: row 0 follows the pending token, i + 1 node i. */
fun verify(proposal: Proposal, rows: VerifiedRows, noise: Noise, accept: Accept = Accept.EXACT): Verdict {
    val chain = proposal.parents == null
    val forced = if (chain) minOf(accept.minBlock, proposal.size) else 0 // guesses that stand unseen
    if (accept.rule != "exact") return relax(proposal, rows, accept, forced)
    val probs = proposal.probs
    if (probs == null || rows.matching) return match(proposal, rows, forced)
    if (chain && rows.block) return block(proposal.tokens, probs, rows, noise, forced)
    return reject(proposal, probs, rows, noise, forced)
}

/**
 * Whether the tokens of this round are the very ones of plain decoding, not only of its distribution.  [exactTrees]: the
 * target's rows of trees have the bits of chains; where attention adds them up in another order, near-ties may differ.
 */
fun keepsText(proposal: Proposal, rows: VerifiedRows, accept: Accept, exactTrees: Boolean): Boolean {
    val sameRows = proposal.parents == null || exactTrees
    return accept.lossless && sameRows && (proposal.probs == null || rows.matching)
}

/** How many positions' guesses were put to the test: the accepted ones, and one more if a guess was refused there. */
fun reached(proposal: Proposal, path: IntArray): Int {
    val last = if (path.isEmpty()) -1 else path.last()
    return path.size + if (proposal.children(last).isNotEmpty()) 1 else 0
}

private fun upTo(count: Int) = IntArray(count) { it }

/** Descend while plain decoding would have emitted the guess. */
private fun match(proposal: Proposal, rows: VerifiedRows, forced: Int): Verdict {
    if (proposal.parents == null) {
        for (at in forced until proposal.size) {
            val token = rows.choose(at)
            if (token != proposal.tokens[at]) return Verdict(upTo(at), token)
        }
        return Verdict(upTo(proposal.size), rows.choose(proposal.size))
    }
    val nodes = ArrayList<Int>()
    var node = -1
    while (true) {
        val token = rows.choose(node + 1)
        node = proposal.children(node).firstOrNull { proposal.tokens[it] == token } ?: -1
        if (node < 0) return Verdict(nodes.toIntArray(), token)
        nodes.add(node)
    }
}

/**
 * Speculative sampling (arXiv 2211.17192 algorithm 1, 2302.01318 algorithm 2); several children of a node are tried in
 * turn against what is left of p (arXiv 2305.09781 with replacement, 2402.12374 without).
 */
private fun reject(proposal: Proposal, probs: Array<DoubleArray>, rows: VerifiedRows, noise: Noise, forced: Int): Verdict {
    val path = upTo(forced).toMutableList()
    var node = forced - 1
    while (true) {
        val row = node + 1
        val below = proposal.children(node)
        if (below.isEmpty()) return Verdict(path.toIntArray(), rows.choose(row)) // bonus
        val position = rows.position(row)
        var p = rows.distribution(row)
        val tried = ArrayList<Int>()
        node = -1
        for ((sibling, child) in below.withIndex()) {
            val token = proposal.tokens[child]
            var q = probs[child]
            if (tried.isNotEmpty() && !proposal.replacement) {
                q = q.copyOf()
                tried.forEach { q[it] = 0.0 }
                val total = q.sum()
                if (total > 0) for (at in q.indices) q[at] /= total
            }
            if (q[token] <= 0) continue // cannot have been drawn from q: no evidence either way
            // u q < p instead of u < p / q: q may be tiny; strict, because u may be 0 and p = 0 must never pass
            if (noise.uniform(position, ACCEPT + sibling) * q[token] < p[token]) {
                node = child
                break
            }
            tried.add(token)
            val residual = DoubleArray(p.size) { maxOf(p[it] - q[it], 0.0) }
            val left = residual.sum()
            if (left > 0) { // all zero: p and q are equal but for rounding, and p itself is the right fall-back
                for (at in residual.indices) residual[at] /= left
                p = residual
            }
        }
        if (node < 0) return Verdict(path.toIntArray(), draw(p, noise.uniform(position, RESIDUAL)))
        path.add(node)
    }
}

/** Block verification of a chain: arXiv 2403.10444, algorithm 2.  The longest beginning that passes stands. */
private fun block(tokens: IntArray, probs: Array<DoubleArray>, rows: VerifiedRows, noise: Noise, forced: Int): Verdict {
    val start = rows.position(0)
    var stand = forced
    var held = 1.0 // p_i of the paper: the chance that at least the first i guesses stand
    var left: DoubleArray? = null // not normalised: what follows if exactly `stand` guesses do
    for (i in forced..tokens.size) {
        // a guess that q cannot have drawn is no evidence: the chain ends before it
        val ends = i == tokens.size || probs[i][tokens[i]] <= 0
        var residual: DoubleArray? = null
        var passes = held
        var p = NO_MASS
        var q = NO_MASS
        if (!ends) {
            p = rows.distribution(i)
            q = probs[i]
            residual = DoubleArray(p.size) { maxOf(held * p[it] - q[it], 0.0) }
            val mass = residual.sum()
            passes = if (mass > 0 || held < 1) mass / (mass + 1 - held) else 1.0
            if (mass <= 0) residual = p // p and q are equal but for rounding
        }
        if (i == forced || noise.uniform(rows.position(i - 1), BLOCK + start) < passes) {
            stand = i
            left = residual
        }
        if (ends) break
        val mine = held * p[tokens[i]]
        held = if (mine >= q[tokens[i]]) 1.0 else mine / q[tokens[i]]
        if (held <= 0) break // nothing longer can stand, and its rows are not looked at
    }
    if (left == null) return Verdict(upTo(stand), rows.choose(stand))
    return Verdict(upTo(stand), draw(left, noise.uniform(rows.position(stand), RESIDUAL)))
}

private val NO_MASS = DoubleArray(0)

/** The longest path of guesses that a lossy rule accepts, the one of most merit among equally long ones. */
private fun relax(proposal: Proposal, rows: VerifiedRows, accept: Accept, forced: Int): Verdict {
    var best = upTo(forced)
    var bestMerit = 0.0
    val open = ArrayDeque(listOf(best to 0.0)) // depth first, the drafter's first choices first
    while (open.isNotEmpty()) {
        val (path, merit) = open.removeLast()
        if (path.size > best.size || (path.size == best.size && merit > bestMerit)) {
            best = path
            bestMerit = merit
        }
        val node = if (path.isEmpty()) -1 else path.last()
        val below = proposal.children(node)
        if (below.isEmpty()) continue
        val judge = accept.judge(rows, node + 1)
        for (child in below.reversed()) {
            judge.merit(proposal.tokens[child])?.let { open.addLast(path + child to merit + it) }
        }
    }
    return Verdict(best, rows.choose(if (best.isEmpty()) 0 else best.last() + 1))
}

/** A token from [p], which need not be normalised, by inversion of [u] in [0, 1). */
private fun draw(p: DoubleArray, u: Double): Int {
    val mass = DoubleArray(p.size)
    var sum = 0.0
    for (at in p.indices) {
        sum += p[at]
        mass[at] = sum
    }
    val wanted = u * sum
    val token = mass.indexOfFirst { it > wanted } // tokens of no mass are skipped
    return if (token >= 0) token else p.indexOfLast { it > 0 } // rounding may reach past the end
}
