package dev.edgespec.runtimes

import ai.onnxruntime.OnnxJavaType
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.Best
import dev.edgespec.decoding.Pass
import dev.edgespec.decoding.SkipSet
import java.nio.ByteBuffer

// lines of the plan
private const val TOKEN = 0
internal const val POSITION = 1
private const val SLOT = 2
internal const val VISIBLE = 3
internal const val PARENT = 4
private const val PLACE = 5

private const val COMMITTED = -1L // a move from here: so many tokens are committed, states may hold them

// among the controls
private const val TOP = 0
private const val READ_CODES = 4
private const val WINDOW = 5
private const val SINKS = 6

/** The cache of a slot and running passes over it; [NativeSlot] says which. */
abstract class NativeRunner(model: Model, context: Int?, reserve: Int) : Slot(model, context) {
    internal val kv = model.kv
    internal val io = Binding(model.session)
    internal val facts = model.facts
    internal val at = Gates(layers, model.part.heads.size, model.part.tapped.isNotEmpty())
    private val plainGates = ByteArray(at.count) { if (it <= at.embed || it == at.lm) 1 else 0 }
    internal val gates = Bound.of(OnnxJavaType.BOOL, plainGates.size).also { it.bytes.duplicate().put(plainGates) }
    private val noHiddenIn = Bound.of(OnnxJavaType.FLOAT, 0, givenSize)
    private val control = Bound.of(OnnxJavaType.INT64, 8).also { it.longs.duplicate().put(longArrayOf(0) + kv.controls()) }
    private val noMoves = Bound.of(OnnxJavaType.INT64, if (facts.delta == null) 0 else 1, 3).also { if (facts.delta != null) it.longs.put(1, COMMITTED) }
    internal var moves = ArrayList<IntArray>() // (from, to), before the next pass
    internal val checkpoints = if (facts.convolutions.isNotEmpty() && kv.ring == 0) Checkpoints(facts) else null // coded keys are exact only lately
    internal val forgets = kv.ring > 0 || facts.convolutions.isNotEmpty() // exact recent keys and states are not kept
    internal var certain = 0 // tokens that will not be taken back
    internal var furthest = 0 // tokens ever written, of those whose exact keys or states may be lost
    private var end = 0 // of the rows that are planned
    private var cache: Bound? = null
    private var skipped: SkipSet? = null

    init {
        io.input("gates", gates)
        io.input("hidden_in", noHiddenIn)
        io.input("control", control)
        io.input("tables", model.keyTables)
        io.input("moves", noMoves)
        reserve(reserve)
    }

    // -- memory

    override fun reserve(tokens: Int) {
        val most = model.facts.context + model.part.headroom
        var need = up(minOf(most, tokens + model.part.headroom), KV_BLOCK)
        if (minOf(need, most) <= capacity) return
        need = minOf(up(most, KV_BLOCK), maxOf(need, up(capacity * 3 / 2, KV_BLOCK)))
        // a block of tokens lies together: what is there already is the beginning of the larger cache
        val memory = Bound.memory(kv.nbytes(model.facts, need))
        val fresh = Bound.over(memory, OnnxJavaType.UINT8, 1, memory.capacity())
        cache?.let { held ->
            val used = minOf(kv.nbytes(model.facts, maxOf(this.tokens.size, furthest)), held.bytes.capacity().toLong()).toInt()
            val from = held.bytes.duplicate()
            from.limit(used)
            fresh.bytes.duplicate().put(from)
            held.close()
        }
        cache = fresh
        io.input("kv", fresh)
        capacity = minOf(need, most) // the last block may reach beyond the table of angles
    }

    override val kvBytes: Long get() = (checkpoints?.nbytes ?: 0) + (cache?.bytes?.capacity() ?: 0)

    /** The whole cache, [bytes]. */
    internal val bytes: ByteBuffer get() = cache!!.bytes

    override fun close() {
        listOf(gates, noHiddenIn, control, noMoves).forEach { it.close() }
        cache?.close()
        cache = null
    }

    // -- one pass

    /** Carry out what `keep` left to the next pass; not between `forward` and `keep`. */
    internal fun settle() {
        if (moves.isEmpty()) return
        plan(IntArray(0), tokens.size)
        launch(0, 0)
    }

    /** How many tokens the states of each layer with a delta rule hold, in place. */
    internal fun held(): List<Long> = places().map(bytes::getLong)

    /** Let the states of all layers hold nothing. */
    internal fun forgetStates() = places().forEach { bytes.putLong(it, 0) }

    private fun places(): List<Int> {
        if (facts.delta == null) return emptyList()
        val each = (stateBytes(facts) / facts.convolutions.size).toInt()
        return (1..facts.convolutions.size).map { it * each - HELD_BYTES }
    }

    /** How many tokens the states may hold after the planned pass: what may be taken back waits in their rows. */
    private fun committed(read: Int): Long {
        val all = tokens.size + read.toLong()
        if (!revocable) return all
        return minOf(all, maxOf(certain.toLong(), held().max(), (end + facts.taps - STATE_ROWS).toLong()))
    }

    /** Bind the plan [6, n] of rows after [past] tokens: a chain, unless parents are given. */
    internal fun plan(tokens: IntArray, past: Int, visible: IntArray? = null, parents: IntArray? = null) {
        val n = tokens.size
        needRoom(past + n)
        end = if (n == 0) 0 else past + n
        val bound = model.buffer("plan", OnnxJavaType.INT64, 6, n)
        val depths = parents?.let(::depthsOf)
        val to = bound.longs
        for (row in 0 until n) {
            val sees = visible?.get(row) ?: past
            to.put(TOKEN * n + row, tokens[row].toLong())
            to.put(POSITION * n + row, (sees + (depths?.get(row) ?: row)).toLong())
            to.put(SLOT * n + row, 0)
            to.put(VISIBLE * n + row, sees.toLong())
            to.put(PARENT * n + row, (parents?.get(row) ?: (row - 1)).toLong())
            to.put(PLACE * n + row, (past + row).toLong())
        }
        io.input("plan", bound)
    }

    /**
     * Run what the plan says: [n] rows, of which [rows] from [first] on reach the LM head (-1: the last one), with [times] rows
     * of logits for each of them; [tapping]: give the residual stream where it is tapped, too;
     * [read]: rows that are a text's own, a chain: states hold them at once.
     */
    internal fun launch(
        n: Int, rows: Int, hidden: Boolean = false, tapping: Boolean = false, times: Int = 1, columns: Int = this.columns,
        read: Int = 0, first: Int = 0,
    ): Pass {
        val count = if (rows < 0) 1 else rows
        val wanted = model.buffer("rows", OnnxJavaType.INT64, count)
        for (row in 0 until count) wanted.longs.put(row, if (rows < 0) n - 1L else (first + row).toLong())
        io.input("rows", wanted)
        val tapped = if (tapping) model.part.tapped.size else 0
        gates.bytes.put(at.hidden, if (hidden || tapped > 0) 1 else 0)
        if (model.part.tapped.isNotEmpty()) gates.bytes.put(at.taps, if (tapped > 0) 1 else 0)
        if (facts.delta != null) noMoves.longs.put(2, committed(read))
        var moving: Bound? = null
        if (moves.isNotEmpty()) {
            moving = Bound.of(OnnxJavaType.INT64, moves.size + noMoves.longs.capacity() / 3, 3)
            moving.longs.duplicate().also { it.position(3 * moves.size) }.put(noMoves.longs.duplicate())
            moves.forEachIndexed { number, (from, to) ->
                moving.longs.put(3 * number, 0)
                moving.longs.put(3 * number + 1, from.toLong())
                moving.longs.put(3 * number + 2, to.toLong())
            }
            io.input("moves", moving)
        }
        val top = control.longs[TOP].toInt()
        val given = count * times
        val logits = model.buffer("logits", OnnxJavaType.FLOAT, if (top > 0) 0 else given, columns)
        val ids = model.buffer("ids", OnnxJavaType.INT64, given, top)
        val values = model.buffer("values", OnnxJavaType.FLOAT, given, top)
        val width = (1 + tapped) * hiddenSize
        val stream = model.buffer("hidden", OnnxJavaType.FLOAT, if (hidden || tapped > 0) n else 0, width)
        io.output("logits", logits)
        io.output("ids", ids)
        io.output("values", values)
        io.output("hidden", stream)
        io.run()
        if (moving != null) {
            moves = ArrayList()
            io.input("moves", noMoves)
            moving.close()
        }
        val best = if (top > 0) {
            Best(IntArray(given * top) { ids.longs[it].toInt() }, FloatArray(given * top) { values.floats[it] }, top)
        } else {
            null
        }
        return Pass(
            model.matrix(logits, if (top > 0) 0 else given, columns),
            if (hidden) model.matrix(stream, n, hiddenSize, width) else null,
            best,
            if (tapped > 0) model.matrix(stream, n, tapped * hiddenSize, width, hiddenSize) else null,
        )
    }

    /** Let passes read the coarser copy of the keys, with a window of its own. */
    internal fun readCodes(on: Boolean) {
        val window = if (on) kv.draftWindow else kv.window
        control.longs.put(READ_CODES, if (on) 1 else 0)
        control.longs.put(WINDOW, window.toLong())
        control.longs.put(SINKS, if (window > 0) kv.sinks.toLong() else 0)
    }

    internal fun setGates(skip: SkipSet?) {
        if (skip == skipped) return
        gates.bytes.duplicate().put(plainGates)
        skip?.attention?.forEach { gates.bytes.put(2 * it, 0) }
        skip?.mlp?.forEach { gates.bytes.put(2 * it + 1, 0) }
        skipped = skip
    }

    /** Let the next pass begin with these rows of the residual stream, [n, hidden]. */
    internal fun loadRows(rows: FloatArray, n: Int) {
        if (rows.size != n * givenSize) throw InvalidRequest("hidden states of ${rows.size} numbers: expected [$n, $givenSize]")
        val bound = model.buffer("hidden_in", OnnxJavaType.FLOAT, n, givenSize)
        bound.floats.duplicate().put(rows)
        io.input("hidden_in", bound)
    }

    /** A pass over these layers only, from tokens or hidden states, to the LM head or a group of heads. */
    internal fun <T> parts(first: Int, last: Int, loaded: Boolean, lmHead: Boolean = false, number: Int? = null, run: () -> T): T {
        for (gate in plainGates.indices) gates.bytes.put(gate, if (gate in 2 * first until 2 * last) 1 else 0)
        gates.bytes.put(if (loaded) at.load else at.embed, 1)
        gates.bytes.put(at.lm, if (lmHead) 1 else 0)
        if (number != null) gates.bytes.put(at.group(number), 1)
        try {
            return run()
        } finally {
            gates.bytes.duplicate().put(plainGates)
            io.input("hidden_in", noHiddenIn)
        }
    }

    /** A pass that gives only the best so many tokens of each row. */
    internal inline fun <T> top(top: Int, run: () -> T): T {
        control.longs.put(TOP, top.toLong())
        try {
            return run()
        } finally {
            control.longs.put(TOP, 0)
        }
    }
}

/**
 * Where the gates of a native graph stand: two a layer, four for what comes before and after, one a group of heads.  A target
 * whose layers are [tapped] has one more.  A drafter that is conditioned on it fuses what was tapped with [embed] on, and
 * goes on with its own hidden state with [load] on.
 */
internal class Gates(layers: Int, groups: Int, tapped: Boolean) {
    val embed = 2 * layers // look tokens up
    val load = embed + 1 // begin with the rows of `hidden_in` instead
    val hidden = embed + 2 // give the residual stream after the last layer
    val lm = embed + 3 // the model's own final norm and LM head
    private val first = embed + 4
    val taps = first + groups // give the residual stream where it is tapped, behind the columns of `hidden`
    val count = taps + if (tapped) 1 else 0

    /** A group of heads. */
    fun group(number: Int): Int = first + number
}
