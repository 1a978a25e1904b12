package dev.edgespec.control


/*
 * What method auto knows of its candidates.  Every candidate has a budget of plain steps: it starts with a few, a small
 * share of every round is added, and what a round of its guessing takes beyond the tokens that it brings is paid from it.
 * So a text on which nothing can be gained costs the budgets and that share and no more, by construction.
 */

private const val SHARE = 0.012 // of all rounds: plain steps that looking may cost in the long run
private const val CREDIT = 2.5 // plain steps that each candidate starts with
private const val FULL = 5.0 // most of a budget
private const val LEAST = 0.5 // plain steps without which trying again is pointless
private const val AGAIN = 64 // rounds before another try; doubled while tries fail
private const val LONGEST_AGAIN = 4096
private const val WINDOW = 64 // rounds that a gain is measured over
internal const val TRIED = 1.0 // predicted speed from which a method is tried: it was predicted from another text
internal const val PAYS = 1.01 // gain of late from which a method is kept

/** A method to choose from: its predicted speed, what builds its drafter, whether it is cheap. */
class Candidate(val name: String, val promise: Double, val make: () -> Adaptive, val cheap: Boolean = false)

/** What one candidate has shown on a lane. */
class Arm(private val promise: Double) {
    var gain: Double? = null // measured of late, when it was last judged
    var budget = CREDIT // plain steps that it may lose
    private var until = 0 // round before which it is not tried again
    private var wait = AGAIN // rounds to wait after the next failure
    var out = false // it failed in this request
    private var note = "" // why it was left last, in words

    fun copy() = Arm(promise).also {
        it.gain = gain
        it.budget = budget
        it.until = until
        it.wait = wait
        it.note = note
    }

    /** Speed to expect: what it gave if that paid, else what was predicted. */
    val expected: Double get() = gain?.takeIf { it >= PAYS } ?: promise

    /** Plain steps that one round may lose. */
    val stake: Double get() = if (budget >= FULL) Double.POSITIVE_INFINITY else maxOf(budget / 2, 0.0)
    val exhausted: Boolean get() = budget < LEAST

    /** Whether it may be tried. */
    fun ready(now: Int): Boolean = !out && now >= until && !exhausted

    /** Why it is not ready, in words. */
    fun past(now: Int): String = if (out || now < until) note else "lost what looking may cost"

    /** It did not pay: try again later, and later still if that fails too. */
    fun putOff(now: Int, why: String) {
        note = why
        until = now + wait
        wait = minOf(2 * wait, LONGEST_AGAIN)
    }

    /** It pays, so much: it is missed when it fails the next time. */
    fun kept(gain: Double) {
        this.gain = gain
        wait = AGAIN
    }

    /** A round took so many plain steps more than it wrote tokens; negative = it gained. */
    fun pay(lost: Double) {
        budget = (budget - lost).coerceIn(-CREDIT, FULL)
    }

    fun accrue(share: Double) {
        budget = minOf(budget + share, FULL)
    }
}

/** Those of all candidates, and of the one in use. */
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

    /** Of the latest rounds of the window, those drafted because it was expected to pay. */
    fun drafted(latest: Int): Int = window.takeLast(latest).count { it.third }

    /** A round was written: every budget has its share of it. */
    fun accrue() {
        now++
        each.forEach { it.accrue(SHARE / each.size) }
    }

    fun ready(which: Int): Boolean = each[which].ready(now)

    /** The candidate to expect most of, of those that may be tried and are not expected to lose. */
    fun best(besides: Int? = null): Int? =
        each.indices.filter { it != besides && ready(it) && each[it].expected >= TRIED }.maxByOrNull { each[it].expected }

    /** Another one is in use from now on. */
    fun take(which: Int?) {
        active = which
        roundsInUse = 0
        window.clear()
    }
}
