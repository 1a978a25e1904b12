package dev.edgespec.planning

import dev.edgespec.runtimes.*

/* Private bytes that a bundle takes while it runs, part by part; mapped files can be read again and do not count. */

private const val MIB = 1 shl 20
private const val MARGIN = 0.01 // of the bytes that were added up
private const val LEAST_MARGIN = 2L * MIB
private const val HUGE = 2L * MIB // a large array's pages, where the system gives it large ones

// measured on the Python side (docs/dev/planning.md): opening a tiny bundle, running it, a session by the size of its graph, a tokenizer
// by that of its file, and what is kept of a token
private const val LOADING = (1.4 * MIB).toLong()
private const val RUNNING = (1.9 * MIB).toLong()
private const val SESSION = (0.6 * MIB).toLong()
private const val STOCK_SESSION = (2.9 * MIB).toLong()
private const val TOKENIZER = 8.7
private const val TEXT = 100L
private const val NGRAM = 340L

/** A part of the memory, in private bytes; names are stable keys. */
data class MemoryPart(val name: String, val bytes: Long)

/**
 * The process: [process] bytes that are counted although they exist before a bundle is loaded; [zeroed]: whether memory is written when it
 * is allocated, as direct buffers are, so that all of it counts at once.
 */
class Host(private val zeroed: Boolean = true, val process: Long = 0) {
    /** Resident bytes of an array of [there] bytes, of which [used] were written, in [pieces] pieces. */
    internal fun touched(used: Long, there: Long, pieces: Int): Long =
        if (zeroed) there else if (there < 2 * HUGE) used else minOf(there, used + pieces * HUGE / 2)
}

fun memoryOf(manifest: Manifest, use: RunOptions, host: Host = Host()): List<MemoryPart> {
    val part = when (use.method) {
        "speculative" -> manifest.draft
        in DRAFTERS -> manifest.drafter
        else -> null
    }
    val checkpoints = use.checkpoints * checkpointBytesOf(manifest.target, use)
    val parts = listOf(
        MemoryPart("process", host.process), MemoryPart("libraries", LOADING), MemoryPart("runtime", RUNNING),
        MemoryPart("tokenizer", (TOKENIZER * (manifest.files["tokenizer.json"]?.size ?: 0)).toLong()),
    ) + model(manifest, manifest.target, use, "", host) + (part?.let { model(manifest, it, use, "draft ", host) } ?: emptyList()) +
        MemoryPart("checkpoints", checkpoints) + MemoryPart("text", use.context * (TEXT + if (use.method == "ngram") NGRAM else 0))
    val margin = maxOf(LEAST_MARGIN, (parts.sumOf { it.bytes } * MARGIN).toLong())
    return (parts + MemoryPart("margin", margin)).filter { it.bytes > 0 }
}

/** Weights, session, keys and values, and scratch space of the target ([lead] "") or the draft. */
private fun model(manifest: Manifest, part: ModelPart, use: RunOptions, lead: String, host: Host): List<MemoryPart> {
    val native = use.operators == "native" && "native" in part.graphs
    val draft = lead.isNotEmpty()
    val groups = if (draft) emptyList() else manifest.methods[use.method]?.heads ?: emptyList()
    val graph = part.graphs[if (native) "native" else part.main]?.let { manifest.files[it.file] }?.size ?: 0
    val rows = minOf(use.chunk, use.context)
    return listOf(
        MemoryPart("${lead}weights", if (native) 0 else packedBytes(part, manifest.files)),
        MemoryPart("${lead}session", if (native) SESSION + 2 * graph else STOCK_SESSION + (12.5 * graph).toLong()),
        MemoryPart("${lead}kv", kvBytes(part, use, native, draft, host)),
        MemoryPart("${lead}scratch", if (native) nativeScratch(part, use, rows, draft) else stockScratch(part, use, rows)),
        MemoryPart("${lead}logits", logitsBytes(part, use, native, draft) + headLogits(part, native, groups)),
    ) + sourceParts(manifest, part, use, lead) + if (native) towerParts(manifest, part, use, lead) else emptyList()
}

/** Memory for reading a source: its cross-attention cache and the last one's, and the encoder's session and pass. */
private fun sourceParts(manifest: Manifest, part: ModelPart, use: RunOptions, lead: String): List<MemoryPart> {
    val source = part.source ?: return emptyList()
    val rows = if (source.kind == "features") source.most else minOf(source.most, use.context)
    val kv = modelKv(part, use, lead.isNotEmpty())
    val memories = MemoryPart("${lead}memories", 2 * memoryFormat(kv).nbytes(part.facts, up(rows, KV_BLOCK)))
    val encoder = part.encoder ?: return listOf(memories)
    return listOf(
        memories, MemoryPart("${lead}encoder session", SESSION + 2 * graphBytes(manifest, encoder)),
        MemoryPart("${lead}encoder scratch", encoding(encoder, kv, use, rows)),
    )
}

/** Memory for reading pictures: vision encoder and projector, a pass over one piece, and rows of the largest picture. */
private fun towerParts(manifest: Manifest, part: ModelPart, use: RunOptions, lead: String): List<MemoryPart> {
    val (image, tower) = (part.image ?: return emptyList()) to part.tower!!
    val sides = listOf(tower) + part.projectors
    return listOf(
        MemoryPart("${lead}tower sessions", sides.sumOf { SESSION + 2 * graphBytes(manifest, it) }),
        MemoryPart("${lead}tower scratch", encoding(tower, encoderKeys(tower), use, tower.facts.context)),
        MemoryPart("${lead}images", 4L * image.most * part.facts.hidden),
    )
}

private fun graphBytes(manifest: Manifest, part: ModelPart): Long = manifest.files[part.graphs["native"]?.file]?.size ?: 0

/** Memory of an encoder's pass over [rows] rows, whose layers share the room of one. */
private fun encoding(encoder: ModelPart, kv: KvFormat, use: RunOptions, rows: Int): Long =
    nativeScratch(encoder, use.copy(context = rows), rows, false) +
        kv.nbytes(encoder.facts, up(rows, KV_BLOCK)) / encoder.facts.kvLayers + 8L * rows * encoder.facts.hidden

/* Bytes of running: keys and values, and the scratch space and outputs of the largest passes. */

private const val SPLIT = 4 * KV_BLOCK // tokens that attention processes in one piece (native/attention.cpp)
private const val TILE = 16
private const val ACT = 48L // bytes of 32 quantized activations (native/layout.h)
private const val QUERY = 48L // of attention's record of a query, without its numbers (native/kernels.h)
private const val DRAWN = 7 // rows of float64 that drawing a token takes for a moment
private const val PROBED = 5 // rows whose logits are compared to say whether rows are exact, and that control times

/** How a model's native cache is kept; a draft's as exactly as its weights allow. */
internal fun modelKv(part: ModelPart, use: RunOptions, draft: Boolean): KvFormat {
    val exact = exactAttention(part)
    return if (draft) ATTENTION.getValue(exact) else use.kv ?: ATTENTION.getValue(part.attention?.default ?: exact)
}

internal fun kvBytes(part: ModelPart, use: RunOptions, native: Boolean, draft: Boolean, host: Host): Long {
    val facts = part.facts
    val tokens = minOf(use.context, facts.context)
    val room = tokens + part.headroom
    if (native) {
        val kv = modelKv(part, use, draft)
        return host.touched(kv.nbytes(facts, tokens), kv.nbytes(facts, up(room, KV_BLOCK)), 1)
    }
    val row = facts.kvHeads * facts.headDim * 4L
    return 2L * facts.layers * host.touched(row * tokens, row * up(room, ROUND_CAPACITY), facts.kvHeads)
}

/** Memory of a checkpoint of the target's states; 0 = none are taken, because the model has no states, or keys have codes. */
internal fun checkpointBytesOf(part: ModelPart, use: RunOptions): Long =
    if (modelKv(part, use, false).ring > 0) 0 else checkpointBytes(part.facts)

/** Memory of the largest pass of native operators (native/pass.h, Scratch): the prefill's. */
internal fun nativeScratch(part: ModelPart, use: RunOptions, rows: Int, draft: Boolean): Long {
    val facts = part.facts
    val tokens = minOf(use.context, facts.context)
    val attended = facts.heads * facts.dims.max()
    val dim = paddedDim(facts)
    var floats = facts.hidden.toLong() + attended + if (part.format == "w8a8") facts.intermediate else 0
    val heads = facts.delta
    if (heads != null) { // inputs and outputs of the rule, and the output of its convolution, also of the last pass
        val inner = maxOf(heads.values * heads.valueDim, attended)
        floats += heads.mixed + 2L * inner + 2 * heads.values + 2 * stateWidth(facts)
    } else if (facts.convolutions.isNotEmpty()) {
        floats += 4L * facts.hidden
    }
    if (facts.layerEmbedding > 0) floats += facts.hidden + 2L * facts.layerEmbedding
    facts.experts?.let { // rows among those sent to experts: inputs, intermediate values and outputs
        floats += it.chosen * (facts.hidden + it.inner).toLong() + it.count
        floats += it.chosen * (actBytes(part, facts.hidden) + actBytes(part, it.inner)) / 4
    }
    val acts = listOf(facts.hidden, attended, facts.intermediate).sumOf { actBytes(part, it) }
    val coded = modelKv(part, use, draft).keys in listOf("nomad1", "nomad2")
    val query = facts.heads * (QUERY + dim * (4L + 1 + if (coded) 16 else 0))
    val partial = facts.heads * (up(tokens, SPLIT) / SPLIT) * (dim + TILE) * 4L
    return rows * (4 * floats + acts + query + partial)
}

/** Memory of a row of activations, in the form that matrices multiply. */
private fun actBytes(part: ModelPart, width: Int): Long = if (part.format == "fp32") 4L * width else up(width, 64) / 64 * 2 * ACT

/** Memory of the largest pass of stock operators, in ONNX Runtime's arena: the activations of a layer, and scores of wide heads. */
internal fun stockScratch(part: ModelPart, use: RunOptions, rows: Int): Long {
    val facts = part.facts
    val attended = (facts.heads + 2L * facts.kvHeads) * facts.headDim
    val whole = part.graphs.values.any { it.leastLength > 0 }
    val scores = if (whole) facts.heads.toLong() * minOf(use.context, facts.context) else 0
    val activations = 4 * facts.hidden + 3 * attended + 3 * facts.intermediate
    return 4 * (rows + 1) * (activations + scores) // and the dummy row of a gated graph
}

/** Memory of rows of logits that leave the LM head, and of sampling from the target's. */
internal fun logitsBytes(part: ModelPart, use: RunOptions, native: Boolean, draft: Boolean): Long {
    val columns = part.headVocab?.size?.takeIf { part.cut } ?: part.facts.vocab
    val drafts = use.method != "ar"
    var rows = if (drafts) PROBED else 0
    if (!native || !use.greedy) rows = maxOf(rows, if (drafts) use.gamma + 1 else 1)
    // float64: inputs of the distribution of a row, and the drafter's distribution of every draft token
    val drawn = if (use.greedy || draft) 0 else DRAWN + if (drafts) use.gamma else 0
    return 4L * rows * columns + 8L * drawn * part.facts.vocab
}

/** Memory of a group of heads' logits; native operators return only the best. */
internal fun headLogits(part: ModelPart, native: Boolean, groups: List<String>): Long {
    val columns = part.headVocab?.size ?: part.facts.vocab
    return if (native) 0 else 4L * columns * (part.heads.filter { it.name in groups }.maxOfOrNull { it.count } ?: 0)
}

/* Bytes of weights as stock operators keep them: by the size of a weight file and the model's facts. */

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
    val kept = part.bytesPerWeight
    val own = if (kept == null) matrixBytes(head, facts.vocab, facts.hidden) else (kept.head * facts.vocab * facts.hidden).toLong()
    val cut = part.headVocab?.let { matrixBytes(head, it.size, facts.hidden) } ?: 0
    // a draft with a cut LM head multiplies only by that one, and only looks its embedding up; a drafter has none
    val row = if (tied) own / facts.vocab else rowBytes(part, blocks)
    val table = if (part.decoder != null || tied && !part.cut) 0 else row * facts.vocab
    val position = if (part.origin == "edgespec") 4L * (if (facts.angles.isEmpty()) facts.hidden else facts.angles.sum()) else 0
    val angles = (facts.context + part.headroom) * position
    val ofLayer = if (form == "fp32") 4 * facts.layerEmbedding else facts.layerEmbedding + 4
    val layerRow = if (facts.layerEmbedding > 0) facts.layers.toLong() * ofLayer else 0
    val heads = part.heads.sumOf { groupBytes(part, it) }
    val lmHead = if (part.cut) cut else own
    val beside = if (part.cut) 0 else cut
    val size = files[part.weights]?.size ?: 0
    val matrices = maxOf(0, size - angles - table - lmHead - beside - heads - layerRow * facts.vocab)
    return listOf(Triple(form, matrices + heads, kept?.layers), Triple(head, lmHead + beside, kept?.head)).sumOf { (kind, bytes, each) ->
        val spec = SPECS.getValue(kind)
        val (scale, all) = if (each == null) spec.scale to spec.level + spec.scale else 4.0 / BLOCK to each
        (bytes / all * (all + scale)).toLong() // with the sum of each block
    }
}

/** Memory of a token's row in an embedding that is only looked up. */
private fun rowBytes(part: ModelPart, blocks: Boolean): Long {
    val hidden = part.facts.hidden
    part.bytesPerWeight?.let { return (it.embedding * hidden).toLong() }
    if (part.format == "fp32") return 4L * hidden
    return if (blocks) matrixBytes(part.embeddingFormat ?: part.format, 16, hidden) / 16 else hidden + 4L
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
