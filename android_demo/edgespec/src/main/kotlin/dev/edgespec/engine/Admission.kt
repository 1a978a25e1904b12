package dev.edgespec.engine

import dev.edgespec.BudgetError
import dev.edgespec.decoding.Settings
import dev.edgespec.runtimes.Bundle
import dev.edgespec.runtimes.KvFormat
import dev.edgespec.runtimes.ModelPart
import dev.edgespec.runtimes.PREFILL_CHUNK
import dev.edgespec.runtimes.up
import java.util.Locale

/* The memory that an engine may take, and what of a request fits into it. */

/** What the system says of memory; on Android ActivityManager.MemoryInfo says it. */
interface MemoryFacts {
    val total: Long // bytes of the machine
    val available: Long // bytes that this process may take beyond what it has now
    val low: Boolean // whether the system is short of memory already
}

/** How a request may run: its method, rows of a prefill's pass, bytes that it is predicted to need (0 = not counted). */
class Admission(val method: String, val chunk: Int, val predicted: Long, val reason: String = "", val crowded: Boolean = false)

/** A part of the memory, in private bytes. */
data class MemoryPart(val name: String, val bytes: Long)

private const val LEAST = 64 // tokens: a bundle that has no room for them is refused when it is loaded
private const val MARGIN = 1.05 // of what was added up
private val CHUNKS = listOf(PREFILL_CHUNK, 64, 32, 16)
private val CHEAPER = listOf("ngram", "ar") // methods without memory of their own, the better one first

/**
 * Bytes of private memory that running a bundle takes beyond what its process has: keys and values, logits, scratch, and
 * with stock operators the weights as ONNX Runtime packs them.  Mapped weights can be read again, so they do not count.
 */
class Allowance(private val bundle: Bundle, private val operators: String, private val kv: KvFormat?, private val memory: MemoryFacts?) {
    private val limit = memory?.available

    /** Refuse a bundle that cannot fit, before anything of it is loaded. */
    fun admitBundle() {
        if (limit == null) return
        val least = weights(bundle.manifest.target) + takes("ar", LEAST, CHUNKS.last(), true)
        if (least > limit) {
            throw BudgetError(
                "this bundle needs at least ${showBytes(least)} to decode plainly, and ${showBytes(limit)} are free",
                "`edgespec plan` says which format and method would fit",
            )
        }
    }

    /** How a request of so many tokens of prompt and answer may run; [busy]: KV of others, [idle]: what earlier ones left. */
    fun admit(method: String, tokens: Int, greedy: Boolean, busy: Long, idle: Long): Admission {
        if (limit == null) return Admission(method, PREFILL_CHUNK, 0)
        val base = weights(bundle.manifest.target) + busy
        for (name in listOf(method) + CHEAPER.filter { it in bundle.manifest.methods && it != method }) for (chunk in CHUNKS) {
            val takes = base + takes(name, tokens, chunk, greedy)
            if (takes > limit) continue
            val needs = showBytes(base + takes(method, tokens, CHUNKS.last(), greedy))
            val reason = if (name == method) "" else "$method needs $needs, and ${showBytes(limit)} are free: $name instead"
            return Admission(name, chunk, takes, reason, takes + idle > limit)
        }
        val least = base + takes("ar", tokens, CHUNKS.last(), greedy)
        val fits = (tokens / 64 downTo 1).map { it * 64 }.firstOrNull { base + takes("ar", it, CHUNKS.last(), greedy) <= limit }
        throw BudgetError(
            "$tokens tokens of prompt and answer need ${showBytes(least)} with plain decoding, and ${showBytes(limit)} are free",
            if (fits == null) "`edgespec plan` says which format and method would fit" else "$fits tokens fit: shorten the prompt, ask for fewer new tokens, or keep keys as int8",
        )
    }

    /** Bytes of a request: keys and values, logits, scratch; of the draft too, with the weights it loads. */
    fun takes(method: String, tokens: Int, chunk: Int, greedy: Boolean): Long = request(method, tokens, chunk, greedy).sumOf { it.bytes }

    /** All that a bundle takes with a request of so many tokens, part by part. */
    fun parts(method: String, tokens: Int, greedy: Boolean = true): List<MemoryPart> =
        (listOf(MemoryPart("weights", weights(bundle.manifest.target))) + request(method, tokens, PREFILL_CHUNK, greedy)).filter { it.bytes > 0 }

    private fun request(method: String, tokens: Int, chunk: Int, greedy: Boolean): List<MemoryPart> {
        var parts = model(bundle.manifest.target, tokens, chunk, greedy, kv, "")
        val draft = when (method) {
            "speculative" -> bundle.manifest.draft
            "eagle", "mtp" -> bundle.manifest.drafter
            else -> null
        }
        if (draft != null) {
            parts = parts + MemoryPart("draft weights", weights(draft)) + model(draft, tokens, chunk, greedy, null, "draft ")
        }
        val total = parts.sumOf { it.bytes }
        return parts + MemoryPart("margin", (total * MARGIN).toLong() - total)
    }

    private fun model(part: ModelPart, tokens: Int, chunk: Int, greedy: Boolean, kv: KvFormat?, lead: String): List<MemoryPart> {
        val facts = part.facts
        val room = minOf(tokens, facts.context) + part.headroom
        val native = operators == "native"
        val format = kv ?: dev.edgespec.runtimes.ATTENTION.getValue(dev.edgespec.runtimes.exactAttention(part))
        val cache = if (native) format.nbytes(facts, room) else 8L * facts.layers * facts.kvHeads * facts.headDim * up(room, 64)
        val attended = (facts.heads + 2L * facts.kvHeads) * facts.headDim
        val scratch = 4L * (minOf(chunk, tokens) + 1) * (4L * facts.hidden + 3 * attended + 3L * facts.intermediate)
        val rows = if (native && greedy) 5 else 9
        val columns = part.headVocab?.size?.takeIf { part.cut } ?: facts.vocab
        val logits = 4L * rows * columns + if (greedy) 0 else 8L * 8 * facts.vocab
        return listOf(MemoryPart("${lead}keys and values", cache), MemoryPart("${lead}scratch", scratch), MemoryPart("${lead}logits", logits))
    }

    /** Private bytes of weights: none that are mapped; as stock operators pack them, about one and a half of the file. */
    private fun weights(part: ModelPart): Long =
        if (operators == "native") 0 else (bundle.manifest.files[part.weights]?.size ?: 0) * 3 / 2
}

/** Bytes for people: 1610612736 -> "1.50 GiB". */
fun showBytes(count: Long): String {
    var value = count.toDouble()
    var unit = "B"
    for (larger in listOf("KiB", "MiB", "GiB", "TiB")) {
        if (value < 1024) break
        value /= 1024
        unit = larger
    }
    return if (unit == "B") "%.0f %s".format(Locale.ROOT, value, unit) else "%.${if (value >= 100) 1 else 2}f %s".format(Locale.ROOT, value, unit)
}

/** Of several methods, the one that holds a model or heads of its own. */
internal fun heaviest(choice: MethodChoice): String {
    val names = (choice.proposers + choice.candidates).map { it.name }.ifEmpty { listOf(choice.name) }
    return listOf("speculative", "eagle", "mtp", "blockwise", "medusa", "paradecode").firstOrNull { it in names } ?: names[0]
}

/** Let a request in with the method it wants where that fits the memory, else with a cheaper one. */
internal fun Engine.admit(choice: MethodChoice, prompt: Int, settings: Settings): Pair<MethodChoice, Admission> {
    val tokens = minOf(context, prompt + settings.maxNewTokens)
    val (busy, idle) = lanes.held()
    val greedy = settings.sampling.greedy && !settings.logprobs
    val admission = allowance.admit(heaviest(choice), tokens, greedy, busy, idle)
    if (admission.crowded) lanes.clear()
    if (admission.method == heaviest(choice)) return choice to admission
    return choice(bundle.manifest, admission.method, admission.reason) to admission
}
