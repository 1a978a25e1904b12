package dev.edgespec.engine

import dev.edgespec.control.Adaptive
import dev.edgespec.control.Candidate
import dev.edgespec.control.Compose
import dev.edgespec.control.Switch
import dev.edgespec.decoding.DraftOptions
import dev.edgespec.decoding.Drafter
import dev.edgespec.decoding.Tokens
import dev.edgespec.drafters.Custom
import dev.edgespec.drafters.NGramStore
import dev.edgespec.drafters.Parts
import dev.edgespec.drafters.Proposer
import dev.edgespec.drafters.build
import dev.edgespec.formulas.CostModel
import dev.edgespec.formulas.ENOUGH
import dev.edgespec.formulas.measure
import dev.edgespec.runtimes.Bundle
import dev.edgespec.runtimes.Model
import dev.edgespec.runtimes.Slot
import dev.edgespec.runtimes.openSlot
import java.io.File

private val VERIFY_SIZES = listOf(1, 2, 3, 5)
private const val MOST_IDLE = 4 // finished conversations whose KV is kept
private const val MOST_DRAFTERS = 32 // by method and options, that are kept with what they learned

/** The drafters that were asked for last. */
private class Latest<K> : LinkedHashMap<K, Drafter>(16, 0.75f, true) {
    override fun removeEldestEntry(eldest: MutableMap.MutableEntry<K, Drafter>?): Boolean = size > MOST_DRAFTERS
}

/**
 * A target slot, the draft's slot if one is needed, and a drafter per method.  Drafters and their adaptive control stay
 * from request to request: what a method learned about its acceptance and its cost is worth keeping.
 */
class Lane(
    private val bundle: Bundle,
    model: Model,
    private val draft: (String) -> Model,
    context: Int,
    private val times: MutableMap<String, Map<Int, Double>>,
    store: NGramStore?,
    cache: File?,
) : AutoCloseable {
    val target: Slot = openSlot(model, context)
    private val drafts = HashMap<String, Slot>() // open ones
    private val parts = Parts(bundle.manifest, target, ::openDraft, { verifyCosts(null) }, store, cache)
    private val inner = Latest<Pair<String, DraftOptions>>()
    private val made = Latest<List<Any?>>() // whole drafters, by what they were asked for with
    private var own: Pair<List<Any?>, Drafter>? = null

    /** The drafter of a method; with [adaptive] inside the control that drafts as much as pays. */
    fun drafter(choice: MethodChoice, gamma: Int?, adaptive: Boolean, fallback: Boolean, options: DraftOptions): Drafter {
        if (choice.proposers.isNotEmpty()) {
            val names = choice.proposers.map { it.name }
            return made.getOrPut(listOf("chain", options.copy(proposers = names), gamma, adaptive, fallback)) {
                Compose(choice.proposers.map { if (adaptive) loaded(it, gamma, fallback, options) else bare(it, options) })
            }
        }
        if (choice.candidates.isNotEmpty() && adaptive) {
            val promises = choice.candidates.map { it.name to it.promise }
            return made.getOrPut(listOf("auto", promises, options, gamma, fallback)) {
                verifyCosts(null) // the passes that this times must come before the prompt is read
                val candidates = choice.candidates.map {
                    Candidate(it.name, it.promise, { loaded(it, gamma, fallback, options) }, it.name == "ngram")
                }
                Switch(candidates, fallback)
            }
        }
        if (choice.name == "ar" || !adaptive) return bare(choice, options)
        return made.getOrPut(listOf(choice.name, options, gamma ?: choice.gamma, fallback)) { loaded(choice, gamma, fallback, options) }
    }

    /** The drafter around a caller's proposer; the last one is kept with what was learned of it. */
    fun own(proposer: Proposer, gamma: Int?, adaptive: Boolean, fallback: Boolean): Drafter {
        val key = listOf(System.identityHashCode(proposer), gamma, adaptive, fallback)
        own?.let { (known, drafter) -> if (known == key) return drafter }
        val custom = Custom(proposer, target.vocabSize)
        val drafter = if (adaptive) controlled(ownChoice(custom.name), custom, gamma, fallback) else custom
        own = key to drafter
        return drafter
    }

    private fun loaded(choice: MethodChoice, gamma: Int?, fallback: Boolean, options: DraftOptions): Adaptive =
        controlled(choice, bare(choice, options), gamma, fallback)

    private fun bare(choice: MethodChoice, options: DraftOptions): Drafter {
        val shape = options.copy(proposers = emptyList())
        return inner.getOrPut(choice.name to shape) { build(choice.name, parts, choice.part, shape) }
    }

    private fun controlled(choice: MethodChoice, drafter: Drafter, gamma: Int?, fallback: Boolean): Adaptive {
        val control = Adaptive(drafter, costs(choice, drafter), gamma ?: choice.gamma, fallback)
        choice.part.acceptance?.firstOrNull()?.let { control.prior = it }
        return control
    }

    /** Most rows of a prefill's pass. */
    var chunk: Int
        get() = target.chunk
        set(rows) {
            target.chunk = rows
            drafts.values.forEach { it.chunk = rows }
        }

    val kvBytes: Long get() = target.kvBytes + drafts.values.sumOf { it.kvBytes }

    private fun openDraft(name: String): Slot = drafts.getOrPut(name) { openSlot(draft(name)).also { it.chunk = target.chunk } }

    override fun close() {
        drafts.values.forEach { it.close() }
        target.close()
    }

    /**
     * Where control starts from: what the export measured, corrected by a few passes here and now.  Seeded sampling is
     * decided by the export's numbers alone.
     */
    private fun costs(choice: MethodChoice, drafter: Drafter): CostModel {
        val part = choice.part
        val cost = if (drafter.cheap) verifyCosts(0.0) else verifyCosts(part.draftCost, part.firstCost)
        fun timed(name: String, step: () -> Unit) = measured(name, listOf(1)) { step() }.getValue(1)
        val step = drafter.stepOnce?.let { timed(choice.name, it) } ?: return cost
        val first = drafter.firstOnce?.let { timed("${choice.name}, first", it) }
        first?.let { cost.observeDraft(2, it + step, ENOUGH) }
        cost.observeDraft(1, first ?: step, ENOUGH)
        return cost
    }

    private fun verifyCosts(draftCost: Double?, firstCost: Double? = null): CostModel {
        val cost = CostModel(bundle.manifest.verifyMs, draftCost, firstCost)
        val found = measured("verify", VERIFY_SIZES) { rows -> target.forward(IntArray(rows)) }
        for ((rows, ms) in found) cost.observeVerify(rows, ms, ENOUGH)
        return cost
    }

    /** Times by size, measured once for all lanes of an engine. */
    private fun measured(name: String, sizes: List<Int>, run: (Int) -> Unit): Map<Int, Double> =
        times.getOrPut(name) { measure(sizes, 3, run) }
}

/** Hands every request the idle lane that already holds most of its prompt.  Used on the decode thread alone. */
class LanePool(private val make: () -> Lane) {
    private val idle = ArrayList<Lane>()
    private val busy = ArrayList<Lane>()

    fun take(prompt: Tokens): Lane {
        val best = idle.maxByOrNull { it.target.tokens.commonPrefix(prompt) }
        if (best != null) idle.remove(best)
        return (best ?: make()).also { busy.add(it) }
    }

    fun giveBack(lane: Lane) {
        if (!busy.remove(lane)) return
        idle.add(lane)
        while (idle.size > MOST_IDLE) idle.removeAt(0).close()
    }

    val inUse: Int get() = busy.size
    val kvBytes: Long get() = (idle + busy).sumOf { it.kvBytes }

    /** Bytes of KV of lanes that are in use, and of idle ones but the largest, which the next request may take. */
    fun held(): Pair<Long, Long> = busy.sumOf { it.kvBytes } to idle.map { it.kvBytes }.sorted().dropLast(1).sum()

    /** Close the idle lanes but the latest [kept]. */
    fun clear(kept: Int = 0) {
        while (idle.size > kept) idle.removeAt(0).close()
    }
}
