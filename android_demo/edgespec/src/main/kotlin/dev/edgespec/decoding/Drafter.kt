package dev.edgespec.decoding

import kotlin.coroutines.cancellation.CancellationException
import kotlin.math.abs

/*
 * Interface of drafters, and the guard that contains their failures.  A drafter sees a request in this order: begin; absorb while the
 * prompt is read; then in every round prefill, propose, observe and timed.  Control asks it for a forecast first, and times its dryStep
 * before the first request.
 */

private const val OFF = 1e-3 // how far the probabilities of a guess may sum from 1

/** A request as its drafter sees it: the prompt, or all text so far if a drafter starts in the middle; the encoder's input. */
class DraftRequest(
    val tokens: Tokens, val params: SamplingParams = SamplingParams(), val noise: Noise = Noise(0), val stats: Stats = Stats(),
    val source: IntArray = NONE,
)

/** States of the target that a drafter may need: of the last layer, or auxiliary ones of every token. */
enum class State { HIDDEN, AUX_HIDDEN }

/** Forecast of the next proposal: its bucket, and [budget + 1] rows of the pass over it cut at each depth. */
class Forecast(val bucket: Int? = null, val rows: IntArray? = null)

/** Any source of guesses; a failing hook costs the request its drafter, never its text; only [name] and [propose] are needed. */
interface Drafter {
    val name: String // the method, as the bundle calls it
    val cheap: Boolean get() = false // whether proposing costs next to nothing
    val stepsAtOnce: Boolean get() = false // whether proposing costs the same at any depth

    /** False if its last proposal first had to read tokens that it missed while it was not asked. */
    val caughtUp: Boolean get() = true

    /** Whether it drafts no further where a guess more is expected to gain less than [leastGain] says. */
    val stops: Boolean get() = false

    /** Depth -> tokens that a guess after those down to it must gain; control sets it before it asks. */
    var leastGain: ((Int) -> Double)?
        get() = null
        set(_) = Unit

    /** States of the target that [observe] needs; auxiliary ones of every token: see [begin] and [absorb]. */
    val wants: Set<State> get() = emptySet()
    val reason: String get() = "" // its remark about a request
    val proposer: String get() = name // the method that made the last proposal

    /** A request begins; returns how many of its first tokens it needs no auxiliary states of, null = all. */
    fun begin(request: DraftRequest): Int? = null
    fun absorb(first: Int, auxHidden: Matrix) = Unit // take the auxiliary states of tokens [first] and on of the prompt, a view

    /** Read at most [most] tokens (0 = only ask) that the next proposal needs; returns how many are left, 0 if none is due. */
    fun prefill(tokens: Tokens, most: Int): Int = 0
    fun forecast(budget: Int): Forecast = Forecast() // facts about the next proposal before it is made

    /** Guess the tokens after [tokens], the pending one last; [budget]: deepest guess allowed, >= 1. */
    fun propose(tokens: Tokens, budget: Int): Proposal

    /** Learn from a round: row 0 of [output] follows the pending token, row i + 1 node i. */
    fun observe(proposal: Proposal, verdict: Verdict, output: Pass) = Unit

    /** Learn the cost of the round; for an empty proposal, that of other rows. */
    fun timed(proposal: Proposal, time: RoundTime) = Unit

    /** Run one draft step for timing, or the [first] of a round if it costs differently. */
    fun dryStep(first: Boolean): (() -> Any)? = null

    fun learned(): Any? = null // a copy of the learned state, for another drafter of its kind; null = none
    fun goOnFrom(learned: Any) = Unit // start from the state that another one of its kind has [learned]

    /** Continue without the inner drafter in use, which has failed; false = none is left. */
    fun lose(why: String): Boolean = false
}

/** Guards the loop against a drafter, which is dropped at its first failure; the reason is kept. */
class Guard(drafter: Drafter, private val stats: Stats, private val eos: Set<Int>, private val target: Target) {
    private var drafter: Drafter? = drafter
    private val vocab = target.vocabSize
    private val layered = target as? LayeredTarget
    var proposer = PLAIN // of the last proposal
        private set

    private fun drop(where: String, error: Throwable) {
        // an error of the machine (out of memory) may be a drafter's too; a cancelled coroutine is not a failure
        if (error is CancellationException || error is InterruptedException) throw error
        val mine = drafter
        var why = stats.drop(mine?.name ?: "", where, "${error.javaClass.simpleName}: ${error.message}")
        try {
            if (mine?.lose(why) == true) return
        } catch (second: Throwable) { // then all of it is dropped
            why += "; ${second.javaClass.simpleName}: ${second.message}"
        }
        drafter = null
        stats.droppedReason = why
    }

    private inline fun <T> guarded(where: String, otherwise: T, run: (Drafter) -> T): T {
        try {
            return run(drafter ?: return otherwise)
        } catch (error: Throwable) {
            drop(where, error)
            return otherwise
        }
    }

    fun begin(request: DraftRequest): Int? {
        val known = guarded("begin", null) { it.begin(request) }
        return if (State.AUX_HIDDEN in tellTarget() && layered != null) known ?: request.tokens.size else null
    }

    fun prefill(tokens: Tokens, most: Int): Int = guarded("prefill", 0) { it.prefill(tokens, most) }
    fun absorb(first: Int, auxHidden: Matrix) = guarded("absorb", Unit) { it.absorb(first, auxHidden) }
    fun observe(proposal: Proposal, verdict: Verdict, output: Pass) = guarded("observe", Unit) { it.observe(proposal, verdict, output) }
    fun timed(proposal: Proposal, time: RoundTime) = guarded("timed", Unit) { it.timed(proposal, time) }

    /** The drafter's proposal within [budget], nothing below an EOS; the empty one where it failed. */
    fun propose(tokens: Tokens, budget: Int): Proposal {
        val found = if (budget > 0) guarded("propose", Proposal.EMPTY) { checked(it, tokens, budget) } else Proposal.EMPTY
        tellTarget()
        return found
    }

    /** Have the target's next pass keep the states that the drafter wants. */
    private fun tellTarget(): Set<State> {
        val wants = guarded("wants", emptySet()) { it.wants }
        layered?.keepHidden = State.HIDDEN in wants
        layered?.keepAuxHidden = State.AUX_HIDDEN in wants
        return wants
    }

    /** Get a proposal, reject invalid ones, and cut tokens beyond the limits. */
    private fun checked(drafter: Drafter, tokens: Tokens, budget: Int): Proposal {
        var proposal = drafter.propose(tokens, budget)
        if (proposal.empty) return Proposal.EMPTY
        proposer = drafter.proposer
        proposal.check(vocab)
        require(proposal.parents == null || target.trees) { "a tree of guesses, but this target takes chains" }
        proposal = proposal.truncated(budget)
        if (eos.isNotEmpty()) proposal = proposal.pruned(proposal.tokens.indices.filter { proposal.tokens[it] in eos })
        proposal.headStart?.check(layered, proposal)
        return proposal
    }
}

/** Reject an invalid proposal over a vocabulary of [vocab] tokens. */
internal fun Proposal.check(vocab: Int) {
    require(tokens.all { it in 0 until vocab }) { "a guess outside the vocabulary of $vocab" }
    // before anything walks up the tree: in a circle it would walk for ever
    require(parents == null || (parents.size == size && parents.indices.all { parents[it] in -1 until it })) {
        "parents must come before their children"
    }
    if (probs == null || size == 0) return
    require(probs.size == size && probs.all { it.size == vocab }) {
        "draft probabilities must be of shape ($size, $vocab), not (${probs.size}, ${probs.firstOrNull()?.size})"
    }
    // NaN fails the comparison too; with a q that is not a distribution, rejection would change the text's
    require(probs.all { q -> q.all { it >= 0 } && abs(q.sum() - 1) < OFF }) {
        "draft probabilities must be finite, at least 0 and sum to 1 for each guess"
    }
}
