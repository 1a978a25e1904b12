package dev.edgespec.decoding

import dev.edgespec.InvalidRequest
import dev.edgespec.drafters.Proposer

const val MAX_NEW_TOKENS = 128
const val SHADOW_EVERY = 16 // rounds between two comparisons with plain decoding, where acceptance is lossy
const val MOST_NODES = 64 // of a tree of guesses: exported graphs have this much room beyond the context
private const val MOST_CYCLES = 16

/** Options of the guesses of some methods; null = the bundle's or the method's best. */
data class DraftOptions(
    val branch: List<Int>? = null, val nodes: Int? = null, val threshold: Double? = null, val kind: String = "text",
    val cycles: Int? = null, val proposers: List<String> = emptyList(), val search: Double = 0.02,
) {
    init {
        for ((name, value, range) in listOf(Triple("nodes", nodes, 1..MOST_NODES), Triple("cycles", cycles, 0..MOST_CYCLES))) {
            if (value != null && value !in range) {
                throw InvalidRequest("$name is $value: expected a whole number from ${range.first} to ${range.last}")
            }
        }
        if (threshold != null && threshold !in 0.0..1.0) throw InvalidRequest("threshold is $threshold: expected a probability, 0 to 1")
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
 * Settings of one request; each field has the default and the meaning of the Python side's.  [prediction]: expected text;
 * [maxNewTokens]: null = as many as an encoder-decoder wants, else [MAX_NEW_TOKENS]; the languages are those of a translation;
 * [beams]: beam search, only for encoder-decoders and `generate`.
 */
data class Settings(
    val method: String? = null, val maxNewTokens: Int? = null, val gamma: Int? = null, val fallback: Boolean = true,
    val adaptive: Boolean = true, val sampling: SamplingParams = SamplingParams(), val drafts: DraftOptions = DraftOptions(),
    val stop: List<String> = emptyList(), val ignoreEos: Boolean = false, val logprobs: Boolean = false,
    val shadow: Int? = null, val accept: Accept = Accept.EXACT, val proposer: Proposer? = null, val prediction: String? = null,
    val sourceLanguage: String? = null, val targetLanguage: String? = null, val beams: BeamOptions? = null,
) {
    val length: Int get() = maxNewTokens ?: MAX_NEW_TOKENS // maximum number of new tokens

    init {
        if (shadow != null && shadow < 0) throw InvalidRequest("shadow $shadow: expected a number of rounds, or 0 for no comparison")
        if (gamma != null && gamma < 1) {
            throw InvalidRequest("gamma $gamma: expected at least 1", "use method ar for decoding without drafts")
        }
    }
}
