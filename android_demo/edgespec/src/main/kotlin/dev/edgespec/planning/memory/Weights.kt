package dev.edgespec.planning.memory

import dev.edgespec.runtimes.*

/* Bytes of weights as stock operators keep them: by the size of a weight file and the model's facts. */

/** Bytes of a matrix [n, k] in a weight file. */
private fun matrixBytes(form: String, n: Int, k: Int): Long {
    val spec = SPECS.getValue(form)
    val padded = if (spec.family == "blocks") up(k, BLOCK) else k
    return (n.toLong() * padded * (spec.level + spec.scale)).toLong() + if (spec.family == "channels") 4L * n else 0
}

/**
 * Private bytes of a model's weights with stock operators: all matrices are packed when a session is made, whether a method
 * needs them or not.  What native operators multiply by stays in the file, mapped.
 */
internal fun packedBytes(part: ModelPart, files: Map<String, FileEntry>): Long {
    val facts = part.facts
    val form = part.format
    val head = part.headFormat ?: form
    val inBlocks = SPECS.getValue(form).family == "blocks"
    val blocks = inBlocks && facts.hidden % BLOCK == 0
    val tied = facts.tied && (blocks || !inBlocks)
    val own = matrixBytes(head, facts.vocab, facts.hidden)
    val cut = part.headVocab?.let { matrixBytes(head, it.size, facts.hidden) } ?: 0
    // a draft with a cut LM head multiplies by that one alone, and only looks its embedding up; a drafter has none
    val row = if (tied) own / facts.vocab else rowBytes(part, blocks)
    val table = if (part.decoder != null || tied && !part.cut) 0 else row * facts.vocab
    val position = if (part.origin == "edgespec") 4L * (if (facts.angles.isEmpty()) facts.hidden else facts.angles.sum()) else 0
    val angles = (facts.context + part.headroom) * position
    val layerRow = if (facts.layerEmbedding > 0) facts.layers.toLong() * (if (form == "fp32") 4 * facts.layerEmbedding else facts.layerEmbedding + 4) else 0
    val heads = part.heads.sumOf { groupBytes(part, it) }
    val lmHead = if (part.cut) cut else own
    val beside = if (part.cut) 0 else cut
    val size = files[part.weights]?.size ?: 0
    val matrices = maxOf(0, size - angles - table - lmHead - beside - heads - layerRow * facts.vocab)
    return listOf(form to matrices + heads, head to lmHead + beside).sumOf { (kind, bytes) ->
        val spec = SPECS.getValue(kind)
        (bytes / (spec.level + spec.scale) * spec.packed).toLong()
    }
}

/** Of a token's row in an embedding that is only looked up. */
private fun rowBytes(part: ModelPart, blocks: Boolean): Long {
    val hidden = part.facts.hidden
    return if (part.format == "fp32") 4L * hidden else if (blocks) matrixBytes(part.embeddingFormat ?: part.format, 16, hidden) / 16 else hidden + 4L
}

/** Bytes of the matrices of a group of heads, without the LM head that they may share. */
private fun groupBytes(part: ModelPart, group: HeadGroup): Long {
    val hidden = part.facts.hidden
    val shapes = when (group.kind) {
        "medusa" -> listOf(group.count * hidden to hidden)
        "blockwise" -> listOf(group.inner to hidden, group.count * hidden to group.inner)
        else -> listOf(hidden to hidden)
    }
    val own = if (group.own) group.count * matrixBytes(part.headFormat ?: part.format, part.facts.vocab, hidden) else 0
    return own + shapes.sumOf { (n, k) -> matrixBytes(part.format, n, k) }
}
