package dev.edgespec.decoding

/*
 * How a request goes: acceptance of late, prediction against the clock, work per token, fall-backs, checks.  Work is a
 * proxy of energy: rows run through the target, and draft steps weighted by their cost against such a row.
 */

private const val WINDOW = 64 // rounds that "of late" means
const val PLAIN = "plain"

/** Method auto went from one method to another after so many rounds of the request. */
class Switched(val round: Int, val left: String, val taken: String, val why: String) {
    fun asMap(): Map<String, Any?> = mapOf("round" to round, "from" to left, "to" to taken, "why" to why)
}

/** What adaptive control decided and expects; a drafter fills it through [Drafter.watch]. */
class Control {
    var expected: Pair<Double, Double>? = null // tokens, time in plain steps, of the proposal at hand
    var plainMs: Double? = null
    var steps = 0
    var stepCost: Double? = null
    var fallbacks = 0
    var recoveries = 0
    var probes = 0
    val switches = ArrayList<Switched>()
}

/** A drafter that was dropped for the rest of its request: its name, where it failed, and how. */
class Drop(val method: String, val where: String, val error: String) {
    override fun toString() = "$method failed in $where: $error"
}

/** Written tokens compared with those that plain decoding writes after the same text. */
class Shadow {
    var every = 0 // one round in so many is compared; 0 = none
    var checked = 0
        private set
    var agreeing = 0
        private set
    var first: Triple<Int, Int, Int>? = null // index, plain decoding's token, the written one
        private set

    fun compare(at: Int, expected: IntArray, got: IntArray) {
        for (i in got.indices) {
            checked++
            if (expected[i] == got[i]) agreeing++ else if (first == null) first = Triple(at + i, expected[i], got[i])
        }
    }

    val agreement: Double get() = if (checked > 0) agreeing.toDouble() / checked else 1.0

    fun asMap(): Map<String, Any?> = mapOf(
        "every" to every, "checked" to checked, "agreeing" to agreeing, "agreement" to agreement,
        "first_disagreement" to first?.let { mapOf("position" to it.first, "expected" to it.second, "got" to it.third) },
    )
}

/** What is counted of one round. */
class RoundRecord(
    val method: String,
    val tokens: Int,
    val drafted: Int,
    val accepted: Int,
    val rows: Double,
    val draftMs: Double,
    val verifyMs: Double,
)

/** What is watched of one request, round by round. */
class Monitor {
    val control = Control()
    val shadow = Shadow()
    val drops = ArrayList<Drop>()
    val recent = ArrayDeque<RoundRecord>()
    var plainRounds = 0
        private set
    var draftedRounds = 0
        private set
    private var tokens = 0
    private var work = 0.0
    private var expected = 0.0 to 0.0 // tokens and plain steps of the rounds drafted, as predicted
    private var measured = 0.0 to 0.0 // the same by the clock

    fun add(round: RoundRecord) {
        recent.addLast(round)
        if (recent.size > WINDOW) recent.removeFirst()
        tokens += round.tokens
        work += round.rows + draftWork(round)
        if (round.drafted == 0) {
            plainRounds++
            return
        }
        draftedRounds++
        val hoped = control.expected
        val plain = control.plainMs
        if (hoped != null && plain != null && plain > 0) {
            expected = expected.first + hoped.first to expected.second + hoped.second
            measured = measured.first + round.tokens to measured.second + (round.draftMs + round.verifyMs) / plain
        }
    }

    private fun draftWork(round: RoundRecord): Double {
        if (round.drafted == 0) return 0.0
        control.stepCost?.let { return control.steps * it }
        // without control nothing has measured a draft step: it is weighed by its time against that of a row
        return if (round.verifyMs > 0 && round.rows > 0) round.draftMs / (round.verifyMs / round.rows) else 0.0
    }

    val workPerToken: Double get() = if (tokens > 0) work / tokens else 0.0
    val predictedSpeedup: Double? get() = if (expected.second > 0) expected.first / expected.second else null
    val measuredSpeedup: Double? get() = if (measured.second > 0) measured.first / measured.second else null

    /** By who guessed: rounds, acceptance rate and tokens per round of the last rounds. */
    fun ofLate(): Map<String, Map<String, Any>> = recent.groupBy { it.method }.toSortedMap().mapValues { (_, rounds) ->
        val drafted = rounds.sumOf { it.drafted }
        mapOf(
            "rounds" to rounds.size,
            "acceptance_rate" to if (drafted > 0) rounds.sumOf { it.accepted }.toDouble() / drafted else 0.0,
            "tokens_per_round" to rounds.sumOf { it.tokens }.toDouble() / rounds.size,
        )
    }

    fun asMap(): Map<String, Any?> = mapOf(
        "recent" to ofLate(),
        "predicted_speedup" to predictedSpeedup,
        "measured_speedup" to measuredSpeedup,
        "work_per_token" to workPerToken,
        "plain_rounds" to plainRounds,
        "drafted_rounds" to draftedRounds,
        "probes" to control.probes,
        "fallbacks" to control.fallbacks,
        "recoveries" to control.recoveries,
        "drops" to drops.map { mapOf("method" to it.method, "where" to it.where, "error" to it.error) },
        "switches" to control.switches.map { it.asMap() },
        "shadow" to shadow.asMap(),
    )
}
