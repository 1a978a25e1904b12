package dev.edgespec.engine

import dev.edgespec.control.*
import dev.edgespec.decoding.*
import dev.edgespec.drafters.*
import dev.edgespec.formulas.*
import dev.edgespec.runtimes.*
import java.io.File

private const val FEW = 16 // tokens: a text of fewer is read again as fast as it is found
private const val WORTH = 4 // tokens that are worth copying
private const val MOST_DRAFTERS = 32 // by method and options, kept with what they learned

private class Latest<K> : LinkedHashMap<K, Drafter>(16, 0.75f, true) {
    override fun removeEldestEntry(eldest: MutableMap.MutableEntry<K, Drafter>?): Boolean = size > MOST_DRAFTERS
}

/**
 * A target slot, the draft's slot if one is needed, and a drafter per method.  Drafters and their adaptive control stay
 * from request to request: what a method learned about its acceptance and its cost is worth keeping.
 */
class Lane internal constructor(
    private val bundle: Bundle, model: Model, private val draft: (String) -> Model, context: Int,
    private val times: MutableMap<String, Map<Int, Double>>, store: NGramStore?, cache: File?, private val encoding: Encoding? = null,
) : AutoCloseable {
    private var source: Source? = null
    val target: Slot = openSlot(model, context).also { encoding?.attend("target", it, null) }
    var asked = 0 // tokens of the last prompt, up to the end of its last turn
    var shared = 0 // tokens shared with the beginning of another lane's text
    private val slots = linkedMapOf("target" to target) // open ones, by the names of their models
    private val parts = Parts(bundle.manifest, target, ::openDraft, { verifyCosts(null) }, store, cache)
    private val inner = Latest<Pair<String, DraftOptions>>()
    private val made = Latest<List<Any?>>() // whole drafters, by their method and options
    private val inherited = HashMap<List<Any?>, Any>() // initial state of drafters that are not made yet
    private var own: Pair<List<Any?>, Drafter>? = null

    /** Let all slots attend over a source from now on; null = over nothing in particular, and no text is held. */
    fun attend(source: Source?) {
        this.source = source
        for ((name, slot) in slots) encoding?.attend(name, slot, source)
    }

    fun drafter(choice: MethodChoice, asked: Settings): Drafter {
        asked.proposer?.let { return own(it, asked) }
        val options = asked.drafts
        fun loaded(choice: MethodChoice) = controlled(choice, bare(choice, options), asked)
        if (choice.proposers.isNotEmpty()) {
            val names = choice.proposers.map { it.name }
            return kept(listOf("chain", options.copy(proposers = names), asked.gamma, asked.adaptive, asked.fallback)) {
                Chain(choice.proposers.map { if (asked.adaptive) loaded(it) else bare(it, options) })
            }
        }
        if (choice.candidates.isNotEmpty() && asked.adaptive) {
            val promises = choice.candidates.map { it.name to it.promise }
            return kept(listOf("auto", promises, options, asked.gamma, asked.fallback)) {
                verifyCosts(null) // the passes that this times must come before the prompt is read
                Auto(choice.candidates.map { Candidate(it.name, it.promise, { loaded(it) }, it.name == "ngram") }, asked.fallback)
            }
        }
        if (choice.name == "ar" || !asked.adaptive) return bare(choice, options)
        return kept(listOf(choice.name, options, asked.gamma ?: choice.gamma, asked.fallback)) { loaded(choice) }
    }

    private fun kept(key: List<Any?>, make: () -> Drafter): Drafter =
        made.getOrPut(key) { make().also { drafter -> inherited.remove(key)?.let { drafter.goOnFrom(it) } } }

    fun goOnFrom(other: Lane) {
        inherited.putAll(other.inherited)
        for ((key, drafter) in other.made) drafter.learned()?.let { inherited[key] = it }
    }

    private fun own(proposer: Proposer, asked: Settings): Drafter {
        val key = listOf(System.identityHashCode(proposer), asked.gamma, asked.adaptive, asked.fallback)
        own?.let { (known, drafter) -> if (known == key) return drafter }
        val custom = UserDrafter(proposer, target.vocabSize)
        return (if (asked.adaptive) controlled(ownChoice(custom.name), custom, asked) else custom).also { own = key to it }
    }

    private fun bare(choice: MethodChoice, options: DraftOptions): Drafter {
        val shape = options.copy(proposers = emptyList())
        return inner.getOrPut(choice.name to shape) { build(choice.name, parts, choice.part, shape) }
    }

    private fun controlled(choice: MethodChoice, drafter: Drafter, asked: Settings) = Adaptive(
        drafter, costs(choice, drafter), asked.gamma ?: choice.gamma, asked.fallback, choice.part.acceptance?.firstOrNull() ?: PRIOR,
    )

    var chunk: Int
        get() = target.chunk
        set(rows) = slots.values.forEach { it.chunk = rows }

    val kvBytes: Long get() = slots.values.sumOf { it.kvBytes }

    /** Let all slots hold this many tokens of arbitrary keys and values. */
    internal fun standIn(tokens: Int) = slots.values.forEach { it.standIn(minOf(tokens, it.context - 2)) }

    /** Is called with the slot of the draft model, at once or when a method asks for it. */
    var onDraft: ((Slot) -> Unit)? = null
        set(use) {
            field = use
            slots["draft"]?.let { use?.invoke(it) }
        }

    private fun openDraft(name: String): Slot = slots.getOrPut(name) {
        openSlot(draft(name)).also {
            it.chunk = target.chunk
            encoding?.attend(name, it, source)
            if (name == "draft") onDraft?.invoke(it)
        }
    }

    override fun close() = slots.values.forEach { it.close() }

    /** Where control starts from: what the export measured, corrected here unless sampling is seeded. */
    private fun costs(choice: MethodChoice, drafter: Drafter): CostModel {
        val part = choice.part
        val cost = if (drafter.cheap) verifyCosts(0.0) else verifyCosts(part.draftCost, part.firstCost)
        fun timed(name: String, first: Boolean) = drafter.dryStep(first)?.let { run -> measured(name, listOf(1)) { run() }.getValue(1) }
        val step = timed(choice.name, false) ?: return cost
        val first = timed("${choice.name}, first", true)
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

    private fun measured(name: String, sizes: List<Int>, run: (Int) -> Unit): Map<Int, Double> =
        times.getOrPut(name) { measure(sizes, 3, run) }
}

private class Found(val lane: Lane, prompt: Tokens) {
    val common = lane.target.tokens.commonPrefix(prompt) // common prefix with its text
    val lent = minOf(common, maxOf(prompt.size - 1, 0)) // reusable tokens: the prompt's last one is read in any case
    val reused = lane.target.cropped(lent) // tokens that need not be read again, fewer where states go back to a checkpoint

    /** Whether it continues the whole conversation; the last answer may be left out, and the question end in other tokens. */
    val goesOn = lane.target.tokens.size - common <= FEW || common > maxOf(FEW, lane.asked - 2)
}

/** Hands every request a lane, its conversation's or an abandoned one; only for the decode thread. */
class LanePool(private val make: () -> Lane) {
    private val idle = ArrayList<Lane>() // the one that was used last is last
    private val busy = ArrayList<Lane>()

    /**
     * The idle lane whose text the prompt continues; else a new one, where there is [room], else the one not used for
     * longest.  Of idle lanes as many are freed as hold more than [spare] bytes of KV; null = any number may stay.
     */
    fun take(prompt: Tokens, room: Boolean = true, spare: Long? = null): Lane {
        val found = next(prompt, room)
        idle.remove(found)
        while (spare != null && idle.isNotEmpty() && idle.sumOf { it.kvBytes } > spare) idle.removeAt(0).close()
        val lane = found ?: make().also { lane -> idle.lastOrNull()?.let(lane::goOnFrom) }
        lane.asked = prompt.size
        val own = Found(lane, prompt).reused
        val lenders = idle.map { Found(it, prompt) }
        val nearest = lenders.maxByOrNull { it.reused }
        lane.shared = lenders.maxOfOrNull { it.common } ?: 0
        if (nearest != null && nearest.reused >= own + WORTH) lane.target.beginLike(nearest.lane.target, nearest.lent)
        return lane.also { busy.add(it) }
    }

    /** An idle lane for a caller that keeps its text, or a new one. */
    fun any(): Lane = (idle.removeLastOrNull() ?: make()).also { busy.add(it) }

    private fun next(prompt: Tokens, room: Boolean): Lane? {
        val found = idle.map { Found(it, prompt) }
        val goingOn = found.filter { it.goesOn }.maxByOrNull { it.reused }
        return goingOn?.lane ?: if (room && idle.size < MOST_IDLE) null else idle.firstOrNull()
    }

    fun giveBack(lane: Lane) {
        if (!busy.remove(lane)) return
        idle.add(lane)
        while (idle.size > MOST_IDLE) idle.removeAt(0).close()
    }

    /** End a lane in use whose text has no owner. */
    fun drop(lane: Lane) {
        busy.remove(lane)
        lane.close()
    }

    val inUse: Int get() = busy.size
    val kvBytes: Long get() = (idle + busy).sumOf { it.kvBytes }

    /** Bytes of KV of lanes that are in use, and of idle ones but the one that [take] would give. */
    fun held(prompt: Tokens): Pair<Long, Long> {
        val taken = next(prompt, room = true)
        return busy.sumOf { it.kvBytes } to idle.filter { it !== taken }.sumOf { it.kvBytes }
    }

    fun clear(kept: Int = 0) {
        while (idle.size > kept) idle.removeAt(0).close()
    }
}
