package dev.edgespec.decoding

/**
 * Whatever guesses; it never owns a loop over rounds ([decode] does).  An exception in any of its methods costs the
 * request its drafter, never its text.  All but [name], [propose] and [observe] is optional.
 */
interface Drafter {
    /** The method, as the bundle calls it. */
    val name: String

    /** Guess what follows [tokens], the pending one last; [budget]: deepest guess allowed, >= 1. */
    fun propose(tokens: Tokens, budget: Int): Proposal

    /** Learn from a round: row 0 of [output] follows the pending token, row i + 1 node i. */
    fun observe(proposal: Proposal, verdict: Verdict, output: Pass)

    /** The method that made the last proposal. */
    val proposer: String get() = name

    /** How this request samples, and its randomness. */
    fun bind(params: SamplingParams, noise: Noise) = Unit

    /** The prompt. */
    fun begin(tokens: Tokens) = Unit

    /** Where to write what is decided and expected, for statistics. */
    fun watch(control: Control) = Unit

    /** What proposing took, and the target's pass over it. */
    fun timed(proposal: Proposal, draftMs: Double, verifyMs: Double) = Unit

    /** Another drafter's proposal was verified in a pass over so many rows. */
    fun watched(rows: Int, draftMs: Double, verifyMs: Double) = timed(Proposal.EMPTY, draftMs, verifyMs)

    /** One of several drafters inside has failed: leave it out and go on; false = there is none left. */
    fun lose(why: String): Boolean = false

    /** A copy of what requests have shown of it, for one of its kind that begins elsewhere; null = nothing. */
    fun learned(): Any? = null

    /** Begin with what another one of its kind has [learned]. */
    fun goOnFrom(learned: Any) = Unit

    /** One draft step, to be timed before the first request; null = there is none. */
    val stepOnce: (() -> Unit)? get() = null

    /** The first step of a round; null = it takes what any other does. */
    val firstOnce: (() -> Unit)? get() = null

    /** [budget + 1]: rows of the pass that verifies its proposal cut at each depth, where the shape is known before. */
    fun rows(budget: Int): IntArray? = null

    /** Of the next proposal, where that is known before. */
    val bucket: Int? get() = null

    /** Whether [observe] needs the hidden states of passes. */
    val wantsHidden: Boolean get() = false

    /** Whether it needs what is tapped of the target, of every token: see [known] and [absorb]. */
    val wantsTaps: Boolean get() = false

    /** The prompt is about to be read: of how many of its first tokens nothing tapped is needed. */
    fun known(tokens: Tokens): Int = tokens.size

    /**
     * Read at most so many tokens that the next proposal needs -> how many are left; none are, where it will not be asked, or
     * reads so few that nobody waits for it.  [most] is 0 where every round asks whether there are any.
     */
    fun prefill(tokens: Tokens, most: Int): Int = 0

    /** Whether its last proposal took no more than usual: it had not first to read what it missed while it rested. */
    val caughtUp: Boolean get() = true

    /** Tokens [first] and on of the prompt were read: what was tapped of them, a view. */
    fun absorb(first: Int, taps: Matrix) = Unit

    /** Whether proposing costs the same however deep the proposal. */
    val stepsAtOnce: Boolean get() = false

    /** Whether proposing costs next to nothing. */
    val cheap: Boolean get() = false

    /** What it has to say of a request, in words. */
    val reason: String get() = ""

    /** Counters for JSON; the keys are stable. */
    fun usedSummary(): Map<String, Any?> = emptyMap()
}
