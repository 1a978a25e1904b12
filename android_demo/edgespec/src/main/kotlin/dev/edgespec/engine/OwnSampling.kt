package dev.edgespec.engine

import dev.edgespec.decoding.SamplingParams

/** The model's own settings that decide in a request, by name: those that differ from plain decoding's defaults. */
internal fun keptOfModel(own: SamplingParams, used: SamplingParams): Map<String, Double> {
    fun named(of: SamplingParams) = linkedMapOf(
        "temperature" to of.temperature, "top_p" to of.topP, "top_k" to of.topK.toDouble(), "min_p" to of.minP,
        "repetition_penalty" to of.repetitionPenalty,
    )
    val off = named(SamplingParams())
    val asked = named(used)
    val names = if (used.greedy) setOf("repetition_penalty") else off.keys
    return named(own).filter { (name, value) -> name in names && value == asked[name] && value != off[name] }
}
