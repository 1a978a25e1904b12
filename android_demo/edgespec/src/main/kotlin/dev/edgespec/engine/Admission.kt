package dev.edgespec.engine

import dev.edgespec.decoding.Settings
import dev.edgespec.decoding.Tokens
import dev.edgespec.planning.memory.Admission

/* Letting a request in: with the method it wants where that fits the memory, else with a cheaper one. */

private val HEAVY = listOf("speculative", "eagle", "mtp", "dflash", "medusa", "blockwise", "paradecode")

/** Of several methods, the one that holds a model or heads of its own. */
internal fun heaviest(choice: MethodChoice): String {
    val names = choice.several.map { it.name }.ifEmpty { listOf(choice.name) }
    return HEAVY.firstOrNull { it in names } ?: names[0]
}

/** How a request may run, and its lane, which is to be given back: what was counted of memory is what is taken. */
internal fun Engine.admit(wanted: MethodChoice, prompt: Tokens, settings: Settings): Triple<MethodChoice, Admission, Lane> {
    val tokens = minOf(context, prompt.size + settings.maxNewTokens)
    val choice = wanted.among(allowance.together(wanted.candidates.map { it.name }, tokens), "no room in memory")
    val (busy, idle) = lanes.held(prompt)
    val method = heaviest(choice)
    // what several methods load stays while the request runs
    val beside = allowance.extra(choice.several.map { it.name }.filter { it != method }, tokens)
    val greedy = settings.sampling.greedy && !settings.logprobs
    val admission = allowance.admit(method, tokens, settings.gamma ?: choice.gamma, greedy, busy + beside, idle)
    val lane = lanes.take(prompt, room = !admission.crowded, spare = admission.spare)
    val taken = if (admission.method == method) choice else choice(bundle.manifest, admission.method, admission.reason)
    return Triple(taken, admission, lane)
}
