package dev.edgespec.engine

import dev.edgespec.decoding.Round
import dev.edgespec.decoding.Stats

/** Whether all of these hold: false where one does not, else null where one cannot be said. */
internal fun ofAll(claims: List<Boolean?>): Boolean? = if (false in claims) false else if (null in claims) null else true

/** What a request gave; fields and their meaning are those of the Python side. */
class Result(
    val text: String,
    val tokens: IntArray,
    val finish: String, // eos, length, context, stop or cancelled
    val stats: Stats,
    val methodRequested: String?,
    val methodUsed: String,
    val reason: String,
    val lossless: Boolean?, // null: see [unproven]
    val exact: Boolean?,
    val approximations: List<String>,
    val operators: String,
    val draftAttention: String? = null,
    val logprobs: DoubleArray? = null,
    val predictedBytes: Long = 0,
    val modelSampling: Map<String, Double> = emptyMap(),
    val unproven: List<String> = emptyList(), // why those two cannot be said, a sentence each: something was not checked
) {
    val device = "cpu"

    /** For JSON; the keys are stable. */
    fun asMap(): Map<String, Any?> = linkedMapOf(
        "text" to text, "tokens" to tokens.toList(), "finish" to finish, "method_requested" to methodRequested,
        "method_used" to methodUsed, "reason" to reason, "lossless" to lossless, "exact" to exact,
        "unproven" to unproven,
        "approximations" to approximations, "operators" to operators, "device" to device,
        "stats" to stats.asMap() + ("predicted_bytes" to predictedBytes),
    ).apply {
        draftAttention?.let { put("draft_attention", it) }
        logprobs?.let { put("logprobs", it.toList()) }
        if (modelSampling.isNotEmpty()) put("model_sampling", modelSampling)
    }
}

/**
 * A piece of a stream: [text] became complete in one [round] (null for what was held back until the very end), and
 * [pieces] is it by the round's tokens.  The last chunk of a stream has the [result].
 */
class Chunk(val text: String, val round: Round?, val pieces: List<String> = emptyList(), val result: Result? = null)
