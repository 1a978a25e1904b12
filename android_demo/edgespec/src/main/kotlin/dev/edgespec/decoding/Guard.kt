package dev.edgespec.decoding

import kotlin.coroutines.cancellation.CancellationException
import kotlin.math.abs

private const val OFF = 1e-3 // how far the probabilities of a guess may sum from 1

/** A drafter that cannot break the request: it is dropped at its first failure, and the reason is kept. */
class Guard(drafter: Drafter, private val stats: Stats, private val eos: Set<Int>, private val target: Target) {
    private var drafter: Drafter? = drafter
    private val vocab = target.vocabSize

    var proposer = PLAIN // of the last proposal
        private set

    private fun drop(where: String, error: Throwable) {
        // an error of the machine (out of memory) may be a drafter's too; a cancelled coroutine is nobody's failure
        if (error is CancellationException || error is InterruptedException) throw error
        val mine = drafter
        var drop = Drop(mine?.name ?: "", where, "${error.javaClass.simpleName}: ${error.message}")
        stats.monitor.drops.add(drop)
        try {
            if (mine != null && mine.lose(drop.toString())) return
        } catch (second: Throwable) { // then the whole of it goes
            drop = Drop(drop.method, drop.where, "${drop.error}; ${second.javaClass.simpleName}: ${second.message}")
        }
        drafter = null
        stats.droppedReason = drop.toString()
    }

    private inline fun guarded(where: String, run: (Drafter) -> Unit) {
        val mine = drafter ?: return
        try {
            run(mine)
        } catch (error: Throwable) {
            drop(where, error)
        }
    }

    fun begin(tokens: Tokens, params: SamplingParams, noise: Noise) = guarded("begin") {
        it.watch(stats.monitor.control)
        it.bind(params, noise)
        it.begin(tokens)
    }

    val wantsHidden: Boolean
        get() {
            guarded("wantsHidden") { return it.wantsHidden }
            return false
        }

    val wantsTaps: Boolean
        get() {
            guarded("wantsTaps") { return it.wantsTaps }
            return false
        }

    fun known(tokens: Tokens): Int {
        guarded("known") { return it.known(tokens) }
        return tokens.size
    }

    fun prefill(tokens: Tokens, most: Int): Int {
        guarded("prefill") { return it.prefill(tokens, most) }
        return 0
    }

    fun absorb(first: Int, taps: Matrix) = guarded("absorb") { it.absorb(first, taps) }

    fun propose(tokens: Tokens, budget: Int): Proposal {
        guarded("propose") {
            var proposal = it.propose(tokens, budget)
            if (proposal.size > 0) {
                proposer = it.proposer
                proposal = checked(proposal, budget)
            }
            require(proposal.parents == null || target.trees) { "a tree of guesses, but this target takes chains" }
            val resume = proposal.resume ?: return if (proposal.size > 0) proposal else Proposal.EMPTY
            require(target is LayeredTarget) { "layers have run ahead, but the target cannot resume a pass" }
            require(proposal.parents == null && resume.rows == proposal.size + 1) {
                "expected ${proposal.size + 1} rows of a chain to resume, got ${resume.rows}"
            }
            // in the target's pass they would be its failure
            require(resume.hidden.all { value -> value.isFinite() }) { "the hidden states to resume from must be finite" }
            return proposal
        }
        return Proposal.EMPTY
    }

    fun observe(proposal: Proposal, verdict: Verdict, output: Pass) =
        guarded("observe") { it.observe(proposal, verdict, output) }

    fun timed(proposal: Proposal, draftMs: Double, verifyMs: Double) =
        guarded("timed") { it.timed(proposal, draftMs, verifyMs) }

    /** The proposal within [budget] and without guesses below an EOS. */
    private fun checked(given: Proposal, budget: Int): Proposal {
        require(given.tokens.all { it in 0 until vocab }) { "a guess outside the vocabulary of $vocab" }
        // before anything walks up the tree: in a circle it would walk for ever
        given.parents?.let { parents ->
            require(parents.size == given.size && parents.indices.all { parents[it] in -1 until it }) {
                "parents must come before their children"
            }
        }
        given.probs?.let { probs ->
            require(probs.size == given.size && probs.all { it.size == vocab }) {
                "draft probabilities must be of shape (${given.size}, $vocab), not (${probs.size}, ${probs.firstOrNull()?.size})"
            }
            // NaN fails the comparison too; with a q that is no distribution, rejection would change the text's
            require(probs.all { abs(it.sum() - 1) < OFF }) { "draft probabilities must be finite and sum to 1 for each guess" }
        }
        val proposal = given.truncated(budget)
        if (eos.isEmpty()) return proposal
        val ends = proposal.tokens.indices.filter { proposal.tokens[it] in eos }
        if (ends.isEmpty()) return proposal
        if (proposal.parents == null) return proposal.truncated(ends[0] + 1)
        val dead = HashSet<Int>()
        val cut = ends.toSet()
        for (node in 0 until proposal.size) if (proposal.parent(node) in cut || proposal.parent(node) in dead) dead.add(node)
        return proposal.only((0 until proposal.size).filter { it !in dead })
    }
}
