package dev.edgespec.decoding

import java.nio.FloatBuffer

/** The contract between decoding and a model: the operations for the loop and the drafters. */

/**
 * Parts that a self-draft skips: layers whose attention and whose MLP are skipped, and layers of which only the high planes of
 * int8 weights are read (of the head: [highHead]), ascending.
 */
data class SkipSet(
    val attention: List<Int> = emptyList(), val mlp: List<Int> = emptyList(),
    val highAttention: List<Int> = emptyList(), val highMlp: List<Int> = emptyList(), val highHead: Boolean = false,
    val headRows: Int = 0, // tokens, the first ones, that the LM head scores; 0 = all
) {
    val size: Int get() = attention.size + mlp.size
}

/**
 * float32 [rows, columns]: a view of a runner's buffer, valid until the next pass over the same model.  Rows begin [stride]
 * numbers between rows.  [row] reuses one array: read one row at a time.
 */
class Matrix(
    val rows: Int, val columns: Int, private val data: FloatBuffer, private val scratch: FloatArray, private val stride: Int = columns,
) {
    /** [columns]: row [at]; its contents change with the next call. */
    fun row(at: Int): FloatArray {
        require(at in 0 until rows) { "row $at of $rows" }
        val from = data.duplicate()
        from.position(at * stride)
        from.get(scratch, 0, columns)
        return scratch
    }

    /** [count * columns]: a copy of rows from [first] on. */
    fun copy(first: Int = 0, count: Int = rows): FloatArray {
        val found = FloatArray(count * columns)
        val from = data.duplicate()
        for (row in 0 until count) {
            from.position((first + row) * stride)
            from.get(found, row * columns, columns)
        }
        return found
    }

    /** The rows from [first] on, the same memory. */
    fun part(first: Int, count: Int): Matrix {
        val from = data.duplicate()
        from.position(first * stride)
        return Matrix(count, columns, from.slice(), scratch, stride)
    }

    fun only(kept: IntArray): Matrix = of(FloatArray(kept.size * columns).also { found ->
        kept.forEachIndexed { at, row -> row(row).copyInto(found, at * columns, 0, columns) }
    }, kept.size, columns)

    companion object {
        fun of(data: FloatArray, rows: Int, columns: Int) = Matrix(rows, columns, FloatBuffer.wrap(data), FloatArray(columns))
    }
}

/** Likeliest tokens and their logits: [tokens] and [logits] are [rows, top], row by row. */
class Best(val tokens: IntArray, val logits: FloatArray, val top: Int = 1)

/**
 * The output of one pass: [logits] [r, vocab], no rows where only the [best] was asked for; [hidden] [n, width], the
 * residual stream of every row after the last layer, if the target was asked to keep it; [auxHidden] [n, k * width], the same
 * after some of its layers, side by side.
 */
data class Pass(val logits: Matrix, val hidden: Matrix? = null, val best: Best? = null, val auxHidden: Matrix? = null)

/** A model with one KV slot.  [tokens] is what the slot holds; the caller's token list is the truth. */
interface Target {
    val vocabSize: Int
    val context: Int // maximum tokens (prompt + new) of one sequence
    val tokens: Tokens // committed tokens whose KV the slot holds
    val trees: Boolean get() = true // whether the rows of a pass may form a tree
    val exactTrees: Boolean get() = false // whether each then has the bits that it has in a chain of its ancestors

    fun follow(tokens: Tokens): Int // crop the slot to its longest common prefix with [tokens]; returns how many tokens stay

    /** Drop the tokens after the first [length]; returns how many stay, fewer where states go back further. */
    fun crop(length: Int): Int
    fun prefill(tokens: IntArray) // append [tokens] to the slot, in chunks, without computing logits

    /** Run rows after the slot's tokens; [parents]: parent row of each, -1 for row 0, null = a chain. */
    fun forward(tokens: IntArray, parents: IntArray? = null): Pass

    /** The same where only the likeliest token of each row is wanted: without logits, if the target can. */
    fun forwardBest(tokens: IntArray, parents: IntArray? = null): Pass = forward(tokens, parents)

    fun keep(rows: IntArray) // commit these rows of the last forward (ascending, a root path) and forget the others
}

/** A target that shows its residual stream, and can run some of its layers, and heads next to its LM head. */
interface LayeredTarget : Target {
    val layers: Int
    val hiddenSize: Int
    var keepHidden: Boolean // fill Pass.hidden from now on
    var keepAuxHidden: Boolean // the same of Pass.auxHidden
    var auxHiddenSink: ((Int, Matrix) -> Unit)? // called with first row and auxiliary hidden states of every chunk of a prefill

    fun embed(tokens: IntArray): FloatArray // the residual stream of tokens [n] before the first layer -> [n * width]

    /** Run draft rows [offset] rows after the slot's tokens with sub-layers left out -> logits of the last row, [1, vocab]. */
    fun forwardSkipped(tokens: IntArray, offset: Int, skip: SkipSet): Pass

    /** Rows that each continue the first [visible] tokens of the slot, or an earlier row ([parents], -1 = none). */
    fun forwardHypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet? = null): Pass

    /** A group of heads over [rows] rows of a residual stream -> logits [count * rows, size], or only the best [top], if there are any. */
    fun forwardHeads(group: String, hidden: FloatArray, rows: Int, top: Int = 0): Pass

    /** Layers 0 to [last] over a chain of [tokens], from [offset] rows after the slot's tokens -> [n, width]. */
    fun forwardLayers(tokens: IntArray, offset: Int, last: Int): FloatArray

    /** Layers [first] to [last] over [rows] rows of the residual stream before [first] -> [rows, width]. */
    fun forwardLayers(hidden: FloatArray, rows: Int, offset: Int, first: Int, last: Int): FloatArray

    /** Like [forward] of a chain whose layers before [layer] have run, to [hidden] [n * width]: only the others do. */
    fun forwardResumed(tokens: IntArray, hidden: FloatArray, layer: Int, best: Boolean = false): Pass
}
