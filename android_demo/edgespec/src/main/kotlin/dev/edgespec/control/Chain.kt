package dev.edgespec.control

import dev.edgespec.decoding.*

/**
 * Asks its proposers in order; the first whose proposal has guesses, or layers already run, wins the round and observes it
 * as it was.  For the others it is a round without guesses whose pending token is the last one accepted.  A proposer that
 * fails is left out for the rest of the request.
 */
class Chain(private val proposers: List<Drafter>) : Drafter {
    override val name = "chain"
    override val wants: Set<State> get() = proposers.indices.filter { it !in out }.flatMap { proposers[it].wants }.toSet()
    val won = IntArray(proposers.size) // rounds by proposer
    private val out = HashMap<Int, String>() // why proposers were left out
    private val took = DoubleArray(proposers.size) // milliseconds of each in this round
    private var winner: Int? = null // of the current round
    override var proposer = name // of the last proposal, for statistics
        private set

    init { require(proposers.isNotEmpty()) { "expected at least one proposer, got none" } }

    override fun begin(request: DraftRequest): Int? {
        out.clear()
        var least: Int? = null
        each { _, one -> one.begin(request)?.let { known -> least = minOf(least ?: known, known) } }
        return least
    }

    override fun learned(): Any = proposers.map { it.learned() }

    override fun goOnFrom(learned: Any) {
        for ((one, known) in proposers.zip(learned as List<*>)) if (known != null) one.goOnFrom(known)
    }

    override fun prefill(tokens: Tokens, most: Int): Int {
        var left = 0
        each { _, one -> left += one.prefill(tokens, most) }
        return left
    }

    override fun absorb(first: Int, auxHidden: Matrix) = each { _, one -> one.absorb(first, auxHidden) }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        took.fill(0.0)
        winner = null
        for ((at, one) in proposers.withIndex()) {
            if (at in out) continue
            val start = System.nanoTime()
            var proposal = Proposal.EMPTY
            attempt(at) {
                if (one is Adaptive) one.required = bar(at, budget)
                proposal = one.propose(tokens, budget)
            }
            took[at] = (System.nanoTime() - start) / 1e6
            if (!proposal.empty) {
                won[at]++
                winner = at
                proposer = one.proposer
                return proposal
            }
        }
        return Proposal.EMPTY
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val elsewhere = Verdict(IntArray(0), verdict.nextToken)
        each { at, one ->
            if (at == winner) one.observe(proposal, verdict, output)
            else one.observe(Proposal.EMPTY, elsewhere, row(output, verdict.rows))
        }
    }

    /** All drafters learn the time of the pass, except of one that began while drafting. */
    override fun timed(proposal: Proposal, time: RoundTime) {
        each { at, one ->
            val own = time.copy(draftMs = took[at])
            if (at == winner) one.timed(proposal, own)
            else if (proposal.headStart == null) one.timed(Proposal.EMPTY, own)
        }
    }

    override fun lose(why: String): Boolean {
        val at = winner ?: return false
        leaveOut(at, why)
        winner = null
        return out.size < proposers.size
    }

    override val reason: String
        get() = proposers.withIndex().joinToString("; ") { (at, one) ->
            val why = out[at] ?: one.reason
            "${one.name} won ${won[at]} rounds" + if (why.isEmpty()) "" else " ($why)"
        }

    private fun attempt(at: Int, run: () -> Unit) {
        try {
            run()
        } catch (error: Exception) {
            leaveOut(at, "${error.javaClass.simpleName}: ${error.message}")
        }
    }

    private fun leaveOut(at: Int, why: String) {
        out[at] = "left out: $why"
    }

    private fun each(run: (Int, Drafter) -> Unit) {
        for ((at, one) in proposers.withIndex()) if (at !in out) attempt(at) { run(at, one) }
    }

    /** The speed that the costly proposers after this one promise; 1 = plain decoding's. */
    private fun bar(at: Int, budget: Int): Double =
        proposers.indices.filter { it > at && it !in out }.mapNotNull { (proposers[it] as? Adaptive)?.promised(budget) }.maxOrNull() ?: 1.0
}

/** The pass as if it had been only over the last of the [kept] rows; auxiliary hidden states of all of them. */
private fun row(output: Pass, kept: IntArray): Pass {
    val row = kept.last()
    val best = output.best?.let {
        Best(it.tokens.copyOfRange(row * it.top, (row + 1) * it.top), it.logits.copyOfRange(row * it.top, (row + 1) * it.top), it.top)
    }
    val logits = if (output.logits.rows > row) output.logits.part(row, 1) else output.logits
    return Pass(logits, output.hidden?.part(row, 1), best, output.auxHidden?.only(kept))
}
