package dev.edgespec.decoding

import dev.edgespec.*
import java.security.SecureRandom
import java.util.PriorityQueue
import kotlin.math.*

/* From a row of logits to a token, by the Gumbel-max trick: step by step as in Python, in float32 too, so that text is the same. */

private const val FIRST_NUCLEUS = 64 // top-p sorts this many candidates first, and 16 times more while they hold too little
private const val MANY = 4096 // in a larger support, tokens NEAR nats below the best are checked only by noise
private const val NEAR = 8.0

/**
 * Tokens that a text may have.  It is asked for any prefix, in any order, and answers by the prefix and the model's row there, which
 * the prefix decides: every lossless method stays so.
 */
interface Constraint {
    val scored: Boolean get() = false // log-probabilities include it; else they are the unadjusted model's

    /** [vocab]: which tokens may follow [prefix], prompt included; [row]: the logits there, after bias and penalties. */
    fun allowed(prefix: List<Int>, row: FloatArray): BooleanArray

    /** The token that must follow [prefix], if only its end decides; null = none. */
    fun forced(prefix: List<Int>): Int? = null
}

/** How a token is chosen; applied in this order.  Fields and ranges are those of the Python side. */
data class SamplingParams(
    val temperature: Double = 0.0, val topK: Int = 0, val topP: Double = 1.0, val minP: Double = 0.0,
    val repetitionPenalty: Double = 1.0, val logitBias: Map<Int, Double> = emptyMap(), val seed: Long? = null,
    val acceptance: String = "rejection", val verification: String = "token", val presencePenalty: Double = 0.0,
    val frequencyPenalty: Double = 0.0, val prompt: Int = 0, // tokens that these two do not count; a request sets it
    val constraint: Constraint? = null, // allowed tokens after each prefix; others have probability 0
) {
    init {
        fun need(valid: Boolean, name: String, value: Any?, allowed: String) {
            if (!valid) throw InvalidRequest("$name is $value; allowed: $allowed")
        }
        need(temperature.isFinite() && temperature >= 0, "temperature", temperature, "a number >= 0 (0 = greedy)")
        need(topK >= 0, "top_k", topK, "an integer >= 0 (0 = off)")
        need(topP > 0 && topP <= 1, "top_p", topP, "0 < top_p <= 1 (1 = off)")
        need(minP in 0.0..1.0, "min_p", minP, "0 <= min_p <= 1 (0 = off)")
        // logits are float32: a factor beyond this would make infinities of them
        need(repetitionPenalty in 1e-6..1e6, "repetition_penalty", repetitionPenalty, "a number from 0.000001 to 1000000")
        need(presencePenalty in -2.0..2.0, "presence_penalty", presencePenalty, "a number from -2 to 2 (0 = off)")
        need(frequencyPenalty in -2.0..2.0, "frequency_penalty", frequencyPenalty, "a number from -2 to 2 (0 = off)")
        need(
            logitBias.all { (token, bias) -> token >= 0 && (bias == Double.NEGATIVE_INFINITY || abs(bias) <= 1e30) },
            "logit_bias", logitBias, "{token >= 0: number up to 1e30, or -inf}",
        )
        need(acceptance in listOf("rejection", "coupled"), "acceptance", "'$acceptance'", "'rejection' or 'coupled'")
        need(verification in listOf("token", "block"), "verification", "'$verification'", "'token' or 'block'")
    }

    val greedy: Boolean get() = temperature == 0.0 // whether there is nothing random

    val counts: Boolean get() = presencePenalty != 0.0 || frequencyPenalty != 0.0 // whether it matters how often a token is in the text
    val readsPrefix: Boolean get() = repetitionPenalty != 1.0 || counts || constraint != null // whether the tokens before decide too
    val adjusts: Boolean get() = logitBias.isNotEmpty() || readsPrefix // whether single logits are changed
    val plainGreedy: Boolean get() = greedy && !adjusts // whether the token is the argmax of the raw row

    /** Whether sampled guesses are verified by rejection sampling; else all guesses are verified by matching. */
    val rejects: Boolean get() = !greedy && acceptance == "rejection"

    /** Whether the seed decides the text together with how much is guessed: guesses use up random numbers. */
    val seededRejection: Boolean get() = seed != null && rejects
}

private fun notFinite(position: Int? = null): EdgespecError {
    val where = if (position == null) "" else " for position $position"
    return EdgespecError(
        "expected finite logits$where, got NaN, +inf or nothing but -inf",
        "the model or its export is damaged; `edgespec export` it again and look at its parity report",
    )
}

/** The first index of the largest value; a NaN wins. */
fun argmax(row: FloatArray): Int {
    var best = 0
    for (at in row.indices) {
        val value = row[at]
        if (value.isNaN()) return at
        if (value > row[best]) best = at
    }
    return best
}

/** [vocab]: [logits] after logit bias, penalties and constraint; the same array without those. */
fun adjusted(logits: FloatArray, params: SamplingParams, prefix: List<Int>): FloatArray {
    if (!params.adjusts) return logits
    val row = logits.copyOf()
    for ((token, bias) in params.logitBias) row[token] += bias.toFloat()
    if (params.repetitionPenalty != 1.0) {
        val factor = params.repetitionPenalty.toFloat()
        eachDifferent(prefix) { row[it] = if (row[it] < 0) row[it] * factor else row[it] / factor }
    }
    if (params.counts) {
        val times = HashMap<Int, Int>()
        for (at in params.prompt until prefix.size) times.merge(prefix[at], 1, Int::plus)
        for ((token, count) in times) row[token] -= (params.presencePenalty + params.frequencyPenalty * count).toFloat()
    }
    val allowed = params.constraint?.allowed(prefix, row) ?: return row
    // a row of a draft that has no token which is allowed stays as it is: its guess will be refused
    if (row.indices.none { allowed.getOrElse(it) { false } && row[it] != Float.NEGATIVE_INFINITY }) return row
    for (at in row.indices) if (!allowed.getOrElse(at) { false }) row[at] = Float.NEGATIVE_INFINITY
    return row
}

/** The tokens that can be sampled: [ids] [k], ascending, and [logits] [k], whose softmax is their distribution. */
class Support(val ids: IntArray, val logits: DoubleArray) {
    /** [k], sums to 1. */
    fun probs(): DoubleArray {
        val top = logits.max()
        val weights = DoubleArray(logits.size) { exp(logits[it] - top) }
        val total = weights.sum()
        for (at in weights.indices) weights[at] /= total
        return weights
    }

    /** float64 [vocab]: the same, spread out. */
    fun spread(vocab: Int): DoubleArray {
        val found = DoubleArray(vocab)
        val probs = probs()
        for (at in ids.indices) found[ids[at]] = probs[at]
        return found
    }

    /** The token at [position] by Gumbel-max; far below the best only a rare noise can win, found by comparing integers. */
    fun draw(noise: Noise, position: Int, stream: Long = TARGET): Int {
        val bits = noise.bits(position, ids, stream)
        var far = Double.NEGATIVE_INFINITY
        var least = 0L
        if (bits.size > MANY) {
            far = logits.max() - NEAR
            var beaten = Double.NEGATIVE_INFINITY
            for (at in bits.indices) if (logits[at] >= far) beaten = maxOf(beaten, logits[at] + gumbelOf(bits[at]))
            least = ((exp(-exp(far - beaten)) - 1e-9) * (1L shl 53).toDouble()).toLong()
        }
        var best = -1
        var most = Double.NEGATIVE_INFINITY
        for (at in bits.indices) {
            if (logits[at] < far && bits[at] < least) continue
            val value = logits[at] + gumbelOf(bits[at])
            if (best < 0 || value > most) {
                best = at
                most = value
            }
        }
        return ids[best]
    }
}

/** Ascending: indices of the [count] largest of [values], and of ties with the last. */
internal fun top(values: DoubleArray, count: Int): IntArray {
    if (count >= values.size) return IntArray(values.size) { it }
    val largest = PriorityQueue<Double>(count) // so far, the least first
    var least = Double.NEGATIVE_INFINITY
    for (value in values) {
        if (largest.size == count && !(value > least)) continue
        if (largest.size == count) largest.poll()
        largest.add(value)
        least = largest.peek()
    }
    return values.indices.filter { values[it] >= least }.toIntArray()
}

/** At most [count] indices of the largest [values], the largest first, the lowest on a tie; -inf is left out. */
fun bestOf(values: DoubleArray, count: Int): IntArray {
    val found = top(values, count).filter { values[it] > Double.NEGATIVE_INFINITY }
    return found.sortedByDescending { values[it] }.take(count).toIntArray() // the sort is stable
}

internal fun doubles(row: FloatArray): DoubleArray = DoubleArray(row.size) { row[it].toDouble() }

/** float64 [k]: values over the temperature, shifted so that the largest is 0. */
private fun scaled(row: DoubleArray, temperature: Double): DoubleArray {
    val top = row.max()
    return DoubleArray(row.size) { (row[it] - top) / temperature } // before the division: it must not overflow
}

/** Ascending: indices of the fewest of [row] that hold [topP] of the mass. */
private fun nucleus(row: FloatArray, temperature: Double, topP: Double): IntArray {
    val count = row.size
    val most = row.max()
    val divisor = maxOf(temperature.toFloat(), java.lang.Float.MIN_NORMAL)
    val wanted = topP * row.sumOf { exp(((it - most) / divisor).toDouble()).toFloat().toDouble() }
    val wide = doubles(row)
    var size = FIRST_NUCLEUS
    while (true) {
        val candidates = if (size * 2 < count) top(wide, size) else IntArray(count) { it }
        val order = candidates.sortedByDescending { row[it] }
        val weights = scaled(DoubleArray(order.size) { wide[order[it]] }, temperature)
        var mass = 0.0
        val last = weights.indexOfFirst { weight ->
            mass += exp(weight)
            mass >= wanted
        }
        if (last >= 0 || order.size == count) return order.take(if (last < 0) count else last + 1).toIntArray().also { it.sort() }
        size *= 16
    }
}

fun support(logits: FloatArray, params: SamplingParams, prefix: List<Int>): Support {
    var row = adjusted(logits, params, prefix)
    val best = argmax(row) // a NaN wins every argmax, so looking at the winner is enough
    if (!row[best].isFinite()) throw notFinite()
    if (params.greedy) return Support(intArrayOf(best), DoubleArray(1))
    var ids = IntArray(row.size) { it }
    fun keep(kept: IntArray) {
        val from = row
        val named = ids
        row = FloatArray(kept.size) { from[kept[it]] }
        ids = IntArray(kept.size) { named[kept[it]] }
    }
    if (params.topK in 1 until row.size) keep(top(doubles(row), params.topK))
    if (params.topP < 1) keep(nucleus(row, params.temperature, params.topP))
    if (params.minP > 0) {
        val weights = scaled(doubles(row), params.temperature)
        val least = ln(params.minP)
        keep(weights.indices.filter { weights[it] >= least }.toIntArray())
    }
    return Support(ids, scaled(doubles(row), params.temperature))
}

/** Log-probability of [token] under the unadjusted [logits]. */
fun logSoftmaxAt(logits: FloatArray, token: Int): Double {
    val most = logits.max()
    return (logits[token] - most).toDouble() - ln(logits.sumOf { exp((it - most).toDouble()).toFloat().toDouble() })
}

/** Sampling results for each row of one target pass: row 0 follows the pending token, row i + 1 node i. */
class RowSampler(
    private val output: Pass, private val tokens: Tokens, private val proposal: Proposal, private val params: SamplingParams,
    private val noise: Noise,
) {
    private val plain = params.plainGreedy
    val matching = params.greedy || params.acceptance == "coupled" // whether sampled guesses too are verified by matching
    val block = params.verification == "block" // whether sampled chains are verified as a block

    /** Committed tokens and the guesses on the path to [row]; no copy of them. */
    fun prefix(row: Int) = Prefix(tokens, proposal.path(row - 1))

    /** Index, in the sequence, of the token that the row predicts. */
    fun position(row: Int): Int =
        tokens.size + if (proposal.parents == null) row else proposal.depth(row - 1)

    private fun seen(row: Int): List<Int> = if (params.readsPrefix) prefix(row) else emptyList()
    private fun supportOf(row: Int): Support = support(output.logits.row(row), params, seen(row))

    /** The token that plain decoding emits there. */
    fun choose(row: Int): Int = if (plain) likeliest(row) else supportOf(row).draw(noise, position(row))

    /** [vocab]: p, after temperature and truncation; one-hot where greedy. */
    fun distribution(row: Int): DoubleArray {
        if (!plain) return supportOf(row).spread(output.logits.columns)
        val found = DoubleArray(output.logits.columns)
        found[likeliest(row)] = 1.0
        return found
    }

    /** The token of the largest logit, after bias and repetition penalty. */
    fun likeliest(row: Int): Int {
        val best: Int
        val logit: Float
        val given = output.best
        if (given != null) {
            best = given.tokens[row * given.top]
            logit = given.logits[row * given.top]
        } else {
            val logits = output.logits.row(row)
            val values = if (plain) logits else adjusted(logits, params, seen(row))
            best = argmax(values)
            logit = values[best]
        }
        if (!logit.isFinite()) throw notFinite(position(row))
        return best
    }

    /** How many tokens come before [token] by logit, after bias and repetition penalty. */
    fun rank(row: Int, token: Int): Int {
        val logits = adjusted(output.logits.row(row), params, seen(row))
        if (!logits[argmax(logits)].isFinite()) throw notFinite(position(row))
        val mine = logits[token]
        if (mine == Float.NEGATIVE_INFINITY) return logits.size
        return logits.indices.count { logits[it] > mine || (it < token && logits[it] == mine) }
    }

    /** Log-probability of [token] at [row] by the model itself: before bias, penalty and truncation, except for a scored constraint. */
    fun logprob(row: Int, token: Int): Double {
        val logits = output.logits.row(row)
        return logSoftmaxAt(if (params.constraint?.scored == true) adjusted(logits, params, seen(row)) else logits, token)
    }
}

/* Counter-based randomness, Python's numbers: hashes of (seed, position, stream, token), independent of the pass. */

private const val GOLDEN = -0x61c8864680b583ebL // 0x9E3779B97F4A7C15; splitmix64 (Steele et al. 2014)
private const val MIX1 = -0x40a7b892e31b1a47L // 0xBF58476D1CE4E5B9
private const val MIX2 = -0x6b2fb644ecceee15L // 0x94D049BB133111EB

/** Streams: uses of randomness that must be independent of each other at one position. */
const val TARGET = 0L
const val RESIDUAL = 1L
const val ACCEPT = 1L shl 20 // + sibling
const val DRAFT = 1L shl 40 // + length at the start of the draft
const val BLOCK = 1L shl 30 // + length at the start of the block

internal const val UNIT = 1.0 / (1L shl 53)

private fun mix(value: Long): Long {
    var x = value
    x = (x xor (x ushr 30)) * MIX1
    x = (x xor (x ushr 27)) * MIX2
    return x xor (x ushr 31)
}

/** Randomness without state; [seed] null = 64 bits from the operating system. */
class Noise(seed: Long? = null) {
    val seed: Long = seed ?: SecureRandom().nextLong()
    private val key = mix(this.seed + GOLDEN)

    private fun state(position: Int, stream: Long): Long = mix(mix(key + position * GOLDEN) + stream * MIX1 + 1)
    fun uniform(position: Int, stream: Long): Double = (mix(state(position, stream)) ushr 11).toDouble() * UNIT

    /** [k]: 53 random bits for each of [tokens]. */
    fun bits(position: Int, tokens: IntArray, stream: Long = TARGET): LongArray {
        val state = state(position, stream)
        return LongArray(tokens.size) { mix(tokens[it] * GOLDEN + state) ushr 11 }
    }

    /** Standard Gumbel noise, [k], one number for each of [tokens]. */
    fun gumbel(position: Int, tokens: IntArray, stream: Long = TARGET): DoubleArray {
        val bits = bits(position, tokens, stream)
        return DoubleArray(bits.size) { gumbelOf(bits[it]) }
    }
}

/** -log(-log(u)) of the uniform number that 53 [bits] are; increasing in them. */
fun gumbelOf(bits: Long): Double = -ln(-ln((bits.toDouble() + 0.5) * UNIT)) // never 0 and never 1
