package dev.edgespec.engine

import dev.edgespec.InvalidRequest
import dev.edgespec.control.TRIED
import dev.edgespec.decoding.*
import dev.edgespec.planning.Admission
import dev.edgespec.runtimes.*
import java.util.Locale

/* Which method a request gets, and why. */

const val CHAIN = "chain" // several methods in order: in every bundle
const val AUTO = "auto" // the method of the best prediction, watched and changed while it decodes: in every bundle
private const val CANDIDATES = 3 // most methods that auto chooses from

/** A method for a request: its parameters, maximum guesses per round, and the reason. */
data class MethodChoice(
    val name: String,
    val part: MethodPart,
    val gamma: Int,
    val reason: String,
    val proposers: List<MethodChoice> = emptyList(), // of a chain
    val promise: Double = 1.0, // predicted speed over plain decoding; 1 = nothing was predicted
    val candidates: List<MethodChoice> = emptyList(), // of auto, this one first
) {
    fun uses(method: String): Boolean = name == method || proposers.any { it.name == method }

    /** The methods of a chain, or the candidates of auto; empty for one method. */
    val several: List<MethodChoice> get() = proposers + candidates

    /** Auto with only the [allowed] candidates; anything else, and auto without any, is unchanged.  [why]: the reason. */
    fun among(allowed: List<String>, why: String): MethodChoice {
        val (kept, dropped) = candidates.partition { it.name in allowed }
        if (kept.isEmpty() || dropped.isEmpty()) return this
        val reason = "${dropped.joinToString(", ") { it.name }}: $why; ${kept[0].reason}"
        return kept[0].copy(gamma = kept.maxOf { it.gamma }, reason = reason, candidates = kept)
    }
}

/** The requested method, or auto: the one with the best predicted speed, and alternatives. */
fun chooseMethod(manifest: Manifest, wanted: String?, drafts: DraftOptions = DraftOptions()): MethodChoice {
    val methods = manifest.methods
    val proposers = drafts.proposers
    if (wanted == CHAIN || (wanted == null && proposers.isNotEmpty())) return chain(manifest, proposers)
    if (wanted == AUTO && proposers.isNotEmpty()) throw InvalidRequest(
        "method auto and proposers ${proposers.joinToString(", ")}: expected one of them", "proposers belong to method chain",
    )
    if (wanted != null && wanted != AUTO) {
        if (wanted !in methods) {
            throw InvalidRequest("method '$wanted' is not in this bundle; it has: ${methods.keys.joinToString(", ")}", howToHave(manifest, wanted))
        }
        return choice(manifest, wanted, "asked for")
    }
    val gains = methods.filter { it.key != "ar" }.mapValues { it.value.predictedSpeedup ?: 0.0 }.filterValues { it >= TRIED }
    var names = gains.keys.sortedByDescending { gains.getValue(it) }.take(CANDIDATES)
    val hears = manifest.speech != null // a transcript seldom repeats earlier text
    if (hears && names.isEmpty()) return choice(manifest, "ar", "no method of this bundle is expected to gain on transcripts")
    if ("ngram" !in names && !hears) names = names.take(CANDIDATES - 1) + "ngram"
    val chosen = names.map { name ->
        val gain = gains[name]
        val reason = if (gain == null) {
            "default: costs little where text does not repeat"
        } else {
            "predicted %.2fx on the exporting machine".format(Locale.ROOT, gain)
        }
        choice(manifest, name, reason).copy(promise = gain ?: 1.0)
    }
    return chosen[0].copy(gamma = chosen.maxOf { it.gamma }, candidates = chosen)
}

/** The proposers, or n-gram and the best other method of the bundle. */
private fun chain(manifest: Manifest, given: List<String>): MethodChoice {
    val usable = manifest.methods.keys.filter { it != "ar" }
    var proposers = given
    if (proposers.isEmpty()) {
        val others = usable.filter { it != "ngram" }
        val predicted = manifest.methods.mapValues { it.value.predictedSpeedup ?: 0.0 }.filterValues { it > 0 }
        val best = predicted.maxByOrNull { it.value }?.key
        proposers = if (others.isEmpty()) listOf("ngram") else listOf("ngram", if (best in others) best!! else others[0])
    }
    proposers.firstOrNull { it !in usable }?.let {
        throw InvalidRequest("proposer '$it' is not in this bundle; it has: ${usable.joinToString(", ")}", howToHave(manifest, it))
    }
    if (proposers.toSet().size < proposers.size) throw InvalidRequest("proposers ${proposers.joinToString(", ")}: expected each one once")
    val chosen = proposers.map { choice(manifest, it, "") }
    return MethodChoice(CHAIN, MethodPart(), chosen.maxOf { it.gamma }, proposers.joinToString(", then "), chosen)
}

fun ownChoice(name: String) = MethodChoice(name, MethodPart(), 8, "the caller's own proposer")

private fun howToHave(manifest: Manifest, name: String) = when (name) {
    in METHODS -> "export it with `--method $name`"
    in manifest.elsewhere -> "$name runs in Python alone: choose another method"
    else -> "check the spelling"
}

internal fun choice(manifest: Manifest, name: String, reason: String): MethodChoice {
    val part = manifest.methods.getValue(name)
    // adaptive control may go beyond the gamma that was best on average: a sure draft deserves a longer round
    return MethodChoice(name, part, GAMMAS[name] ?: maxOf(part.gamma, LEAST_GAMMA), reason)
}

/* Letting a request in: with the method it wants where that fits the memory, else with a cheaper one. */

private val HEAVY = listOf("speculative") + DRAFTERS + listOf("medusa", "blockwise", "paradecode")

/** The one of several methods that has its own model or heads. */
internal fun heaviest(choice: MethodChoice): String {
    val names = choice.several.map { it.name }.ifEmpty { listOf(choice.name) }
    return HEAVY.firstOrNull { it in names } ?: names[0]
}

/** How a request may run, and its lane, which the caller returns: the counted memory is the used memory. */
internal fun Engine.admit(wanted: MethodChoice, prompt: Tokens, settings: Settings): Triple<MethodChoice, Admission, Lane> {
    lookAtMemory()
    val tokens = minOf(context, prompt.size + settings.length)
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
