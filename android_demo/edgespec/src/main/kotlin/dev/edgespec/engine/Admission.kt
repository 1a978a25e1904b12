package dev.edgespec.engine

import dev.edgespec.decoding.Settings
import dev.edgespec.planning.memory.Admission

/* Letting a request in: with the method it wants where that fits the memory, else with a cheaper one. */

private val HEAVY = listOf("speculative", "eagle", "mtp", "dflash", "medusa", "blockwise", "paradecode")

/** Of several methods, the one that holds a model or heads of its own. */
internal fun heaviest(choice: MethodChoice): String {
    val names = choice.several.map { it.name }.ifEmpty { listOf(choice.name) }
    return HEAVY.firstOrNull { it in names } ?: names[0]
}

/** How a request of [prompt] tokens may run. */
internal fun Engine.admit(wanted: MethodChoice, prompt: Int, settings: Settings): Pair<MethodChoice, Admission> {
    val tokens = minOf(context, prompt + settings.maxNewTokens)
    val choice = wanted.among(allowance.together(wanted.candidates.map { it.name }, tokens), "no room in memory")
    val (busy, idle) = lanes.held()
    val method = heaviest(choice)
    // what several methods load stays while the request runs
    val beside = allowance.extra(choice.several.map { it.name }.filter { it != method }, tokens)
    val greedy = settings.sampling.greedy && !settings.logprobs
    val admission = allowance.admit(method, tokens, settings.gamma ?: choice.gamma, greedy, busy + beside, idle)
    if (admission.crowded) lanes.clear()
    if (admission.method == method) return choice to admission
    return choice(bundle.manifest, admission.method, admission.reason) to admission
}
