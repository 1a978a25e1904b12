package dev.edgespec.decoding

private const val WINDOW = 64 // rounds that [Stats.recent] holds
const val PLAIN = "plain"

/**
 * One round: cost of proposing, and of the pass over [rows] rows, the pending token's included; the proposer ([PLAIN] = none),
 * [tokens] written, [drafted] guesses verified, [accepted] of them written; [work]: rows run through all layers, or as much.
 */
data class RoundTime(
    val draftMs: Double, val verifyMs: Double, val rows: Int, val method: String = PLAIN, val tokens: Int = 1, val drafted: Int = 0,
    val accepted: Int = 0, val work: Double = 1.0,
)

/** A switch of method auto, with its round in the request. */
class Switched(val round: Int, val left: String, val taken: String, val why: String)

/** Counters and times of a request, decisions and forecasts of its drafter; work, a proxy of energy, in rows. */
class Stats {
    var promptTokens = 0
    var reusedTokens = 0 // of the prompt, whose KV was still in the slot
    var tokens = 0
        private set
    var rounds = 0
        private set
    var drafted = 0
        private set
    var accepted = 0
        private set
    val histogram = arrayListOf(0) // histogram[j] = rounds that accepted j guesses
    val offered = ArrayList<Int>() // offered[i] = rounds that put a guess at position i to the test
    val acceptedAt = ArrayList<Int>() // acceptedAt[i] = those of them that accepted it
    var sourceRows = 0 // of an encoder-decoder: tokens, or rows of features, that its encoder was given
    var encodeMs = 0.0
    var prefillMs = 0.0
    var draftMs = 0.0
    var verifyMs = 0.0
    var otherMs = 0.0
    var droppedReason: String? = null
    val drops = ArrayList<Map<String, String>>() // drafters that failed: method, where, error
    val recent = ArrayDeque<RoundTime>()
    private var work = 0.0

    // decisions of control, and its forecast for the current proposal: tokens, and time in plain steps
    var expected: Pair<Double, Double>? = null
    var plainMs: Double? = null
    var steps = 0
    var stepCost: Double? = null
    var fallbacks = 0
    var recoveries = 0
    var probes = 0
    val switches = ArrayList<Switched>()
    private var predicted = 0.0 to 0.0 // tokens and plain steps of the rounds drafted, as control expected them
    private var measured = 0.0 to 0.0 // the same by the clock

    // written tokens compared with plain decoding's
    var shadowEvery = 0 // compare one round in N; 0 = none
    var shadowChecked = 0
        private set
    var shadowAgreeing = 0
        private set

    /** Compare plain decoding's tokens with the written ones of a round. */
    fun compare(expected: IntArray, got: IntArray) = got.indices.forEach {
        shadowChecked++
        if (expected[it] == got[it]) shadowAgreeing++
    }

    /** Count a round in which the guesses at [tested] positions were put to the test. */
    fun add(round: RoundTime, tested: Int) {
        rounds++
        tokens += round.tokens
        work += round.work
        recent.addLast(round)
        if (recent.size > WINDOW) recent.removeFirst()
        if (round.drafted == 0) {
            histogram[0]++
            return
        }
        drafted += round.drafted
        accepted += round.accepted
        count(histogram, round.accepted)
        for (at in 0 until tested) count(offered, at)
        for (at in 0 until tested) count(acceptedAt, at, if (at < round.accepted) 1 else 0)
        // without control nothing has measured a draft step: it is weighed by its time against that of a row
        work += stepCost?.let { steps * it }
            ?: if (round.verifyMs > 0 && round.work > 0) round.draftMs / (round.verifyMs / round.work) else 0.0
        val hoped = expected ?: return
        val plain = plainMs?.takeIf { it > 0 } ?: return
        predicted = predicted.first + hoped.first to predicted.second + hoped.second
        measured = measured.first + round.tokens to measured.second + (round.draftMs + round.verifyMs) / plain
    }

    fun drop(method: String, where: String, error: String): String {
        drops.add(mapOf("method" to method, "where" to where, "error" to error))
        return "$method failed in $where: $error"
    }

    val tokensPerRound: Double get() = ratio(tokens, rounds)
    val acceptanceRate: Double get() = ratio(accepted, drafted)
    val decodeMs: Double get() = draftMs + verifyMs + otherMs
    val tokensPerSecond: Double get() = if (decodeMs > 0) 1000 * tokens / decodeMs else 0.0
    val workPerToken: Double get() = if (tokens > 0) work / tokens else 0.0
    val predictedSpeedup: Double? get() = predicted.let { if (it.second > 0) it.first / it.second else null }
    val measuredSpeedup: Double? get() = measured.let { if (it.second > 0) it.first / it.second else null }

    private fun ratio(part: Int, whole: Int): Double = if (whole > 0) part.toDouble() / whole else 0.0

    private fun count(counts: ArrayList<Int>, at: Int, times: Int = 1) {
        while (counts.size <= at) counts.add(0)
        counts[at] += times
    }
}
