package dev.edgespec.drafters

import dev.edgespec.decoding.*

private const val START = 0.6 // threshold of the first round; the constants of arXiv 2309.08168
private const val STEP = 0.01 // how far one verification may ask to move it
private const val WANTED = 0.9 // acceptance rate to steer to
private const val MATCHED_DECAY = 0.5
private const val STOP_DECAY = 0.9

/**
 * Draws chains from the target itself with sub-layers left out; stops after a guess it is not sure of: Draft & Verify
 * (arXiv 2309.08168).  The verifying pass overwrites the draft's keys and values: no extra memory.
 */
open class SelfSpec(protected val target: SelfDraftTarget, protected var skip: SkipSet, private val gammaMax: Int = 12) : Drafter {
    override val name = "self-spec"
    protected var stop = START // draft no further after a guess of a smaller draft probability
    private var matched = 0.0 // smoothed acceptance rate
    private var asked = 0
    protected var params = SamplingParams()
    protected var noise = Noise(0)

    /** The threshold is carried across requests, except where that would make a seeded text depend on earlier ones. */
    override fun begin(request: DraftRequest): Int? {
        params = request.params
        noise = request.noise
        if (params.seededRejection) {
            stop = START
            matched = 0.0
        }
        return null
    }

    protected fun ask(budget: Int): Int {
        asked = minOf(budget, gammaMax)
        return asked
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal =
        drawChain(steps(tokens), tokens, ask(budget), target.vocabSize, params, noise, stop)

    /** What runs one draft step after the other: a guess (null at first) -> logits [vocab] after it. */
    protected fun steps(tokens: Tokens): (Int?) -> FloatArray {
        var offset = 0
        return { guess ->
            val logits = target.forwardSkipped(intArrayOf(guess ?: tokens.at(-1)), offset, skip).logits
            offset++
            logits.row(logits.rows - 1)
        }
    }

    override fun dryStep(first: Boolean): Boolean {
        if (!first) target.forwardSkipped(intArrayOf(0), 0, skip)
        return !first
    }

    /** Move the threshold after a verification. */
    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val drafted = proposal.size
        if (drafted == 0) return
        matched = MATCHED_DECAY * matched + (1 - MATCHED_DECAY) * (verdict.path.size.toDouble() / drafted)
        var wanted = stop
        // else the length, not the threshold, ended the draft
        if (matched < WANTED) wanted += STEP else if (drafted < asked) wanted -= STEP
        stop = (STOP_DECAY * stop + (1 - STOP_DECAY) * wanted).coerceIn(0.0, 1.0)
    }
}
