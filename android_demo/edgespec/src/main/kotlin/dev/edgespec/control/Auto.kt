package dev.edgespec.control

import dev.edgespec.decoding.*
import java.util.Locale

/*
 * State of method auto's candidates.  Every candidate has a budget of plain steps.  It starts with a few, and a small share of every round
 * is added.  The time of a round of its drafting beyond the tokens that it brings is charged to it.  So a text on which nothing can be
 * gained costs the budgets and that share and no more, by construction.
 */

private const val SHARE = 0.012 // of all rounds: plain steps that looking may cost in the long run
private const val CREDIT = 2.5 // plain steps that each candidate starts with
private const val FULL = 5.0 // most of a budget
private const val LEAST = 0.5 // plain steps without which trying again is pointless
private const val AGAIN = 64 // rounds before another try; doubled while tries fail
private const val LONGEST_AGAIN = 4096
private const val WINDOW = 64 // rounds that a gain is measured over
internal const val TRIED = 1.0 // minimum predicted speed to try a method: it was predicted from another text
internal const val PAYS = 1.01 // minimum recent gain to keep a method

class Candidate(val name: String, val promise: Double, val make: () -> Adaptive, val cheap: Boolean = false)

/** Results of one candidate on a lane. */
data class Arm(
    private val promise: Double,
    var gain: Double? = null, // measured of late, when it was last judged
    var budget: Double = CREDIT, // plain steps that it may lose
    private var until: Int = 0, // round before which it is not tried again
    private var wait: Int = AGAIN, // rounds to wait after the next failure
    private var note: String = "", // message why it was left last
) {
    var out = false // it failed in this request

    /** Expected speed: the measured one if it was faster than plain decoding, else the predicted one. */
    val expected: Double get() = gain?.takeIf { it >= PAYS } ?: promise

    /** Plain steps that one round may lose. */
    val stake: Double get() = if (budget >= FULL) Double.POSITIVE_INFINITY else maxOf(budget / 2, 0.0)
    val exhausted: Boolean get() = budget < LEAST

    fun ready(now: Int): Boolean = !out && now >= until && !exhausted
    fun past(now: Int): String = if (out || now < until) note else "lost what looking may cost"

    /** It was not faster: try it again later, and later still if that also fails. */
    fun putOff(now: Int, why: String) {
        note = why
        until = now + wait
        wait = minOf(2 * wait, LONGEST_AGAIN)
    }

    /** It is faster by [gain], so the wait after its next failure is short. */
    fun kept(gain: Double) {
        this.gain = gain
        wait = AGAIN
    }

    /** Charge a round that took [lost] plain steps more than it emitted tokens; negative = it gained. */
    fun pay(lost: Double) {
        budget = (budget - lost).coerceIn(-CREDIT, FULL)
    }
}

/** Results of all candidates, and the one in use. */
class Bandit(val each: List<Arm>) {
    var now = 0 // rounds so far, over all requests
        private set
    var active: Int? = null // which is in use; null = plain decoding
        private set
    var roundsInUse = 0 // its rounds
    private val window = ArrayDeque<Triple<Int, Double, Boolean>>() // tokens, plain steps taken, drafted and no probe

    /** The same between two requests; it learns on its own from now on. */
    fun copy() = Bandit(each.map { it.copy() }).also { it.now = now }

    val rounds: Int get() = window.size

    fun push(tokens: Int, took: Double, drafted: Boolean) {
        window.addLast(Triple(tokens, took, drafted))
        if (window.size > WINDOW) window.removeFirst()
    }

    /** Tokens per plain step over the window: speed against plain decoding's. */
    val gain: Double
        get() {
            val steps = window.sumOf { it.second }
            return if (steps > 0) window.sumOf { it.first } / steps else 1.0
        }

    /** Among the latest rounds of the window, the number drafted because a gain was expected. */
    fun drafted(latest: Int): Int = window.takeLast(latest).count { it.third }

    /** A round was written: every budget has its share of it. */
    fun accrue() {
        now++
        each.forEach { it.pay(-SHARE / each.size) }
    }

    fun ready(which: Int): Boolean = each[which].ready(now)

    /** The candidate to expect most of, of those that may be tried and are not expected to lose. */
    fun best(besides: Int? = null): Int? =
        each.indices.filter { it != besides && ready(it) && each[it].expected >= TRIED }.maxByOrNull { each[it].expected }

    fun take(which: Int?) {
        active = which
        roundsInUse = 0
        window.clear()
    }
}

private const val CHECK = 16 // rounds between two judgements
private const val SURE = 48 // rounds until a measured gain is trusted
private const val FEW = 4 // rounds drafted of CHECK that count as resting
private const val RIVAL = 1.1 // how much more than the one in use another candidate must have given
private const val OFF = 2.0 // a round that takes this many times its expected time was interrupted: it is counted as that
private const val LOOK = 0.25 // plain steps that looking without a guess is counted as, at most

/**
 * Method auto: the candidate with the best prediction drafts.  If it is not faster, the next one takes over.  One candidate is in use at a
 * time, inside its own adaptive control; the others are not even loaded before their turn.  [fallback] false = the first candidate always
 * drafts, and is replaced only if it fails.
 */
class Auto(private val candidates: List<Candidate>, private val fallback: Boolean = true) : Drafter {
    private val made = HashMap<Int, Adaptive>()
    private val inherited = HashMap<Int, Any>() // initial state of candidates that are not made yet
    private var learned = fresh()
    private var bandit = learned
    private var drafter: Adaptive? = null // of the candidate in use, once it has begun
    private var request = DraftRequest(Tokens())
    private var seen = 0 // rounds of this request
    private var tokens = 1 // of the last round
    private var probe = false // whether its proposal was one
    private val entered = ArrayList<Int>() // candidates in use in this request, in order
    private val rounds = LinkedHashMap<Int, Int>() // rounds with guesses by candidate, in this request

    private fun fresh() = Bandit(candidates.map { Arm(it.promise) })
    override fun learned(): Any = learned.copy() to made.mapValues { it.value.learned() }

    override fun goOnFrom(learned: Any) {
        val (bandit, candidates) = learned as Pair<*, *>
        this.learned = bandit as Bandit
        for ((which, known) in candidates as Map<*, *>) inherited[which as Int] = known!!
    }

    override fun begin(request: DraftRequest): Int? {
        this.request = request
        bandit = if (request.params.seededRejection) fresh() else learned
        bandit.each.forEach { it.out = false }
        drafter = null
        seen = 0
        entered.clear()
        rounds.clear()
        val which = if (fallback) again() else 0
        if (which != 0) {
            val first = bandit.each[0]
            val past = "in earlier requests ${candidates[0].name} ${first.past(bandit.now)}"
            tell(candidates[0].name, which, if (which != null && bandit.ready(0)) "which gave more in earlier requests" else past)
        }
        bandit.take(which)
        return which?.let { enter(it, request.tokens) }
    }

    override val wants: Set<State> get() = drafter?.wants ?: emptySet()

    override fun absorb(first: Int, auxHidden: Matrix) {
        drafter?.absorb(first, auxHidden)
    }

    override fun prefill(tokens: Tokens, most: Int): Int = takeUp(tokens)?.prefill(tokens, most) ?: 0

    /** The candidate in use, ready for the next round, if there is one; now and then one is looked for. */
    private fun takeUp(tokens: Tokens): Adaptive? {
        if (bandit.active == null) {
            val which = (if (bandit.now % CHECK == 0) again() else null) ?: return null
            change(which, "another look")
        }
        if (drafter == null) enter(bandit.active!!, tokens)
        return drafter
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val mine = takeUp(tokens) ?: return Proposal.EMPTY
        val active = bandit.active!!
        mine.stake = if (fallback) bandit.each[active].stake else Double.POSITIVE_INFINITY
        val before = mine.probes
        val proposal = mine.propose(tokens, budget)
        probe = mine.probes > before
        return proposal
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        tokens = verdict.path.size + 1
        seen++
        val active = bandit.active
        bandit.accrue()
        val mine = drafter
        if (mine != null && active != null) {
            if (proposal.size > 0) rounds[active] = (rounds[active] ?: 0) + 1
            mine.observe(proposal, verdict, output)
        }
    }

    override fun timed(proposal: Proposal, time: RoundTime) {
        val mine = drafter ?: return
        mine.timed(proposal, time)
        count(mine, proposal, time)
    }

    override fun lose(why: String): Boolean {
        val active = bandit.active ?: return false
        bandit.each[active].out = true
        bandit.each[active].putOff(bandit.now, why)
        val left = bandit.each.indexOfFirst { !it.out }
        if (left < 0) {
            bandit.take(null)
            drafter = null
            return false
        }
        change(if (fallback) again() else left, why)
        return true
    }

    private fun count(mine: Adaptive, proposal: Proposal, time: RoundTime) {
        val arm = bandit.each[bandit.active!!]
        val expected = mine.price(proposal)
        val plainMs = mine.cost.plainMs?.takeIf { it > 0 && !mine.reproducible }
        val took = when {
            plainMs == null -> expected
            proposal.empty -> 1 + minOf(time.draftMs / plainMs, LOOK)
            else -> ((time.draftMs + time.verifyMs) / plainMs).coerceIn(expected / OFF, expected * OFF)
        }
        arm.pay(maxOf(took, expected) - tokens) // a wrong clock must not make probes free
        bandit.push(tokens, took, proposal.size > 0 && !probe)
        bandit.roundsInUse++
        if (fallback && bandit.roundsInUse % CHECK == 0) judge()
    }

    private fun judge() {
        val active = bandit.active!!
        val mine = bandit.each[active]
        val gain = bandit.gain
        val sure = bandit.roundsInUse >= SURE
        if (gain >= PAYS && !mine.exhausted) {
            if (!sure) return
            mine.kept(gain)
            val rival = bandit.best(besides = active)
            // what was not tried deserves a look: it was predicted from another text
            if (rival != null && bandit.each[rival].expected > gain * (if (bandit.each[rival].gain == null) 1.0 else RIVAL)) {
                val promised = bandit.each[rival].expected
                change(rival, "which promises ${two(promised)}x, ${candidates[active].name} gave ${two(gain)}x")
            }
            return
        }
        if (!sure && bandit.drafted(CHECK) > FEW && !mine.exhausted) return // too early to tell
        giveWay(active, gain)
    }

    private fun giveWay(active: Int, gain: Double) {
        val mine = bandit.each[active]
        mine.gain = gain
        val which = bandit.best(besides = active)
        val looking = candidates[active].cheap && !mine.exhausted // it may stay where nothing else is to be had
        if (which == null && looking) return
        val note = "did not pay: ${two(gain)}x over ${bandit.rounds} rounds"
        if (!looking) mine.putOff(bandit.now, note)
        change(which ?: again(), "as ${candidates[active].name} $note")
    }

    /** The next choice: the best candidate, else the cheap one if it is affordable, else plain decoding. */
    private fun again(): Int? =
        bandit.best() ?: candidates.indices.firstOrNull { candidates[it].cheap && bandit.ready(it) }

    private fun change(which: Int?, why: String) {
        tell(bandit.active?.let { candidates[it].name } ?: PLAIN, which, why)
        bandit.take(which)
        drafter = null
    }

    private fun tell(left: String, which: Int?, why: String) {
        request.stats.switches.add(Switched(seen, left, which?.let { candidates[it].name } ?: PLAIN, why))
    }

    private fun enter(which: Int, tokens: Tokens): Int? {
        val mine = made.getOrPut(which) {
            candidates[which].make().also { drafter -> inherited.remove(which)?.let(drafter::goOnFrom) }
        }
        drafter = mine
        if (which !in entered) entered.add(which)
        return mine.begin(DraftRequest(tokens, request.params, request.noise, request.stats, request.source))
    }

    /** The method in use, `plain` if none is. */
    override val name: String get() = bandit.active?.let { candidates[it].name } ?: PLAIN
    override val proposer: String get() = drafter?.proposer ?: name

    /** The method of most rounds with guesses in this request; without any, the one in use, `ar` if none is. */
    val used: String
        get() = rounds.maxByOrNull { it.value }?.let { candidates[it.key].name } ?: if (bandit.active == null) "ar" else name

    fun uses(method: String): Boolean = entered.any { candidates[it].name == method }

    override val reason: String
        get() {
            val changes = request.stats.switches.takeLast(3).map { "from round ${it.round} ${it.taken}, ${it.why}" }
            return (changes + (drafter?.reason ?: "")).filter { it.isNotEmpty() }.joinToString("; ")
        }
}

internal fun two(value: Double) = "%.2f".format(Locale.ROOT, value)
