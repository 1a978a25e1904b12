package dev.edgespec.decoding

import dev.edgespec.InvalidRequest
import kotlin.math.abs
import kotlin.math.exp
import kotlin.math.ln

/** What a rule may ask of the rows of a target pass (see [RowSampler]). */
interface JudgedRows {
    /** [vocab]: p, after temperature and truncation; one-hot where greedy. */
    fun distribution(row: Int): DoubleArray

    /** The token of the largest logit, after bias and repetition penalty. */
    fun likeliest(row: Int): Int

    /** How many tokens come before [token] by logit, after bias and repetition penalty. */
    fun rank(row: Int, token: Int): Int
}

/** What a lossy rule says of a guess: a merit, the larger the better, or null = refused. */
fun interface Judge {
    fun merit(token: Int): Double?
}

/**
 * Which guesses stand; all rules but `exact` give losslessness away on purpose.
 *
 * `typical`: p(guess) > min(epsilon, delta exp(-H(p))) (Medusa, arXiv 2401.10774 section 2.3.1); `top-k`: a guess among
 * the k likeliest; `distance`: at most so many ids from the likeliest token (arXiv 1811.03115 section 5); `all`.
 * [minBlock]: at least so many guesses of a chain stand under any rule.
 */
data class Accept(
    val rule: String = "exact",
    val epsilon: Double = 0.09,
    val delta: Double = 0.3,
    val k: Int = 1,
    val distance: Int = 0,
    val minBlock: Int = 0,
) {
    init {
        if (rule !in RULES) throw InvalidRequest("acceptance rule '$rule': expected one of ${RULES.joinToString(", ")}")
        for ((name, value) in listOf("epsilon" to epsilon, "delta" to delta)) {
            if (!(value.isFinite() && value > 0)) {
                throw InvalidRequest("$name of typical acceptance is ${number(value)}: expected a number > 0")
            }
        }
        for ((name, value, least) in listOf(Triple("k", k, 1), Triple("distance", distance, 0), Triple("min_block", minBlock, 0))) {
            if (value < least) {
                throw InvalidRequest("$name of the acceptance rule is $value: expected an integer >= $least")
            }
        }
    }

    /** Whether the text keeps the distribution of plain decoding. */
    val lossless: Boolean get() = rule == "exact" && minBlock == 0

    /** What is given away, in words. */
    val approximations: List<String>
        get() {
            val words = when (rule) {
                "typical" -> listOf("typical acceptance (epsilon ${number(epsilon)}, delta ${number(delta)})")
                "top-k" -> listOf("guesses accepted among the $k likeliest tokens")
                "distance" -> listOf("guesses accepted within $distance of the likeliest token")
                "all" -> listOf("every guess accepted")
                else -> emptyList()
            }
            return if (minBlock > 0) words + "at least $minBlock guesses accepted" else words
        }

    /** What a lossy rule says of guesses at a row. */
    fun judge(rows: JudgedRows, row: Int): Judge = when (rule) {
        "all" -> Judge { 0.0 }
        "top-k" -> Judge { token -> rows.rank(row, token).takeIf { it < k }?.let { -it.toDouble() } }
        "distance" -> {
            val best = rows.likeliest(row)
            Judge { token -> abs(token - best).takeIf { it <= distance }?.let { -it.toDouble() } }
        }
        else -> {
            val p = rows.distribution(row)
            val entropy = -p.sumOf { if (it > 0) it * ln(it) else 0.0 }
            val least = minOf(epsilon, delta * exp(-entropy))
            Judge { token -> if (p[token] > least) ln(p[token]) else null }
        }
    }

    companion object {
        val RULES = listOf("exact", "typical", "top-k", "distance", "all")
        val EXACT = Accept()

        /** A rule as the command line writes it: `typical`, `typical:0.09,0.3`, `top-k:3`, `distance:2`, ... */
        fun parse(text: String, minBlock: Int = 0): Accept {
            val wrong = InvalidRequest(
                "acceptance rule '$text': expected exact, typical, typical:EPSILON,DELTA, top-k:K, distance:D or all"
            )
            val rule = text.substringBefore(":")
            val rest = text.substringAfter(":", "")
            try {
                if (rule == "typical" && rest.isNotEmpty()) {
                    val (epsilon, delta) = rest.split(",").map { it.toDouble() }.also { if (it.size != 2) throw wrong }
                    return Accept("typical", epsilon = epsilon, delta = delta, minBlock = minBlock)
                }
                if (rule == "top-k") return Accept("top-k", k = rest.toInt(), minBlock = minBlock)
                if (rule == "distance") return Accept("distance", distance = rest.toInt(), minBlock = minBlock)
            } catch (_: NumberFormatException) {
                throw wrong
            }
            if (rest.isNotEmpty() || rule !in listOf("exact", "typical", "all")) throw wrong
            return Accept(rule, minBlock = minBlock)
        }
    }
}

/** A number without a useless fraction: 1, 0.5. */
internal fun number(value: Double): String =
    if (value == value.toLong().toDouble()) value.toLong().toString() else value.toString()
