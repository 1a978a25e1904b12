package dev.edgespec.decoding

/**
 * One round, as a caller that streams sees it: [tokens] emitted, of which the first [accepted] were guesses; all [drafted] guesses in the
 * proposal's order; [rejected]: those that would have followed the accepted ones, in a tree the drafter's first choices; [finish]: why it is
 * the last (eos, length, context or stop), null = it is not; [text]: what the tokens add to the text, in whole characters; [drafter]: who
 * guessed, "" = no drafter; [likely]: log-probabilities of the likeliest tokens in the place of each token, if they were asked for.
 */
class Round(
    val tokens: IntArray, val drafted: IntArray, val accepted: Int, val rejected: IntArray, val logprobs: DoubleArray?, val finish: String?,
    val text: String = "", val drafter: String = "", val likely: List<Map<Int, Double>>? = null,
)

/** Counters and times of a request. */
class Stats {
    var promptTokens = 0
        internal set
    var reusedTokens = 0 // of the prompt, whose KV was still in the session
        internal set
    var tokens = 0
        private set
    var rounds = 0
        private set
    var drafted = 0
        private set
    var accepted = 0
        private set
    val histogram = arrayListOf(0) // histogram[j] = rounds that accepted j guesses
    var prefillMs = 0.0
        internal set
    var decodeMs = 0.0 // of rounds
        internal set
    var passMs = 0.0 // of passes in rounds
        internal set
    var droppedReason: String? = null // drafters that failed, and why
        internal set

    internal fun add(round: Round) {
        rounds++
        tokens += round.tokens.size
        drafted += round.drafted.size
        accepted += round.accepted
        while (histogram.size <= round.accepted) histogram.add(0)
        histogram[round.accepted]++
    }

    val tokensPerRound: Double get() = ratio(tokens, rounds)
    val acceptanceRate: Double get() = ratio(accepted, drafted)
    val tokensPerSecond: Double get() = if (decodeMs > 0) 1000 * tokens / decodeMs else 0.0

    private fun ratio(part: Int, whole: Int): Double = if (whole > 0) part.toDouble() / whole else 0.0
}
