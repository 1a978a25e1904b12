package dev.edgespec.drafters

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.DraftOptions
import dev.edgespec.decoding.Drafter
import dev.edgespec.decoding.SkipSet
import dev.edgespec.formulas.CostModel
import dev.edgespec.formulas.bestTree
import dev.edgespec.formulas.chainOf
import dev.edgespec.formulas.grow
import dev.edgespec.runtimes.Manifest
import dev.edgespec.runtimes.MethodPart
import dev.edgespec.runtimes.Slot

/** What a bundle offers to the drafters of one lane; [draft] opens the lane's draft or drafter at the first call. */
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
    "ar" -> Plain()
    "ngram" -> NGram(store = parts.store)
    "speculative" -> DraftModel(parts.draft("draft"), parts.target.vocabSize, options.branch)
    "self-spec" -> SelfSpec(parts.target, part.skip ?: SkipSet())
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
    "eagle", "mtp", "dflash" -> DraftDecoder(parts.target, parts.draft("drafter"), method, options.branch)
    else -> throw InvalidRequest("method '$method' is not one of this runtime", "update the app")
}
