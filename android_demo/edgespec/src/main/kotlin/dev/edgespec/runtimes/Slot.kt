package dev.edgespec.runtimes

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.util.Random

internal const val ROUND_CAPACITY = 64

/** A KV slot: one sequence's keys and values over a shared model.  What both kinds of operators share. */
abstract class Slot(val model: Model, context: Int?) : LayeredTarget, AutoCloseable {
    override val vocabSize: Int = model.facts.vocab
    override val layers: Int = model.facts.layers
    override val hiddenSize: Int = model.facts.hidden
    override val context: Int = minOf(context ?: model.facts.context, model.facts.context)
    override val tokens = Tokens()
    override var keepHidden = false
    override var keepAuxHidden = false
    override var auxHiddenSink: ((Int, Matrix) -> Unit)? = null
    var revocable = false // whether follow may take back kept tokens, such as a draft's own: states are also kept then
    var capacity = 0 // tokens and rows that there is room for
        protected set
    var chunk = PREFILL_CHUNK // maximum rows of a prefill pass
    open val stateful = false // more is left of a text than can be cut back: [state] is not empty
    var onRead: (() -> Unit)? = null // called when a prefill has ended, and where it was marked
    protected val columns: Int = model.part.headVocab?.size?.takeIf { model.part.cut } ?: model.facts.vocab // of the logits
    val headTokens: IntArray? get() = model.headTokens
    protected var pending: IntArray = NONE
    protected var pendingParents: IntArray? = null

    override fun follow(tokens: Tokens): Int = crop(this.tokens.commonPrefix(tokens))

    override fun crop(length: Int): Int {
        tokens.crop(length)
        return tokens.size
    }

    /** How many tokens [crop] would leave: at most [length]; fewer where states go back to a checkpoint. */
    open fun cropped(length: Int): Int = minOf(length, tokens.size)

    /** Hold the first tokens, at most [length], of what another slot holds, copied without a pass; returns how many. */
    abstract fun beginLike(other: Slot, length: Int): Int

    /** Carry out what [keep] left to the next pass; not between [forward] and [keep]. */
    open fun settle() = Unit

    /** Hold these tokens, of what the caller writes next into [part]; no pass may run before [takenUp].  [furthest]: tokens ever written. */
    open fun takeUp(tokens: IntArray, furthest: Int) {
        reserve(tokens.size)
        this.tokens.crop(0)
        this.tokens.push(tokens)
    }

    /** Hold [tokens] tokens of any keys and values: passes at a depth can be timed without a prefill. */
    open fun standIn(tokens: Int) = takeUp(IntArray(tokens), tokens)

    /** Continue from the written data -> whether it can be the result of passes over the tokens; if not, the slot is empty. */
    open fun takenUp(): Boolean = true

    /** Views of the cache of tokens [start], a multiple of [KV_BLOCK], to [stop], in its own order; not between a pass and [keep]. */
    abstract fun part(start: Int, stop: Int): List<java.nio.ByteBuffer>

    /** Copy the data besides [part] that the next token reads; empty if there is none. */
    open fun state(): ByteArray = ByteArray(0)

    /** Restore the data of [state], between [takeUp] of the same tokens and [takenUp] -> whether its size is right. */
    open fun putState(state: ByteArray): Boolean = state.isEmpty()

    override fun prefill(tokens: IntArray) {
        reserve(this.tokens.size + tokens.size)
        for (start in tokens.indices step chunk) {
            val rows = tokens.copyOfRange(start, minOf(start + chunk, tokens.size))
            val auxHidden = fill(rows)
            if (auxHidden != null) auxHiddenSink?.invoke(this.tokens.size, auxHidden)
            this.tokens.push(rows)
        }
        if (tokens.isNotEmpty()) onRead?.invoke()
    }

    override fun keep(rows: IntArray) {
        val past = tokens.size
        if (pendingParents != null) rows.forEachIndexed { at, row -> if (at != row) move(past + row, past + at) }
        for (row in rows) tokens.push(pending[row])
        pending = NONE
        pendingParents = null
    }

    protected abstract fun move(from: Int, to: Int) // move the key and value of row [from] to row [to], before the next pass

    /** Keep states that cannot be cut back at these [lengths] of a text to be read, in tokens; [most]: what memory allows. */
    open fun mark(lengths: List<Int>, most: Int) = Unit // few have states

    /** A pass inside leaves out [skip]. */
    protected fun <T> skipping(skip: SkipSet?, run: () -> T): T {
        if (skip == null) return run()
        leaveOut(skip)
        try {
            return run()
        } finally {
            leaveOut(null)
        }
    }

    protected abstract fun leaveOut(skip: SkipSet?)
    abstract fun reserve(tokens: Int) // make room for this many tokens and the rows after them; what the slot holds stays

    abstract val kvBytes: Long

    /** Run rows after the slot's tokens only for their KV; their auxiliary hidden states if there is a sink for them. */
    protected abstract fun fill(chunk: IntArray): Matrix?

    /**
     * Run rows of a drafter after the slot's rows; [keep] commits them.  [given]: [n, columns], see [DecoderPart];
     * [recycled]: they hold its own hidden state, not auxiliary ones; [parents]: null = a chain.  Logits or the [best] of the
     * last row, of a tree those of all; hidden of all.
     */
    abstract fun forwardGiven(given: FloatArray, n: Int, recycled: Boolean, best: Boolean, parents: IntArray? = null): Pass

    /** Run rows of a drafter of blocks, given as [n, columns]; all see all, none is kept; logits or [best] of all except the first. */
    open fun forwardBlock(given: FloatArray, n: Int, best: Boolean): Pass =
        throw InvalidRequest("drafts of whole blocks need native operators")

    /** Append rows [n, columns] with auxiliary hidden states, of which nothing is guessed. */
    abstract fun absorbGiven(given: FloatArray, n: Int)

    protected fun noHidden() = InvalidRequest(
        "this graph has no hidden states", "export with the method that needs them, and use the graph for all methods",
    )

    protected fun group(name: String): Pair<Int, HeadGroup> {
        val groups = model.part.heads
        val at = groups.indexOfFirst { it.name == name }
        if (at < 0) {
            val have = groups.joinToString(", ") { it.name }.ifEmpty { "none" }
            throw InvalidRequest("this model has no heads '$name'; it has: $have", "export it with `--heads DIR`")
        }
        return at to groups[at]
    }

    protected val headSize: Int get() = headTokens?.size ?: vocabSize // columns of a group's logits

    protected fun needRoom(rows: Int) {
        if (rows > capacity) reserve(rows)
        if (rows > capacity) throw InvalidRequest("a pass up to row $rows does not fit the cache of $capacity rows")
    }
}

internal fun depthsOf(parents: IntArray): IntArray {
    val depths = IntArray(parents.size)
    for (row in parents.indices) if (parents[row] >= 0) depths[row] = depths[parents[row]] + 1
    return depths
}

/** The largest logits of each row of [logits] [rows, size] and their tokens, in order; the lowest token wins a tie. */
internal fun bestOfRows(logits: Matrix, named: IntArray?, top: Int): Best {
    val width = minOf(top, logits.columns)
    val tokens = IntArray(logits.rows * width)
    val values = FloatArray(logits.rows * width)
    for (row in 0 until logits.rows) {
        val from = logits.row(row)
        // a NaN comes first, so that a check of the best token finds it
        val best = argmax(from)
        val found = if (from[best].isNaN()) List(width) { best } else top(doubles(from), width).sortedByDescending { from[it] }
        for (at in 0 until width) {
            tokens[row * width + at] = named?.get(found[at]) ?: found[at]
            values[row * width + at] = from[found[at]]
        }
    }
    return Best(tokens, values, width)
}

/** A slot over a model, of the kind that fits its graph; [reserve]: tokens to allocate for at once. */
fun openSlot(model: Model, context: Int? = null, reserve: Int = 256): Slot =
    if (model.native) NativeSlot(model, context, reserve) else StockSlot(model, context, reserve)

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
    val text = known.copyOfRange(known.size - longest, known.size).map { it % slot.vocabSize }.toIntArray() // no rows of pictures
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
