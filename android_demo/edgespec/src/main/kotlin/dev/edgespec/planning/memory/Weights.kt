package dev.edgespec.planning.memory

import dev.edgespec.runtimes.FileEntry
import dev.edgespec.runtimes.HeadGroup
import dev.edgespec.runtimes.ModelPart
import dev.edgespec.runtimes.up

/* Bytes of weights as stock operators keep them: by the size of a weight file and the model's facts. */

private const val BLOCK = 32
private val BLOCKS = setOf("int4", "int4-64", "int8")

/** Bytes of a weight: its level, its scale, and all as ONNX Runtime packs it. */
private class Stored(val level: Double, val scale: Double, val packed: Double)

private val STOCK = mapOf(
    "int4" to Stored(0.5, 0.125, 0.75), "int4-64" to Stored(0.5, 0.125, 0.75), "int8" to Stored(1.0, 0.125, 1.25), "w8a8" to Stored(1.0, 0.0, 1.0),
    "fp32" to Stored(4.0, 0.0, 4.0),
)

/** Bytes of a matrix [n, k] in a weight file. */
private fun matrixBytes(form: String, n: Int, k: Int): Long {
    val padded = if (form in BLOCKS) up(k, BLOCK) else k
    val stored = STOCK.getValue(form)
    return (n.toLong() * padded * (stored.level + stored.scale)).toLong() + if (form == "w8a8") 4L * n else 0
}

/**
 * Private bytes of a model's weights with stock operators: all matrices are packed when a session is made, whether a method
 * needs them or not.  What native operators multiply by stays in the file, mapped.
 */
internal fun packedBytes(part: ModelPart, files: Map<String, FileEntry>): Long {
    val facts = part.facts
    val form = part.format
    val head = part.headFormat ?: form
    val blocks = form in BLOCKS && facts.hidden % BLOCK == 0
    val tied = facts.tied && (blocks || form == "fp32" || form == "w8a8")
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
        val stored = STOCK.getValue(kind)
        (bytes / (stored.level + stored.scale) * stored.packed).toLong()
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
