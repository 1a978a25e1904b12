package dev.edgespec.runtimes

import dev.edgespec.decoding.Tokens
import java.util.Random

private val SIZES = listOf(2, 3, 5) // rows of the passes that are compared
private const val PREFIX = 24 // fewest tokens of context
private const val WIDE = 128 // heads beyond it need dummies that bundles of earlier versions do not have

/**
 * Whether verified rows equal plain decoding's bit for bit on this machine, in strict mode: a few tokens are decoded one by
 * one, again in blocks and, where trees are to be exact, in a tree, after the slot's own tokens, which stay.
 */
internal fun probeRows(slot: Slot): Boolean {
    val graph = slot.model.graph
    if (graph.operators == "stock" && slot.model.facts.headDim > WIDE && graph.leastLength == 0) return false
    val longest = SIZES.max()
    val held = slot.tokens.toIntArray()
    slot.revocable = true
    val random = Random(7)
    val arbitrary = IntArray(PREFIX) { random.nextInt(slot.vocabSize) }
    val known = if (held.size >= PREFIX) held else held + arbitrary
    val text = known.copyOfRange(known.size - longest, known.size)
    try {
        slot.prefill(arbitrary.copyOf(maxOf(0, PREFIX - held.size)))
        val prefix = Tokens(slot.tokens.toIntArray())
        val plain = text.map { token ->
            slot.forward(intArrayOf(token)).logits.row(0).contentHashCode().also { slot.keep(intArrayOf(0)) }
        }
        return SIZES.all { size ->
            slot.prefill(prefix.slice(slot.follow(prefix)))
            val rows = slot.forward(text.copyOf(size)).logits
            (0 until size).all { rows.row(it).contentHashCode() == plain[it] }
        } && (!slot.exactTrees || treeExact(slot, prefix, text, plain))
    } finally {
        slot.follow(Tokens(held))
        slot.revocable = false
    }
}

/** The same of the rows of a tree: two of three have a sibling, which nothing continues, before them. */
private fun treeExact(slot: Slot, prefix: Tokens, text: IntArray, plain: List<Int>): Boolean {
    slot.prefill(prefix.slice(slot.follow(prefix)))
    val spread = IntArray(5) { (text[(it + 1) / 2] + it % 2) % slot.vocabSize }
    val rows = slot.forward(spread, intArrayOf(-1, 0, 0, 2, 2)).logits
    return (0 until 3).all { rows.row(2 * it).contentHashCode() == plain[it] }
}
