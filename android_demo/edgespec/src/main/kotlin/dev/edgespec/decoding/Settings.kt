package dev.edgespec.decoding

import dev.edgespec.InvalidRequest
import kotlin.math.abs

const val MOST_NODES = 64 // of a tree of guesses: exported graphs have this much room beyond the context
private const val MOST_CYCLES = 16
private const val MOST_LIKELIEST = 20

/**
 * Tokens that a text may have.  It is asked for any prefix, in any order, and answers by the prefix and the model's row there, which
 * the prefix decides: every lossless method stays so.
 */
fun interface Constraint {
    /** [vocab]: which tokens may follow [prefix], prompt included; [row]: the logits there, after bias and penalties. */
    fun allowed(prefix: IntArray, row: FloatArray): BooleanArray
}

/** How a token is chosen; applied in this order.  Fields and ranges are those of the Python side. */
data class SamplingParams(
    val temperature: Double = 0.0, val topK: Int = 0, val topP: Double = 1.0, val minP: Double = 0.0,
    val repetitionPenalty: Double = 1.0, val logitBias: Map<Int, Double> = emptyMap(), val seed: Long? = null,
    val acceptance: String = "rejection", val verification: String = "token", val presencePenalty: Double = 0.0,
    val frequencyPenalty: Double = 0.0,
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

    /** Whether sampled guesses are verified by rejection sampling; else all guesses are verified by matching. */
    val rejects: Boolean get() = !greedy && acceptance == "rejection"
}

/** Options of the guesses of some methods; null = the bundle's or the method's best. */
data class DraftOptions(
    val branch: List<Int>? = null, val nodes: Int? = null, val cycles: Int? = null, val proposers: List<String> = emptyList(),
) {
    init {
        for ((name, value, range) in listOf(Triple("nodes", nodes, 1..MOST_NODES), Triple("cycles", cycles, 0..MOST_CYCLES))) {
            if (value != null && value !in range) {
                throw InvalidRequest("$name is $value: expected a whole number from ${range.first} to ${range.last}")
            }
        }
        if (branch != null) {
            if (branch.isEmpty()) throw InvalidRequest("branch is []: expected one or several integers", "as in (2,) or (3, 2)")
            val levels = branch.runningFold(1L) { level, width -> (level * width).coerceIn(-1L, 1L shl 40) }
            val nodes = levels.sum() - 1
            if (branch.min() < 1 || nodes > MOST_NODES) throw InvalidRequest(
                "branch (${branch.joinToString(", ")}) makes a tree of $nodes guesses: expected numbers from 1, and at " +
                    "most $MOST_NODES guesses"
            )
        }
    }
}

/**
 * Settings of one request; each field has the default and the meaning of the Python side's.  [maxNewTokens]: null = to the end of the
 * context; [gamma]: maximum guesses of a round, null = the method's; [adaptive]: as many guesses as is fastest, else always [gamma];
 * [adapter]: name of a LoRA adapter that was loaded with the bundle; [topLogprobs]: rounds tell the log-probabilities of this many of the likeliest tokens; [prediction]: expected text.
 */
data class Settings(
    val method: String? = null, val maxNewTokens: Int? = null, val gamma: Int? = null, val adaptive: Boolean = true,
    val sampling: SamplingParams = SamplingParams(), val drafts: DraftOptions = DraftOptions(), val stop: List<String> = emptyList(),
    val ignoreEos: Boolean = false, val logprobs: Boolean = false, val topLogprobs: Int = 0, val prediction: String? = null,
    val adapter: String? = null,
) {
    init {
        if (maxNewTokens != null && maxNewTokens < 1) throw InvalidRequest("expected max_new_tokens >= 1, got $maxNewTokens")
        if (topLogprobs !in 0..MOST_LIKELIEST) throw InvalidRequest("top_logprobs $topLogprobs: expected 0 to $MOST_LIKELIEST")
        if (gamma != null && gamma !in 1..MOST_NODES) {
            throw InvalidRequest("gamma $gamma: expected 1 to $MOST_NODES", "use method ar for decoding without drafts")
        }
    }
}
