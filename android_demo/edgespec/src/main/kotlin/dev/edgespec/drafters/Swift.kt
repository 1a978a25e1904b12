package dev.edgespec.drafters

import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.formulas.CostModel
import dev.edgespec.runtimes.*
import java.util.Locale

/**
 * Draws chains from the target itself with sub-layers left out (arXiv 2309.08168) or read by their high planes; under control, stops
 * after a guess that makes a further one not worth it.
 */
open class SelfSpec(
    protected val target: Slot, protected var skip: SkipSet, private val known: Confidence = Confidence(),
    private val gammaMax: Int = 12,
) : Drawer() {
    override val name = "self-spec"
    override val stops = true
    override var leastGain: ((Int) -> Double)? = null
    private var confidence = known.copy()
    private val sure = ArrayList<Double>() // draft probabilities of the last guesses

    /** Learned values are carried across requests, unless that would make a seeded text depend on earlier ones. */
    override fun begin(request: DraftRequest): Int? {
        super.begin(request)
        leastGain = null // an earlier request's value applies only to its lengths
        if (params.seededRejection) confidence = known.copy()
        return null
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal =
        draw(drawing(tokens, minOf(budget, gammaMax), target.vocabSize), steps(tokens))

    protected open fun draw(drawing: Drawing, step: (Int?) -> FloatArray): Proposal = drawing.chain(step, weak())

    /** The check, after each draft token, that the next one is not worth its cost; null = no required gain. */
    protected fun weak(): Weak? {
        sure.clear()
        val least = leastGain ?: return null
        var reach = 1.0
        return { probability ->
            sure.add(probability)
            reach *= confidence.chance(probability)
            reach * confidence.mean < least(sure.size)
        }
    }

    /** Runs draft steps in order: a draft token (null at first) -> logits [vocab] after it. */
    private fun steps(tokens: Tokens): (Int?) -> FloatArray {
        var offset = 0
        return label@{ guess ->
            val logits = target.forwardSkipped(intArrayOf(guess ?: tokens.at(-1)), offset, skip).logits
            offset++
            val row = logits.row(logits.rows - 1)
            // what changes logits may name any token
            if (logits.columns == target.vocabSize || params.plainGreedy) return@label row
            row.copyOf(target.vocabSize).also { it.fill(Float.NEGATIVE_INFINITY, logits.columns) }
        }
    }

    override fun dryStep(first: Boolean) = { target.forwardSkipped(intArrayOf(0), 0, skip) }.takeUnless { first }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val tested = minOf(proposal.tested(verdict.path), sure.size)
        for (depth in 0 until tested) confidence.learn(sure[depth], depth < verdict.path.size)
    }
}

private const val ROWS = 16 // of one scoring pass
private const val DEPTH = 4 // of its chains
private const val FRESH = 8 // tokens to be written before the next pass
private const val SAVE_EVERY = 16 // scored windows
private const val HIGH_SAVES = 4 / 8.5 // of the bytes of int8 weights, with their scales

/** Cost of a draft step over a plain one, by its skip set: savings of sub-layers that are skipped, or read only by the high planes. */
class StepCost(val attention: Double, val mlp: Double, private val high: Triple<Double, Double, Double> = Triple(0.0, 0.0, 0.0)) {
    private var extra = 0.0 // what steps took beyond that on this machine; learned

    fun copy() = StepCost(attention, mlp, high)

    operator fun invoke(skip: SkipSet): Double {
        val saved = skip.attention.size * attention + skip.mlp.size * mlp
        val planes = skip.highAttention.size * high.first + skip.highMlp.size * high.second + if (skip.highHead) high.third else 0.0
        return maxOf(1 - saved - planes + extra, 0.02)
    }

    /** A step with [skip] took [cost]; one that the system interrupted must not count for much. */
    fun observe(skip: SkipSet, cost: Double) {
        extra += 0.1 * (cost - this(skip)).coerceIn(-0.2, 0.2)
    }
}

/**
 * Samples chains with siblings from the target itself with the best known skip set, and searches a better one as it runs: SWIFT (arXiv
 * 2410.06916).  A seeded text of rejection sampling is drafted with the set that the search starts from.
 */
class Swift(
    target: Slot, private val search: OnlineSearch, private val stepCost: StepCost,
    private val costs: CostModel, private val share: Double = 0.02, private val branch: List<Int>? = null,
    private val store: SkipStore? = null,
) : SelfSpec(target, search.also { store?.load(it) }.best) {
    override val name = "swift"
    private var decodedMs = 0.0 // time of all rounds that the search has seen
    private var searchMs = 0.0 // time that the search took
    private var changes = 0 // of the set in use
    private var reproducible = false
    private var unitMs = 0.0 // time of a one-row pass
    private val recent = ArrayDeque<Double>() // times of the last scoring passes
    private var prompt = 0
    private var scoredAt = 0
    private var unsaved = 0
    private val given = stepCost.copy()
    private var policy = SiblingPolicy(listOf(1))

    override fun begin(request: DraftRequest): Int? {
        super.begin(request)
        reproducible = params.seededRejection
        use(if (reproducible) search.initial else search.best)
        if (branch != null) policy = siblings(branch)
        prompt = request.tokens.size
        scoredAt = 0
        if (store == null || reproducible) return null
        if (unsaved > 0) save() else if (store.load(search)) use(search.best)
        return null
    }

    /** Siblings where a row is worth what it takes: at the speed of this round, and never less than plain decoding's. */
    private fun siblings(branch: List<Int>): SiblingPolicy {
        val verify = if (reproducible) costs.given() else costs
        val step = if (reproducible) given else stepCost
        val price = { depth: Int, expected: Double, rows: Int ->
            val rate = expected / (depth * step(skip) + verify.v(depth + 1))
            maxOf(rate, 1.0) * (verify.v(rows + 1) - verify.v(rows))
        }
        return SiblingPolicy(branch, price, (2 until 14).minOf { verify.v(it + 1) - verify.v(it) })
    }

    override fun draw(drawing: Drawing, step: (Int?) -> FloatArray): Proposal = drawing.siblings(step, weak(), policy, bucket)

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        if (proposal.parents == null) return super.observe(proposal, verdict, output)
        val chain = proposal.parents.max() + 2 // its nodes come first
        val accepted = verdict.path.count { it < chain }
        super.observe(Proposal(proposal.tokens.copyOf(chain)), Verdict(IntArray(accepted) { it }, verdict.nextToken), output)
    }

    private val bucket: Int get() = if (reproducible) 0 else changes

    override fun forecast(budget: Int) = Forecast(bucket)

    private fun use(found: SkipSet) {
        if (found != skip) {
            skip = found
            changes++
        }
    }

    override fun timed(proposal: Proposal, time: RoundTime) {
        if (reproducible) return
        if (proposal.size > 0 && unitMs > 0) stepCost.observe(skip, time.draftMs / proposal.deepest / unitMs)
        unitMs += (time.verifyMs / costs.v(time.rows) - unitMs) * if (unitMs > 0) 0.1 else 1.0
        decodedMs += time.draftMs + time.verifyMs
        if (search.stopped.isNotEmpty() || !mayScore()) return
        val start = System.nanoTime()
        score()
        val taken = (System.nanoTime() - start) / 1e6
        searchMs += taken
        recent.addLast(taken)
        if (recent.size > 4) recent.removeFirst()
    }

    private fun mayScore(): Boolean {
        val held = target.tokens.size
        if (held - ROWS < prompt || held - scoredAt < FRESH || held + ROWS + 1 > target.capacity) return false
        val expected = 1.5 * (recent.maxOrNull() ?: (2 * unitMs * costs.v(ROWS)))
        return searchMs + expected <= share * decodedMs
    }

    private fun score() {
        val asked = search.ask()
        scoredAt = target.tokens.size
        val matched = try {
            matches(target, asked)
        } catch (error: EdgespecError) { // coded keys of which too few are exact, or no room
            search.stopped = "sets cannot be scored here: ${error.message}"
            return
        }
        unsaved++
        if (search.tell(asked, matched, ROWS)) {
            use(search.best)
            save()
        } else if (unsaved >= SAVE_EVERY || search.stopped.isNotEmpty()) {
            save()
        }
    }

    private fun save() {
        unsaved = 0
        store?.save(search)
    }

    override val reason: String
        get() {
            var words = "leaves out ${skip.attention.size} attentions and ${skip.mlp.size} MLPs"
            if (search.planes) words += ", reads high planes of ${skip.highAttention.size} attentions and ${skip.highMlp.size} MLPs"
            if (reproducible) {
                words += ": the set to start from, because the text is seeded"
            } else if (skip in search.records) {
                words += ", predicted %.2fx at matchness %.2f".format(Locale.ROOT, search.speed(skip), search.acceptance(skip))
            }
            val spent = if (decodedMs > 0) 100 * searchMs / decodedMs else 0.0
            words += "; %d sets tried in %.0f ms (%.1f%% of decoding)".format(Locale.ROOT, search.candidates, searchMs, spent)
            return listOf(words, search.stopped, store?.note ?: "").filter { it.isNotEmpty() }.joinToString("; ")
        }
}

/** How many of the slot's last ROWS tokens a draft without [skip] would have guessed, in chains of DEPTH rows. */
internal fun matches(target: Slot, skip: SkipSet): Int {
    val held = target.tokens.size
    val ids = target.tokens.slice(held - ROWS - 1)
    val first = held - ROWS - 1
    val visible = IntArray(ROWS) { first + it - it % DEPTH }
    val parents = IntArray(ROWS) { if (it % DEPTH > 0) it - 1 else -1 }
    val logits = target.forwardHypotheses(ids.copyOf(ROWS), visible, parents, skip).logits
    return (0 until ROWS).count { argmax(logits.row(it)) == ids[it + 1] }
}

internal fun buildSwift(parts: Parts, part: MethodPart, options: DraftOptions): Swift {
    if (options.search !in 0.0..1.0) {
        throw InvalidRequest("search ${options.search}: expected a share of the decoding time, 0 to 1", "0.02 is 2 %")
    }
    val target = parts.target
    val given = part.skip ?: SkipSet()
    fun inner(layers: List<Int>) = layers.filter { it in 1 until target.layers - 1 }
    val stepCost = stepCost(parts.manifest)
    val costs = parts.costs()
    val planes = target.model.part.planes && !target.model.part.highAlone && target.model.native
    val inner = given.copy(attention = inner(given.attention), mlp = inner(given.mlp))
    val first = when {
        planes -> inner
        given.size > 0 -> SkipSet(inner.attention, inner.mlp)
        else -> (1 until target.layers - 1 step 2).toList().let { SkipSet(it, it) }
    }
    val search = OnlineSearch(target.layers, first, stepCost::invoke, costs::v)
    val identity = parts.manifest.files[parts.manifest.target.weights]?.sha256?.take(24) ?: "unknown"
    val store = parts.cache?.let { SkipStore(it.resolve("swift"), identity, target.model.graph.operators, options.kind) }
    return Swift(target, search, stepCost, costs, options.search, options.branch, store)
}

/** Savings of sub-layers as the export measured them, else estimated from their weights. */
private fun stepCost(manifest: Manifest): StepCost {
    val (plain, attention, mlp) = listOf("plain_ms", "attention_ms", "mlp_ms").map { manifest.costNumber(it) ?: 0.0 }
    if (plain > 0 && attention + mlp > 0) {
        val high = listOf("high_attention_ms", "high_mlp_ms", "high_head_ms").map { (manifest.costNumber(it) ?: 0.0) / plain }
        return StepCost(attention / plain, mlp / plain, Triple(high[0], high[1], high[2]))
    }
    val facts = manifest.target.facts
    val ofAttention = facts.hidden.toDouble() * facts.headDim * 2 * (facts.heads + facts.kvHeads)
    val ofMlp = 3.0 * facts.hidden * facts.intermediate
    val head = facts.hidden.toDouble() * facts.vocab
    val total = facts.layers * (ofAttention + ofMlp) + head
    val half = if (manifest.target.planes) HIGH_SAVES / total else 0.0
    return StepCost(ofAttention / total, ofMlp / total, Triple(half * ofAttention, half * ofMlp, half * head))
}
