package dev.edgespec.control

const val PRIOR = 0.5 // acceptance where nothing is known
internal const val WAIT = 16 // plain rounds before a probe; doubled while probes fail
internal const val LONGEST_WAIT = 128
private const val DECAY = 0.9

/** What one bucket of a drafter's guesses has shown of its acceptance. */
class Record(prior: Double) {
    private val rates = arrayListOf(prior) // a_j for the positions seen so far; [0] starts as the prior
    private val seen = arrayListOf(0) // observations of each
    var wait = WAIT // rounds to sit out before the next probe
    var sat = 0 // rounds sat out since the last one
    var probing = false // a probe is being verified
    var streak = 0 // probes in a row
    var drafting: Boolean? = null // whether it was drafted when last decided on, because it pays

    /** The same, which learns on its own from now on. */
    fun copy() = Record(rates[0]).also {
        it.rates.addAll(rates.drop(1))
        it.seen[0] = seen[0]
        it.seen.addAll(seen.drop(1))
        it.wait = wait
        it.sat = sat
        it.streak = streak
        it.drafting = drafting
    }

    /** Whether anything was ever put to the test. */
    val known: Boolean get() = seen[0] > 0

    /** a at [position]; one never put to the test is taken to be like the one before. */
    fun rate(position: Int): Double = rates[minOf(position, rates.size - 1)]

    /** One guess at [position] was put to the test. */
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
