package dev.edgespec.control

import dev.edgespec.decoding.*
import dev.edgespec.formulas.CostModel
import java.util.Locale

private const val MOST_BUCKETS = 64 // whose acceptance is kept: some drafters number what they draft with, without end
private const val PROBE = 2 // guesses of a probe
private const val STREAK = 6 // probes in a row, while all their guesses are accepted

/**
 * Drafts as much as pays, and nothing while nothing pays.  Each round verifies the K guesses that maximise
 *
 *     (1 + sum_{i <= K} prod_{j <= i} a_j) / (K c + v(rows(K)))          K = 0 is plain decoding: 1
 *
 * with a_j = P(guess j accepted | all before it were), learned for each bucket of [inner].  What is learned is carried
 * across requests, except for requests whose seeded text would then depend on earlier ones.
 */
class Adaptive(
    val inner: Drafter,
    cost: CostModel,
    private val gammaMax: Int = 8,
    private val fallback: Boolean = true,
    var prior: Double = PRIOR,
) : Drafter {
    override val name = inner.name
    var cost = cost // of the machine: those of other lanes learn it, too
        private set
    var plain = 0 // rounds without a guess
        private set
    var drafted = 0 // rounds with guesses
        private set
    var probes = 0
        private set
    var floor = 1.0 // speed that a proposal must promise
    var stake = Double.POSITIVE_INFINITY // plain steps that a round may lose if all its guesses are wrong
    override val wantsHidden = inner.wantsHidden
    override val wantsTaps = inner.wantsTaps
    private val atOnce = inner.stepsAtOnce
    private val cheapInner = inner.cheap
    private val records = LinkedHashMap<Int, Record>()
    private var lastBucket = 0 // where a costly drafter's next proposal is expected

    /** Whether this request is decided by counts and the given costs alone, never by the clock. */
    var steady = false
        private set
    private var costs = cost
    private var nodesPerDepth = 1.0 // of a costly drafter's trees
    private var control = Control()
    private var asked = 0 // guesses that a costly drafter was last asked for
    private var last = Triple(0, 0.0, prior) // best length, its predicted speed-up, acceptance

    override val proposer: String get() = inner.proposer

    override fun watch(control: Control) {
        this.control = control
        inner.watch(control)
    }

    override fun bind(params: SamplingParams, noise: Noise) {
        steady = params.seededRejection
        costs = if (steady) cost.given() else cost
        if (params.seededRejection) {
            records.clear()
            lastBucket = 0
            nodesPerDepth = 1.0
        }
        inner.bind(params, noise)
    }

    /** What is kept from request to request. */
    private class Learned(val cost: CostModel, val records: Map<Int, Record>, val bucket: Int, val nodesPerDepth: Double)

    override fun learned(): Any = Learned(cost, records.mapValues { it.value.copy() }, lastBucket, nodesPerDepth)

    override fun goOnFrom(learned: Any) {
        learned as Learned
        cost = learned.cost
        costs = cost
        records.clear()
        learned.records.mapValuesTo(records) { it.value.copy() }
        lastBucket = learned.bucket
        nodesPerDepth = learned.nodesPerDepth
    }

    override fun begin(tokens: Tokens) = inner.begin(tokens)

    override fun known(tokens: Tokens): Int = inner.known(tokens)

    override fun absorb(first: Int, taps: Matrix) = inner.absorb(first, taps)

    /** Let the inner drafter read what it needs where it will be asked next. */
    override fun prefill(tokens: Tokens, most: Int): Int {
        if (most == 0 && inner.prefill(tokens, 0) == 0) return 0 // most rounds
        return if (willAsk()) inner.prefill(tokens, most) else 0
    }

    private fun willAsk(): Boolean {
        if (cheapInner) return true
        val record = record(expectedBucket)
        val rows = expectedRows(gammaMax)
        val before = last
        val best = best(record, rows)
        last = before
        return best > 0 || !fallback || toProbe(record, rows) > 0
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val most = minOf(budget, gammaMax)
        val proposal = if (cheapInner) {
            val found = inner.propose(tokens, most)
            if (found.size > 0) found.truncated(decide(found.bucket, rowsOf(found, most))) else found
        } else {
            asked = decide(expectedBucket, expectedRows(most))
            if (asked > 0) inner.propose(tokens, asked) else Proposal.EMPTY
        }
        if (proposal.size > 0) {
            drafted++
            lastBucket = proposal.bucket
            control.expected = expect(proposal)
        } else {
            plain++
            control.expected = null
        }
        return proposal
    }

    /** Speed that a costly drafter's next proposal is predicted to give, at least 1; a cheap one's is not known. */
    fun promised(budget: Int): Double {
        if (cheapInner) return 1.0
        val before = last
        best(record(expectedBucket), expectedRows(minOf(budget, gammaMax)))
        val found = if (last.first > 0) maxOf(last.second, 1.0) else 1.0
        last = before
        return found
    }

    private val expectedBucket: Int get() = inner.bucket ?: lastBucket

    /** [budget + 1]: rows of a pass over a costly drafter's guesses down to each depth. */
    private fun expectedRows(budget: Int): IntArray =
        inner.rows(budget) ?: IntArray(budget + 1) { Math.rint(1 + nodesPerDepth * it).toInt() }

    /** How deep to draft; [rows] of a pass over the guesses down to each depth. */
    private fun decide(bucket: Int, rows: IntArray): Int {
        val record = record(bucket)
        val best = best(record, rows)
        if (fallback && record.drafting != null && record.drafting != best > 0) {
            if (best > 0) control.recoveries++ else control.fallbacks++
        }
        if (best > 0 || record.drafting == true) record.drafting = best > 0
        if (best > 0 || !fallback) {
            record.wait = WAIT
            record.sat = 0
            record.streak = 0
            return maxOf(best, 1)
        }
        val length = toProbe(record, rows)
        if (length > 0) {
            record.sat = 0
            record.probing = true
            record.streak++
            probes++
            control.probes++
            return length
        }
        record.sat++
        return 0
    }

    /** Guesses of a probe, if it is time for one; nothing is known of a new bucket but the prior: it is probed at once. */
    private fun toProbe(record: Record, rows: IntArray): Int =
        if (record.sat >= record.wait || !record.known) affordable(rows) else 0

    /** Guesses of a probe: as many as its stake allows. */
    private fun affordable(rows: IntArray): Int =
        (minOf(PROBE, rows.size - 1) downTo 1).firstOrNull { steps(it, rows[it]) - 1 <= stake } ?: 0

    /** The length of the highest predicted speed. */
    private fun best(record: Record, rows: IntArray): Int {
        var best = 0
        var gain = floor
        var tried = 0.0
        var tokens = 1.0
        var chance = 1.0
        for (length in 1 until rows.size) {
            if (rows[length] == rows[length - 1]) break // the proposal ends here
            chance *= record.rate(length - 1)
            tokens += chance
            val steps = steps(length, rows[length])
            val predicted = tokens / steps
            tried = maxOf(tried, predicted)
            if (predicted > gain && steps - 1 <= stake) {
                best = length
                gain = predicted
            }
        }
        last = Triple(best, if (best > 0) gain else tried, record.rate(0))
        return best
    }

    /** Plain steps that drafting so deep and verifying so many rows take. */
    private fun steps(depth: Int, rows: Int): Double = (costs.d(if (atOnce) 1 else depth) + costs.v(rows)) / costs.v(1)

    /** Plain steps that a round over this proposal is expected to take, whatever is accepted. */
    fun price(proposal: Proposal): Double {
        val depth = if (proposal.resume == null) proposal.deepest else maxOf(proposal.deepest, 1)
        return if (depth > 0) steps(depth, proposal.size + 1) else 1.0
    }

    /** Tokens, and time in plain steps, of a round over [proposal]. */
    private fun expect(proposal: Proposal): Pair<Double, Double> {
        val record = record(proposal.bucket)
        val depth = proposal.deepest
        var tokens = 1.0
        var chance = 1.0
        for (position in 0 until depth) {
            chance *= record.rate(position)
            tokens += chance
        }
        val steps = if (atOnce) 1 else depth
        control.steps = steps
        control.stepCost = cost.d(steps) / steps
        control.plainMs = cost.plainMs
        return tokens to costs.d(steps) + costs.v(proposal.size + 1)
    }

    private fun record(bucket: Int): Record {
        records[bucket]?.let { return it }
        if (records.size == MOST_BUCKETS) records.remove(records.keys.first())
        return Record(prior).also { records[bucket] = it }
    }

    /** An exit that was asked and not sure counts like a guess that was wrong: it took the time of one. */
    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        if (proposal.size > 0 || proposal.resume != null) {
            val record = record(proposal.bucket)
            val right = verdict.path.size
            val unsure = proposal.resume != null && right == proposal.size && right < asked
            val tested = reached(proposal, verdict.path) + if (unsure) 1 else 0
            for (position in 0 until tested) record.learn(position, position < right)
            if (proposal.parents != null) nodesPerDepth = proposal.size.toDouble() / proposal.deepest
            if (record.probing) {
                record.probing = false
                if (tested == right && record.streak < STREAK) {
                    record.sat = record.wait
                } else {
                    record.wait = minOf(2 * record.wait, LONGEST_WAIT)
                    record.streak = 0
                }
            }
        }
        inner.observe(proposal, verdict, output)
    }

    override fun timed(proposal: Proposal, draftMs: Double, verifyMs: Double) {
        if (!steady) {
            val steps = if (proposal.size == 0) 0 else if (atOnce) 1 else proposal.deepest
            if (proposal.resume != null) { // part of the pass over the first row ran while drafting, too
                cost.observeRound(proposal.size + 1, if (atOnce) 1 else maxOf(steps, 1), draftMs + verifyMs)
            } else {
                cost.observeVerify(proposal.size + 1, verifyMs)
                if (proposal.size > 0 && inner.caughtUp) cost.observeDraft(steps, draftMs)
            }
        }
        inner.timed(proposal, draftMs, verifyMs)
    }

    override fun watched(rows: Int, draftMs: Double, verifyMs: Double) {
        if (!steady) cost.observeVerify(rows, verifyMs)
        inner.watched(rows, draftMs, verifyMs)
    }

    override val reason: String get() = listOf(decision, inner.reason).filter { it.isNotEmpty() }.joinToString("; ")

    private val decision: String
        get() {
            val (best, gain, acceptance) = last
            fun two(value: Double) = "%.2f".format(Locale.ROOT, value)
            if (plain + drafted == 0) return "nothing was decoded yet"
            if (best > 0) {
                val guesses = "$best guess${if (best > 1) "es" else ""}"
                return "drafting is on: predicted ${two(gain)}x with $guesses at acceptance ${two(acceptance)}"
            }
            if (gain == 0.0) return "the drafter found nothing to propose"
            if (!fallback) {
                return "drafting does not pay, but was kept on: predicted ${two(gain)}x at acceptance ${two(acceptance)}"
            }
            return "drafting did not pay: predicted ${two(gain)}x at acceptance ${two(acceptance)}; $probes probes in " +
                "${plain + drafted} rounds"
        }

    override fun usedSummary(): Map<String, Any?> =
        mapOf("plain_rounds" to plain, "drafted_rounds" to drafted, "probes" to probes, "reason" to decision) + inner.usedSummary()
}

/** [budget + 1]: rows of a pass over the guesses down to each depth. */
private fun rowsOf(proposal: Proposal, budget: Int): IntArray {
    if (proposal.parents == null) return IntArray(budget + 1) { 1 + minOf(it, proposal.size) }
    val depths = IntArray(proposal.size) { proposal.depth(it) }
    return IntArray(budget + 1) { depth -> 1 + depths.count { it <= depth } }
}
