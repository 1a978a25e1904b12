package dev.edgespec.drafters

private val BOUNDS = doubleArrayOf(0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97) // of a draft's probability
private val PRIOR = doubleArrayOf(0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98) // high planes of small models, greedy
private const val LIKE = 8 // guesses of a range that its prior counts as
private const val DECAY = 0.99

/** Acceptance by the draft's own probability; [given]: the export's measurements by ranges, and [mean] of all draft tokens. */
class Confidence(given: List<Double> = emptyList(), mean: Double? = null) {
    private val rates = given.ifEmpty { PRIOR.asList() }.toDoubleArray()
    private val seen = IntArray(rates.size)
    private var tested = 0
    var mean = mean ?: 0.8
        private set

    fun copy() = Confidence(rates.asList(), mean).also {
        seen.copyInto(it.seen)
        it.tested = tested
    }

    private fun range(probability: Double) = BOUNDS.count { it <= probability }

    /** How likely a guess of that draft probability is accepted. */
    fun chance(probability: Double) = rates[range(probability)]

    /** Count a guess that was put to the test. */
    fun learn(probability: Double, accepted: Boolean) {
        val at = range(probability)
        val right = if (accepted) 1 else 0
        rates[at] += maxOf(1 - DECAY, 1.0 / (seen[at] + LIKE + 1)) * (right - rates[at])
        mean += maxOf(1 - DECAY, 1.0 / (tested + LIKE + 1)) * (right - mean)
        seen[at]++
        tested++
    }
}
