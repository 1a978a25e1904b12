package dev.edgespec.control

import dev.edgespec.decoding.*
import dev.edgespec.formulas.CostModel

private const val REST = 8 // rounds without asking a costly drafter that is not worth it: a forecast also takes time
private const val MOST_BUCKETS = 64 // whose acceptance is kept: some drafters number what they draft with, without end
private const val PROBE = 2 // guesses of a probe
private const val STREAK = 6 // probes in a row, while all their guesses are accepted

const val PRIOR = 0.5 // acceptance where nothing is known
internal const val WAIT = 16 // plain rounds before a probe; doubled while probes fail
internal const val LONGEST_WAIT = 128
private const val DECAY = 0.9
private const val ROUND_DECAY = 0.98 // of the gain and time of rounds of a drafter that chooses its own length
private const val PRIOR_ROUNDS = 2 // that what was predicted before the first counts as

/** Acceptance of one bucket of a drafter's draft tokens. */
data class Record(
    private val rates: ArrayList<Double>, private val seen: ArrayList<Int>, // a_j for the positions seen so far, and how often
    var wait: Int = WAIT, // rounds before the next probe
    var waited: Int = 0, // rounds since the last one
    var streak: Int = 0, // probes in a row
    var drafting: Boolean? = null, // whether it was drafted when last decided on, because it was faster
    var tokens: Double = 0.0, // of the latest rounds, if the drafter chooses its own length
    var steps: Double = 0.0, // time of these rounds in plain steps
) {
    constructor(prior: Double) : this(arrayListOf(prior), arrayListOf(0))
    var probing = false // a probe is being verified

    fun kept() = copy(rates = ArrayList(rates), seen = ArrayList(seen))

    val known: Boolean get() = seen[0] > 0 // whether anything was ever put to the test

    /** a at [position]; one never put to the test is taken to be like the one before. */
    fun rate(position: Int): Double = rates[minOf(position, rates.size - 1)]

    /** [depth + 1]: expected tokens of a round down to each depth; [alike]: of guesses that are all as likely as the first. */
    fun expected(depth: Int, alike: Boolean = false): List<Double> {
        var chance = 1.0
        return (0 until depth).runningFold(1.0) { tokens, at ->
            chance *= rate(if (alike) 0 else at)
            tokens + chance
        }
    }

    fun learn(position: Int, accepted: Boolean) {
        if (position == rates.size) {
            rates.add(rates.last())
            seen.add(0)
        }
        // a running mean in which the prior counts as two guesses, until the decay is slower than that
        val step = maxOf(1 - DECAY, 1.0 / (seen[position] + 3))
        rates[position] += step * ((if (accepted) 1 else 0) - rates[position])
        seen[position]++
    }
}

/**
 * Drafts the fastest number of tokens, and none if plain decoding is faster.  Each round verifies the K draft tokens that maximize
 *
 *     (1 + sum_{i <= K} prod_{j <= i} a_j) / (K c + v(rows(K)))          K = 0 is plain decoding: 1
 *
 * with a_j = P(draft token j accepted | all before it were), learned for each bucket of [inner].  A drafter that chooses its own length
 * receives the maximum length and the gain that one more draft token needs.  It is asked if its last rounds were faster
 * (edgespec/control/adaptive.py).  Learned values are carried across requests, except for requests whose seeded text would then depend on
 * earlier ones.
 */
class Adaptive(
    val inner: Drafter, cost: CostModel, private val gammaMax: Int = 8, private val fallback: Boolean = true, private val prior: Double = PRIOR,
) : Drafter {
    override val name = inner.name
    private var plain = 0 // rounds without a guess
    private var drafted = 0 // rounds with guesses
    var probes = 0
        private set
    var required = 1.0 // speed that a proposal must be predicted to reach
    var stake = Double.POSITIVE_INFINITY // plain steps that a round may lose if all its guesses are wrong
    private val atOnce = inner.stepsAtOnce
    private val cheapInner = inner.cheap

    /**
     * State that is kept from request to request: [cost] of the machine, shared with other lanes; [bucket], where a costly drafter's next
     * proposal is expected; [nodesPerDepth] of its trees.
     */
    private class Known(
        val cost: CostModel, val records: LinkedHashMap<Int, Record> = LinkedHashMap(), var bucket: Int = 0, var nodesPerDepth: Double = 1.0,
    ) {
        fun copy() = Known(cost, records.mapValuesTo(LinkedHashMap()) { it.value.kept() }, bucket, nodesPerDepth)
    }

    private var known = Known(cost)
    val cost: CostModel get() = known.cost

    /** Whether decisions of this request depend only on counts and the given costs, never on timing. */
    var reproducible = false
        private set
    private var costs = cost
    private var stats = Stats() // of the request
    private var rest = 0 // rounds that are plain without looking
    private var asked = 0 // guesses that a costly drafter was last asked for
    private var last = Outlook(0, 0.0, prior)
    override val proposer: String get() = inner.proposer
    override val wants: Set<State> get() = inner.wants

    override fun begin(request: DraftRequest): Int? {
        stats = request.stats
        reproducible = request.params.seededRejection
        costs = if (reproducible) cost.given() else cost
        rest = 0
        if (reproducible) known = Known(cost)
        return inner.begin(request)
    }

    override fun learned(): Any = known.copy()

    override fun goOnFrom(learned: Any) {
        known = (learned as Known).copy()
        costs = cost
    }

    override fun absorb(first: Int, auxHidden: Matrix) = inner.absorb(first, auxHidden)

    /** Let the inner drafter read the tokens that its next proposal needs. */
    override fun prefill(tokens: Tokens, most: Int): Int {
        if (most == 0 && (rest > 0 || inner.prefill(tokens, 0) == 0)) return 0 // most rounds
        return if (willAsk()) inner.prefill(tokens, most) else 0
    }

    private fun willAsk(): Boolean {
        if (cheapInner) return true
        val (bucket, rows) = expected(gammaMax)
        val record = record(bucket)
        return !fallback || best(record, rows).length > 0 || toProbe(record, rows) > 0
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        if (rest > 0) {
            rest--
            plain++
            return Proposal.EMPTY
        }
        val most = minOf(budget, gammaMax)
        val proposal = if (cheapInner) {
            val found = inner.propose(tokens, most)
            if (found.size > 0) found.truncated(decide(found.bucket, rowsOf(found, most))) else found
        } else {
            val (bucket, rows) = expected(most)
            asked = decide(bucket, rows)
            if (inner.stops) inner.leastGain = leastGain(rows)
            if (asked > 0) inner.propose(tokens, asked) else Proposal.EMPTY
        }
        if (proposal.size > 0) {
            drafted++
            known.bucket = proposal.bucket
            stats.expected = expect(proposal)
        } else {
            plain++
            stats.expected = null
        }
        return proposal
    }

    /** Speed that a costly drafter's next proposal is predicted to give, at least 1; a cheap one's is not known. */
    fun promised(budget: Int): Double {
        if (cheapInner) return 1.0
        val (bucket, rows) = expected(minOf(budget, gammaMax))
        return best(record(bucket), rows).let { if (it.length > 0) maxOf(it.gain, 1.0) else 1.0 }
    }

    /** Bucket of a costly drafter's next proposal, and [budget + 1] rows of a pass over it down to each depth. */
    private fun expected(budget: Int): Pair<Int, IntArray> {
        val told = inner.forecast(budget)
        val rows = told.rows ?: IntArray(budget + 1) { Math.rint(1 + known.nodesPerDepth * it).toInt() }
        return (told.bucket ?: known.bucket) to rows
    }

    /** How deep to draft; [rows] of a pass over the guesses down to each depth. */
    private fun decide(bucket: Int, rows: IntArray): Int {
        val record = record(bucket)
        last = best(record, rows)
        val best = last.length
        if (fallback && record.drafting != null && record.drafting != best > 0) {
            if (best > 0) stats.recoveries++ else stats.fallbacks++
        }
        if (best > 0 || record.drafting == true) record.drafting = best > 0
        if (best > 0 || !fallback) {
            record.wait = WAIT
            record.waited = 0
            record.streak = 0
            return maxOf(best, 1)
        }
        val length = toProbe(record, rows)
        if (length > 0) {
            record.waited = 0
            record.probing = true
            record.streak += if (couldGain(rows)) 1 else STREAK
            probes++
            stats.probes++
            return length
        }
        rest = if (cheapInner) 0 else maxOf(minOf(REST, record.wait - record.waited) - 1, 0)
        record.waited += 1 + rest
        return 0
    }

    /** Guesses of a probe, as many as its stake allows, if it is time for one; a new bucket is probed at once. */
    private fun toProbe(record: Record, rows: IntArray): Int {
        if (record.waited < record.wait && record.known) return 0
        return affordable(minOf(PROBE, rows.size - 1), rows)
    }

    private fun affordable(most: Int, rows: IntArray): Int = (most downTo 1).firstOrNull { steps(it, rows[it]) - 1 <= stake } ?: 0

    /** Whether guesses would be worth their time if all were accepted; else no probe need be repeated. */
    private fun couldGain(rows: IntArray): Boolean =
        (1 until rows.size).any { (it + 1) / steps(it, rows[it]) > required }

    /** The best length, its predicted speed-up, and the acceptance that it was predicted from. */
    private class Outlook(val length: Int, val gain: Double, val acceptance: Double)

    private fun best(record: Record, rows: IntArray): Outlook {
        if (inner.stops && rows.size > 1) return longest(record, rows)
        var best = 0
        var gain = required
        var tried = 0.0
        val tokens = record.expected(rows.size - 1)
        for (length in 1 until rows.size) {
            if (rows[length] == rows[length - 1]) break // the proposal ends here
            val steps = steps(length, rows[length])
            val predicted = tokens[length] / steps
            tried = maxOf(tried, predicted)
            if (predicted > gain && steps - 1 <= stake) {
                best = length
                gain = predicted
            }
        }
        return Outlook(best, if (best > 0) gain else tried, record.rate(0))
    }

    /** The same for a drafter that chooses its own length: the maximum length, and the speed of its rounds. */
    private fun longest(record: Record, rows: IntArray): Outlook {
        if (record.steps == 0.0) {
            val tokens = record.expected(rows.size - 1, alike = true)
            val best = (1 until rows.size).maxBy { tokens[it] / steps(it, rows[it]) }
            record.tokens = PRIOR_ROUNDS * tokens[best]
            record.steps = PRIOR_ROUNDS * steps(best, rows[best])
        }
        val speed = record.tokens / record.steps
        return Outlook(if (speed > required) affordable(rows.size - 1, rows) else 0, speed, record.rate(0))
    }

    /** Gain that one more draft token after a depth needs: tokens per time of these rounds, or of plain decoding. */
    private fun leastGain(rows: IntArray): (Int) -> Double {
        val worth = maxOf(last.gain, required)
        return { depth -> worth * (steps(depth + 1, rows[depth + 1]) - steps(depth, rows[depth])) }
    }

    /** Time in plain steps of drafting to this depth and verifying this many rows. */
    private fun steps(depth: Int, rows: Int): Double = (costs.d(if (atOnce) 1 else depth) + costs.v(rows)) / costs.v(1)

    /** Expected time in plain steps of a round over this proposal, for any acceptance. */
    fun price(proposal: Proposal): Double {
        val depth = if (proposal.headStart == null) proposal.deepest else maxOf(proposal.deepest, 1)
        return if (depth > 0) steps(depth, proposal.size + 1) else 1.0
    }

    /** Tokens, and time in plain steps, of a round over [proposal]. */
    private fun expect(proposal: Proposal): Pair<Double, Double> {
        val depth = proposal.deepest
        val steps = if (atOnce) 1 else depth
        stats.steps = steps
        stats.stepCost = cost.d(steps) / steps
        stats.plainMs = cost.plainMs
        return record(proposal.bucket).expected(depth).last() to costs.d(steps) + costs.v(proposal.size + 1)
    }

    private fun record(bucket: Int): Record {
        if (bucket !in known.records && known.records.size == MOST_BUCKETS) known.records.remove(known.records.keys.first())
        return known.records.getOrPut(bucket) { Record(prior) }
    }

    /** An exit that was asked and not sure counts like a guess that was wrong: it took the time of one. */
    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        if (!proposal.empty) {
            val record = record(proposal.bucket)
            val right = verdict.path.size
            val unsure = proposal.headStart != null && right == proposal.size && right < asked
            val tested = proposal.tested(verdict.path) + if (unsure) 1 else 0
            for (position in 0 until tested) record.learn(position, position < right)
            if (proposal.parents != null) known.nodesPerDepth = proposal.size.toDouble() / proposal.deepest
            if (inner.stops) {
                record.tokens = ROUND_DECAY * record.tokens + right + 1
                record.steps = ROUND_DECAY * record.steps + price(proposal)
            }
            if (record.probing) {
                record.probing = false
                if (tested == right && record.streak < STREAK) {
                    record.waited = record.wait
                } else {
                    record.wait = minOf(2 * record.wait, LONGEST_WAIT)
                    record.streak = 0
                }
            }
        }
        inner.observe(proposal, verdict, output)
    }

    override fun timed(proposal: Proposal, time: RoundTime) {
        if (!reproducible && rest == 0) {
            val steps = if (atOnce) 1 else proposal.deepest
            if (proposal.headStart != null) { // part of the pass over the first row ran while drafting
                cost.observeRound(time.rows, maxOf(steps, 1), time.draftMs + time.verifyMs)
            } else {
                cost.observeVerify(time.rows, time.verifyMs)
                if (proposal.size > 0 && inner.caughtUp) cost.observeDraft(steps, time.draftMs)
            }
        }
        inner.timed(proposal, time)
    }

    override val reason: String get() = listOf(decision, inner.reason).filter { it.isNotEmpty() }.joinToString("; ")
    private val decision: String
        get() {
            val (best, gain) = last.length to "predicted ${two(last.gain)}x"
            val at = "at acceptance ${two(last.acceptance)}"
            return when {
                plain + drafted == 0 -> "nothing was decoded yet"
                best > 0 -> "drafting is on: $gain with $best guess${if (best > 1) "es" else ""} $at"
                last.gain == 0.0 -> "the drafter found nothing to propose"
                !fallback -> "drafting does not pay, but was kept on: $gain $at"
                else -> "drafting did not pay: $gain $at; $probes probes in ${plain + drafted} rounds"
            }
        }
}

/** [budget + 1]: rows of a pass over the guesses down to each depth. */
private fun rowsOf(proposal: Proposal, budget: Int): IntArray {
    if (proposal.parents == null) return IntArray(budget + 1) { 1 + minOf(it, proposal.size) }
    val depths = IntArray(proposal.size) { proposal.depth(it) }
    return IntArray(budget + 1) { depth -> 1 + depths.count { it <= depth } }
}
