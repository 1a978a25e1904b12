package dev.edgespec.planning.memory

import dev.edgespec.runtimes.*

/* Bytes of running: keys and values, and the scratch space and outputs of the largest passes. */

private const val SPLIT = 4 * KV_BLOCK // tokens that attention takes in one piece (native/attention.cpp)
private const val TILE = 16
private const val ACT = 40L // bytes of 32 quantized activations (native/layout.h)
private const val QUERY = 48L // of what attention knows of a query beside its numbers (native/kernels.h)
private const val DRAWN = 7 // rows of float64 that drawing a token takes for a moment
private const val PROBED = 5 // rows whose logits are compared to say whether rows are exact, and that control times

/** How a model's native cache is kept; a draft's as exactly as its weights allow. */
internal fun modelKv(part: ModelPart, use: RunOptions, draft: Boolean): KvFormat {
    val exact = exactAttention(part)
    return if (draft) ATTENTION.getValue(exact) else use.kv ?: ATTENTION.getValue(part.attention?.default ?: exact)
}

/** Resident bytes of keys and values when the context is full. */
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

/** Of a checkpoint of the target's states; 0 = none are taken: there are no states, or coded keys beside them. */
internal fun checkpointBytesOf(part: ModelPart, use: RunOptions): Long =
    if (modelKv(part, use, false).ring > 0) 0 else checkpointBytes(part.facts)

/** Of the largest pass of native operators (native/pass.h, Scratch): the prefill's. */
internal fun nativeScratch(part: ModelPart, use: RunOptions, rows: Int, draft: Boolean): Long {
    val facts = part.facts
    val tokens = minOf(use.context, facts.context)
    val attended = facts.heads * facts.dims.max()
    val dim = paddedDim(facts)
    var floats = facts.hidden.toLong() + attended + if (part.format == "w8a8") facts.intermediate else 0
    val heads = facts.delta
    if (heads != null) { // what the rule reads and gives, and what is behind its convolution, of the last pass too
        val inner = maxOf(heads.values * heads.valueDim, attended)
        floats += heads.mixed + 2L * inner + 2 * heads.values + 2 * stateWidth(facts)
    } else if (facts.convolutions.isNotEmpty()) {
        floats += 4L * facts.hidden
    }
    if (facts.layerEmbedding > 0) floats += facts.hidden + 2L * facts.layerEmbedding
    facts.experts?.let { // rows among those sent to experts: what goes in, between, and out
        floats += it.chosen * (facts.hidden + it.inner).toLong() + it.count
        floats += it.chosen * (actBytes(part, facts.hidden) + actBytes(part, it.inner)) / 4
    }
    val acts = listOf(facts.hidden, attended, facts.intermediate).sumOf { actBytes(part, it) }
    val coded = modelKv(part, use, draft).keys in listOf("nomad1", "nomad2")
    val query = facts.heads * (QUERY + dim * (4L + 1 + if (coded) 16 else 0))
    val partial = facts.heads * (up(tokens, SPLIT) / SPLIT) * (dim + TILE) * 4L
    return rows * (4 * floats + acts + query + partial)
}

/** Of a row of activations, in the form that matrices multiply. */
private fun actBytes(part: ModelPart, width: Int): Long = if (part.format == "fp32") 4L * width else up(width, 64) / 64 * 2 * ACT

/** Of the largest pass of stock operators, in ONNX Runtime's arena: the activations of a layer, and scores of wide heads. */
internal fun stockScratch(part: ModelPart, use: RunOptions, rows: Int): Long {
    val facts = part.facts
    val attended = (facts.heads + 2L * facts.kvHeads) * facts.headDim
    val whole = part.graphs.values.any { it.leastLength > 0 }
    val scores = if (whole) facts.heads.toLong() * minOf(use.context, facts.context) else 0
    val activations = 4 * facts.hidden + 3 * attended + 3 * facts.intermediate
    return 4 * (rows + 1) * (activations + scores) // and the dummy row of a gated graph
}

/** Of rows of logits that leave the LM head, and what sampling makes of the target's. */
internal fun logitsBytes(part: ModelPart, use: RunOptions, native: Boolean, draft: Boolean): Long {
    val columns = part.headVocab?.size?.takeIf { part.cut } ?: part.facts.vocab
    val drafts = use.method != "ar"
    var rows = if (drafts) PROBED else 0
    if (!native || !use.greedy) rows = maxOf(rows, if (drafts) use.gamma + 1 else 1)
    // float64: what the distribution of a row is made from, and the drafter's distribution of every guess
    val drawn = if (use.greedy || draft) 0 else DRAWN + if (drafts) use.gamma else 0
    return 4L * rows * columns + 8L * drawn * part.facts.vocab
}

/** Of a group of heads; native operators give only the best. */
internal fun headLogits(part: ModelPart, native: Boolean, groups: List<String>): Long {
    val columns = part.headVocab?.size ?: part.facts.vocab
    return if (native) 0 else 4L * columns * (part.heads.filter { it.name in groups }.maxOfOrNull { it.count } ?: 0)
}
