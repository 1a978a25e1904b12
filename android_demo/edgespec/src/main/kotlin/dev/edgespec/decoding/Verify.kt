package dev.edgespec.decoding

import dev.edgespec.InvalidRequest
import kotlin.math.*

/* Accepted guesses of chains and trees; p is the target's distribution at a row, q the draft's; lossy only by [Accept]. */

/** Verify [proposal] against the rows of the target's pass over it: row 0 follows the pending token, i + 1 node i. */
fun verify(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept = Accept.EXACT): Verdict {
    val chain = proposal.parents == null
    val forced = if (chain) minOf(accept.minBlock, proposal.size) else 0 // guesses that are accepted unseen
    if (accept.rule != "exact") return relax(proposal, rows, accept, forced)
    val probs = proposal.probs
    if (probs == null || rows.matching) return match(proposal, rows, forced)
    if (chain && rows.block) return block(proposal.tokens, probs, rows, noise, forced)
    return reject(proposal, probs, rows, noise, forced)
}

/** Whether the round's tokens are plain decoding's very ones; [exactTrees]: rows of trees have the bits of chains. */
fun keepsText(proposal: Proposal, rows: RowSampler, accept: Accept, exactTrees: Boolean): Boolean {
    val sameRows = proposal.parents == null || exactTrees
    return accept.lossless && sameRows && (proposal.probs == null || rows.matching)
}

private fun upTo(count: Int) = IntArray(count) { it }

/** Descend while plain decoding would have emitted the guess. */
private fun match(proposal: Proposal, rows: RowSampler, forced: Int): Verdict {
    val path = upTo(forced).toMutableList()
    while (true) {
        val node = path.lastOrNull() ?: -1
        val token = rows.choose(node + 1)
        path += proposal.children(node).firstOrNull { proposal.tokens[it] == token } ?: return Verdict(path.toIntArray(), token)
    }
}

/**
 * Speculative sampling (arXiv 2211.17192 algorithm 1, 2302.01318 algorithm 2); several children of a node are tried in
 * turn against the rest of p (arXiv 2305.09781 with replacement, 2402.12374 without).
 */
private fun reject(proposal: Proposal, probs: Array<DoubleArray>, rows: RowSampler, noise: Noise, forced: Int): Verdict {
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
            if (q[token] <= 0) continue // cannot have been sampled from q: no evidence either way
            // u q < p instead of u < p / q: q may be tiny; strict, because u may be 0 and p = 0 must never pass
            if (noise.uniform(position, ACCEPT + sibling) * q[token] < p[token]) {
                node = child
                break
            }
            tried.add(token)
            val residual = DoubleArray(p.size) { maxOf(p[it] - q[it], 0.0) }
            val left = residual.sum()
            if (left > 0) { // all zero: p and q are equal except for rounding, and p is the right fall-back
                for (at in residual.indices) residual[at] /= left
                p = residual
            }
        }
        if (node < 0) return Verdict(path.toIntArray(), draw(p, noise.uniform(position, RESIDUAL)))
        path.add(node)
    }
}

/** Block verification of a chain: arXiv 2403.10444, algorithm 2.  The longest passing prefix is accepted. */
private fun block(tokens: IntArray, probs: Array<DoubleArray>, rows: RowSampler, noise: Noise, forced: Int): Verdict {
    val start = rows.position(0)
    var stand = forced
    var held = 1.0 // p_i of the paper: the chance that at least the first i guesses are accepted
    var left: DoubleArray? = null // not normalized: distribution of the next token if exactly `stand` draft tokens are accepted
    for (i in forced..tokens.size) {
        // q cannot have sampled this guess: the chain ends before it
        val q = probs.getOrNull(i)?.takeIf { it[tokens[i]] > 0 }
        val p = if (q == null) null else rows.distribution(i)
        var residual: DoubleArray? = null
        var passes = held
        if (p != null && q != null) {
            residual = DoubleArray(p.size) { maxOf(held * p[it] - q[it], 0.0) }
            val mass = residual.sum()
            passes = if (mass > 0 || held < 1) mass / (mass + 1 - held) else 1.0
            if (mass <= 0) residual = p // p and q are equal except for rounding
        }
        if (i == forced || noise.uniform(rows.position(i - 1), BLOCK + start) < passes) {
            stand = i
            left = residual
        }
        if (p == null || q == null) break
        val mine = held * p[tokens[i]]
        held = if (mine >= q[tokens[i]]) 1.0 else mine / q[tokens[i]]
        if (held <= 0) break // nothing longer can be accepted, so its rows are not read
    }
    if (left == null) return Verdict(upTo(stand), rows.choose(stand))
    return Verdict(upTo(stand), draw(left, noise.uniform(rows.position(stand), RESIDUAL)))
}

/** The longest path of guesses that a lossy rule accepts, the one of most merit among equally long ones. */
private fun relax(proposal: Proposal, rows: RowSampler, accept: Accept, forced: Int): Verdict {
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
        for (child in below.reversed()) judge(proposal.tokens[child])?.let { open.addLast(path + child to merit + it) }
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

/** Merit of a guess under a lossy rule, the larger the better, or null = rejected. */
typealias Judge = (Int) -> Double?

/**
 * Acceptance rule; all rules except `exact` are lossy on purpose.
 *
 * `typical`: p(guess) > min(epsilon, delta exp(-H(p))) (Medusa, arXiv 2401.10774 section 2.3.1); `top-k`: a guess among
 * the k likeliest; `distance`: at most this many ids from the likeliest token (arXiv 1811.03115 section 5); `all`.
 * [minBlock]: minimum accepted guesses of a chain under any rule.
 */
data class Accept(
    val rule: String = "exact", val epsilon: Double = 0.09, val delta: Double = 0.3, val k: Int = 1, val distance: Int = 0,
    val minBlock: Int = 0,
) {
    init {
        if (rule !in RULES) throw InvalidRequest("acceptance rule '$rule': expected one of ${RULES.joinToString(", ")}")
        for ((name, value) in listOf("epsilon" to epsilon, "delta" to delta)) {
            if (!(value.isFinite() && value > 0)) {
                throw InvalidRequest("$name of typical acceptance is ${number(value)}: expected a number > 0")
            }
        }
        for ((name, value, least) in listOf(Triple("k", k, 1), Triple("distance", distance, 0), Triple("min_block", minBlock, 0))) {
            if (value < least) throw InvalidRequest("$name of the acceptance rule is $value: expected an integer >= $least")
        }
    }

    val lossless: Boolean get() = rule == "exact" && minBlock == 0 // whether the text keeps the distribution of plain decoding
    val approximations: List<String>
        get() {
            val words = when (rule) {
                "typical" -> listOf("typical acceptance (epsilon ${number(epsilon)}, delta ${number(delta)})")
                "top-k" -> listOf("guesses accepted among the $k likeliest tokens")
                "distance" -> listOf("guesses accepted within $distance of the likeliest token")
                "all" -> listOf("every guess accepted")
                else -> emptyList()
            }
            return if (minBlock > 0) words + "at least $minBlock guesses accepted" else words
        }

    fun judge(rows: RowSampler, row: Int): Judge {
        if (rule == "all") return { 0.0 }
        if (rule == "top-k") return { token -> rows.rank(row, token).takeIf { it < k }?.let { -it.toDouble() } }
        if (rule == "distance") {
            val best = rows.likeliest(row)
            return { token -> abs(token - best).takeIf { it <= distance }?.let { -it.toDouble() } }
        }
        val p = rows.distribution(row)
        val entropy = -p.sumOf { if (it > 0) it * ln(it) else 0.0 }
        val least = minOf(epsilon, delta * exp(-entropy))
        return { token -> if (p[token] > least) ln(p[token]) else null }
    }

    companion object {
        val RULES = listOf("exact", "typical", "top-k", "distance", "all")
        val EXACT = Accept()
    }
}

/** A number without a useless fraction: 1, 0.5. */
internal fun number(value: Double): String =
    if (value == value.toLong().toDouble()) value.toLong().toString() else value.toString()
