package dev.edgespec.drafters

import dev.edgespec.decoding.*
import kotlin.math.abs

/** A caller's own proposer: any object that can say what might come next ([dev.edgespec.decoding.Settings.proposer]). */
fun interface Proposer {
    /**
     * Guess what follows [tokens], a copy of prompt and text so far; at most [budget] guesses count.  Null or empty to
     * pass.  A proposal with probs keeps the model's distribution only if its guesses were drawn from them.
     */
    fun propose(tokens: IntArray, budget: Int): Proposal?

    /** What a result calls it. */
    val name: String get() = javaClass.simpleName.ifEmpty { "proposer" }

    /** False if it is dear, so that it is asked only where its guesses pay. */
    val cheap: Boolean get() = true

    fun bind(params: SamplingParams, noise: Noise) = Unit

    fun begin(tokens: IntArray) = Unit

    fun observe(proposal: Proposal, verdict: Verdict, output: Pass) = Unit
}

/** A drafter around a caller's proposer.  Whatever it returns is checked: nonsense ends it, not the text. */
class Custom(private val own: Proposer, private val vocab: Int) : Drafter {
    override val name: String = own.name
    override val cheap: Boolean = own.cheap

    override fun bind(params: SamplingParams, noise: Noise) = own.bind(params, noise)

    override fun begin(tokens: Tokens) = own.begin(tokens.toIntArray())

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val found = own.propose(tokens.toIntArray(), budget)?.copy(resume = null) ?: return Proposal.EMPTY
        found.parents?.let { parents ->
            require(parents.size == found.size && parents.indices.all { parents[it] in -1 until it }) {
                "expected parents before their children"
            }
        }
        if (found.probs != null && found.size > 0) {
            val valid = found.probs.size == found.size &&
                found.probs.all { q -> q.size == vocab && q.all { it >= 0 } && abs(q.sum() - 1) <= 1e-3 }
            require(valid) { "expected probs of shape (${found.size}, $vocab), every row a distribution" }
        }
        return found.truncated(budget)
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) = own.observe(proposal, verdict, output)
}
