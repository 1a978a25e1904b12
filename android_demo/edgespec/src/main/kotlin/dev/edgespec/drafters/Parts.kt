package dev.edgespec.drafters

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import dev.edgespec.formulas.*
import dev.edgespec.runtimes.*
import kotlin.math.abs

/** Parts of a bundle that drafters of one lane are built from; [draft] opens the lane's draft or drafter at the first call. */
class Parts(
    val manifest: Manifest,
    val target: Slot,
    val draft: (String) -> Slot,
    val costs: () -> CostModel,
    val store: NGramStore? = null,
    val cache: java.io.File? = null, // where skip sets that swift finds are kept; null = nowhere
)

/** The drafter of a method of the bundle; [part] is the method's entry in the manifest. */
fun build(method: String, parts: Parts, part: MethodPart, options: DraftOptions): Drafter = when (method) {
    in DRAFTERS -> {
        val slot = parts.draft("drafter")
        val block = slot.model.part.decoder?.block
        if (block != null) BlockDecoder(parts.target, slot, method, options.branch, block)
        else DraftDecoder(parts.target, slot, method, options.branch)
    }
    "ar" -> Plain()
    "ngram" -> NGram(store = parts.store)
    "speculative" -> DraftModel(parts.draft("draft"), parts.target.vocabSize, options.branch)
    "self-spec" -> SelfSpec(parts.target, part.skip ?: SkipSet(), Confidence(part.confidence, part.acceptance?.firstOrNull()))
    "swift" -> buildSwift(parts, part, options)
    "medusa" -> {
        val most = options.nodes
        val paths = if (most != null) {
            grow(part.ranks, most).map { it.first }
        } else {
            bestTree(part.ranks, parts.costs()::v, part.draftCost ?: 0.0, MEDUSA_NODES)
        }
        Medusa(parts.target, part.heads[0], paths.ifEmpty { chainOf(part.ranks.size, 1) })
    }
    "blockwise" -> {
        val group = parts.manifest.target.heads.first { it.name == part.heads[0] }
        Blockwise(parts.target, group.name, group.count, options.cycles ?: 0)
    }
    "paradecode" -> {
        val exits = part.heads.map { name -> parts.manifest.target.heads.first { it.name == name }.layer }.sorted()
        ParaDecode(parts.target, exits, options.threshold ?: part.threshold ?: PARADECODE_THRESHOLD)
    }
    else -> throw InvalidRequest("method '$method' is not one of this runtime", "update the app")
}

class Plain : Drafter {
    override val name = "ar"
    override val cheap = true

    override fun propose(tokens: Tokens, budget: Int): Proposal = Proposal.EMPTY
}

/** A caller's own proposer: any object that can propose the next tokens ([dev.edgespec.decoding.Settings.proposer]). */
fun interface Proposer {
    /**
     * Draft what follows [tokens], a copy of prompt and text so far; at most [budget] draft tokens count.  Null or empty to pass.  A
     * proposal with probs keeps the model's distribution only if its tokens were sampled from them.
     */
    fun propose(tokens: IntArray, budget: Int): Proposal?

    val name: String get() = javaClass.simpleName.ifEmpty { "proposer" }
    val cheap: Boolean get() = true // false if it is expensive, so that it is asked only where its guesses help

    fun bind(params: SamplingParams, noise: Noise) = Unit
    fun begin(tokens: IntArray) = Unit
    fun observe(proposal: Proposal, verdict: Verdict, output: Pass) = Unit
}

/** A drafter around a caller's proposer.  Its output is checked: an invalid one ends the proposer, not the text. */
class UserDrafter(private val own: Proposer, private val vocab: Int) : Drafter {
    override val name: String = own.name
    override val cheap: Boolean = own.cheap

    override fun begin(request: DraftRequest): Int? {
        own.bind(request.params, request.noise)
        own.begin(request.tokens.toIntArray())
        return null
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val found = own.propose(tokens.toIntArray(), budget)?.copy(headStart = null) ?: return Proposal.EMPTY
        return found.also { it.check(vocab) }.truncated(budget)
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) = own.observe(proposal, verdict, output)
}
