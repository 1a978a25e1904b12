package dev.edgespec.runtimes

import ai.onnxruntime.OnnxJavaType
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.Best
import dev.edgespec.decoding.GreedyTarget
import dev.edgespec.decoding.Heads
import dev.edgespec.decoding.Matrix
import dev.edgespec.decoding.Pass
import dev.edgespec.decoding.Resume
import dev.edgespec.decoding.SkipSet
import dev.edgespec.decoding.Tokens
import java.nio.ByteBuffer

// lines of the plan
private const val TOKEN = 0
private const val POSITION = 1
private const val SLOT = 2
private const val VISIBLE = 3
private const val PARENT = 4
private const val PLACE = 5

private const val COMMITTED = -1L // a move from here: so many tokens are committed, states may hold them

// among the controls
private const val TOP = 0
private const val READ_CODES = 4
private const val WINDOW = 5
private const val SINKS = 6

/**
 * A KV slot over native operators.  One node runs the whole pass: it is told, for every row, where it stands, what it sees
 * and where its key and value go (the plan), so a chain, a tree and a draft with layers left out are the same call.
 */
class NativeSlot(model: Model, context: Int?, reserve: Int) : Slot(model, context), GreedyTarget {
    private val kv = model.kv
    private val io = Binding(model.session)
    private val embed = 2 * layers // gates: two a layer, four for what comes before and after, one a group of heads
    private val load = embed + 1
    private val hidden = embed + 2
    private val lm = embed + 3
    private val groups = embed + 4
    private val taps = groups + model.part.heads.size // where layers are tapped
    private val facts = model.facts
    private val plainGates = ByteArray(taps + minOf(1, model.part.tapped.size)) { if (it <= embed || it == lm) 1 else 0 }
    private val gates = Bound.of(OnnxJavaType.BOOL, plainGates.size).also { it.bytes.duplicate().put(plainGates) }
    private val noHiddenIn = Bound.of(OnnxJavaType.FLOAT, 0, givenSize)
    private val control = Bound.of(OnnxJavaType.INT64, 8).also { it.longs.duplicate().put(longArrayOf(0) + kv.controls()) }
    private val noMoves = Bound.of(OnnxJavaType.INT64, if (facts.delta == null) 0 else 1, 3).also { if (facts.delta != null) it.longs.put(1, COMMITTED) }
    private var moves = ArrayList<IntArray>() // (from, to), before the next pass
    private var certain = 0 // tokens that will not be taken back
    private var furthest = 0 // tokens ever written, of those whose exact keys or states may be lost
    private var end = 0 // of the rows that are planned
    private val tried = HashMap<Int, Int>() // tokens whose first layers were run, by place
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

    override val kvBytes: Long get() = cache?.bytes?.capacity()?.toLong() ?: 0

    override fun close() {
        listOf(gates, noHiddenIn, control, noMoves).forEach { it.close() }
        cache?.close()
        cache = null
    }

    // -- the Target contract

    override fun follow(tokens: Tokens): Int {
        val same = super.follow(tokens)
        val lost = (kv.ring > 0 || facts.convolutions.isNotEmpty()) && furthest - same > LONGEST_PASS
        // exact keys or states that the next rows would read have been overwritten, or hold more: begin again
        certain = if (lost || held() > same) 0.also { restart() } else same
        return certain
    }

    /** Forget the text. */
    private fun restart() {
        tokens.crop(0)
        furthest = 0
        eachHeld { cache, at -> cache.putLong(at, 0) }
    }

    /** The most tokens that the states of any layer with a delta rule hold, in place. */
    private fun held(): Long {
        var most = 0L
        eachHeld { cache, at -> most = maxOf(most, cache.getLong(at)) }
        return most
    }

    private inline fun eachHeld(use: (ByteBuffer, Int) -> Unit) {
        if (facts.delta == null) return
        val each = (stateBytes(facts) / facts.convolutions.size).toInt()
        for (layer in 1..facts.convolutions.size) use(cache!!.bytes, layer * each - HELD_BYTES)
    }

    /** How many tokens the states may hold after the planned pass: what may be taken back waits in their rows. */
    private fun committed(read: Int): Long =
        if (!revocable) tokens.size + read.toLong() else minOf(tokens.size + read.toLong(), maxOf(certain.toLong(), held(), (end + facts.taps - STATE_ROWS).toLong()))

    override fun forward(tokens: IntArray, parents: IntArray?): Pass {
        verifying(tokens, parents)
        return launch(tokens.size, tokens.size, keepHidden, keepTaps)
    }

    override fun forwardBest(tokens: IntArray, parents: IntArray?): Pass {
        verifying(tokens, parents)
        return top(1) { likeliest(launch(tokens.size, tokens.size, keepHidden, keepTaps)) }
    }

    /** The plan of a pass whose rows may be kept. */
    private fun verifying(tokens: IntArray, parents: IntArray?) {
        if (facts.convolutions.isNotEmpty() && tokens.size > LONGEST_PASS) {
            throw InvalidRequest("a pass of ${tokens.size} rows: expected at most $LONGEST_PASS", "prefill first")
        }
        val past = this.tokens.size
        furthest = maxOf(furthest, past + tokens.size) // kept or not, the rows are in the ring
        pending = tokens
        pendingParents = parents
        plan(tokens, past, parents = parents)
    }

    override fun keep(rows: IntArray) {
        val past = tokens.size
        if (pendingParents != null) rows.forEachIndexed { at, row -> if (row != at) moves.add(intArrayOf(past + row, past + at)) }
        for (row in rows) tokens.push(pending[row])
        pending = IntArray(0)
        pendingParents = null
    }

    override fun forwardDraft(tokens: IntArray, offset: Int, skip: SkipSet?): Pass {
        val past = this.tokens.size + offset
        plan(tokens, past)
        furthest = maxOf(furthest, past + tokens.size)
        setGates(skip)
        readCodes(kv.codes != null)
        try {
            return launch(tokens.size, -1)
        } finally {
            setGates(null)
            readCodes(false)
        }
    }

    // -- parts of the model

    override fun forwardHeads(group: String, hidden: FloatArray, rows: Int, top: Int): Heads {
        val (number, found) = group(group)
        val plan = model.buffer("plan", OnnxJavaType.INT64, 6, rows)
        for (at in 0 until 6 * rows) plan.longs.put(at, if (at / rows == PARENT) -1 else 0) // no layer runs: the rows stand nowhere
        io.input("plan", plan)
        loadRows(hidden, rows)
        val output = parts(0, 0, true, number = number) {
            top(top) { launch(rows, rows, times = found.count, columns = headSize) }
        }
        val best = output.best ?: return Heads(output.logits, headTokens)
        val named = headTokens ?: return Heads(null, null, best)
        // -1 where more are asked for than there are
        return Heads(null, named, Best(IntArray(best.tokens.size) { if (best.tokens[it] < 0) -1 else named[best.tokens[it]] }, best.logits, best.top))
    }

    override fun forwardLayers(tokens: IntArray, offset: Int, last: Int): FloatArray {
        val past = this.tokens.size + offset
        if (facts.layerEmbedding > 0) tokens.forEachIndexed { at, token -> tried[past + at] = token }
        plan(tokens, past)
        furthest = maxOf(furthest, past + tokens.size)
        return parts(0, last, false) { launch(tokens.size, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardLayers(hidden: FloatArray, rows: Int, offset: Int, first: Int, last: Int): FloatArray {
        val past = tokens.size + offset
        // layers with embeddings of their own ask for the tokens again
        plan(IntArray(rows) { tried[past + it] ?: 0 }, past)
        furthest = maxOf(furthest, past + rows)
        loadRows(hidden, rows)
        return parts(first, last, true) { launch(rows, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardResumed(tokens: IntArray, resume: Resume, best: Boolean): Pass {
        if (resume.layer !in 0..layers) throw InvalidRequest("resumed after ${resume.layer} layers: expected 0 to $layers")
        loadRows(resume.hidden, tokens.size)
        verifying(tokens, null)
        return parts(resume.layer, layers, true, lmHead = true) {
            top(if (best) 1 else 0) { likeliest(launch(tokens.size, tokens.size, keepHidden)) }
        }
    }

    /** A pass of the only best of each row, as tokens. */
    private fun likeliest(output: Pass): Pass {
        val best = output.best ?: return output
        val named = headTokens?.takeIf { model.part.cut } ?: return output
        return Pass(output.logits, output.hidden, Best(IntArray(best.tokens.size) { named[best.tokens[it]] }, best.logits, best.top))
    }

    // -- a drafter conditioned on a target

    override fun embed(tokens: IntArray): FloatArray {
        plan(tokens, 0) // no layer runs: the rows stand nowhere
        return parts(0, 0, false) { launch(tokens.size, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardGiven(given: FloatArray, n: Int, recycled: Boolean, best: Boolean, parents: IntArray?): Pass {
        loadRows(given, n)
        verifying(IntArray(n), parents)
        val rows = if (parents == null) -1 else n
        return parts(0, layers, recycled, lmHead = true) { top(if (best) 1 else 0) { likeliest(launch(n, rows, hidden = true)) } }
    }

    override fun absorbGiven(given: FloatArray, n: Int) {
        loadRows(given, n)
        verifying(IntArray(n), null)
        parts(0, layers, false) {
            gates.bytes.put(2 * layers - 1, 0) // nothing reads what the last MLP gives
            launch(n, 0)
        }
        keep(IntArray(n) { it })
    }

    // -- scoring many hypotheses in one pass

    override fun forwardHypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass {
        val past = this.tokens.size
        val far = facts.convolutions.isNotEmpty() && maxOf(furthest, past + tokens.size) - visible.min() + facts.taps > STATE_ROWS
        if (far || (facts.delta != null && visible.any { it < past })) return inTurn(tokens, visible, parents, skip)
        return hypotheses(tokens, visible, parents, skip)
    }

    /** Each right behind the text that it sees: the states that far back are not kept, the text is run again. */
    private fun inTurn(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass {
        val text = this.tokens.toIntArray()
        restart()
        val logits = FloatArray(tokens.size * columns)
        val hidden = FloatArray(if (keepHidden) tokens.size * hiddenSize else 0)
        val starts = parents.indices.filter { parents[it] < 0 }
        for (first in starts.sortedBy { visible[it] }) {
            val last = starts.firstOrNull { it > first } ?: tokens.size
            prefill(text.copyOfRange(this.tokens.size, visible[first]))
            val above = IntArray(last - first) { if (parents[first + it] < 0) -1 else parents[first + it] - first }
            val found = hypotheses(tokens.copyOfRange(first, last), visible.copyOfRange(first, last), above, skip)
            found.logits.copy().copyInto(logits, first * columns)
            found.hidden?.copy()?.copyInto(hidden, first * hiddenSize)
        }
        prefill(text.copyOfRange(this.tokens.size, text.size))
        return Pass(Matrix.of(logits, tokens.size, columns), if (keepHidden) Matrix.of(hidden, tokens.size, hiddenSize) else null)
    }

    private fun hypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass {
        val past = this.tokens.size
        val reach = past + tokens.size - visible.min()
        if (kv.ring > 0 && reach > LONGEST_PASS) {
            throw InvalidRequest(
                "hypotheses reach $reach tokens back, but exact recent keys $LONGEST_PASS",
                "score hypotheses with attention f32, f16 or int8",
            )
        }
        plan(tokens, past, visible, parents)
        furthest = maxOf(furthest, past + tokens.size)
        setGates(skip)
        try {
            return launch(tokens.size, tokens.size, keepHidden)
        } finally {
            setGates(null)
        }
    }

    // -- one pass

    override fun fill(chunk: IntArray): Matrix? {
        plan(chunk, tokens.size)
        certain = tokens.size + chunk.size
        furthest = maxOf(furthest, certain)
        return launch(chunk.size, 0, tapping = tapSink != null, read = chunk.size).taps
    }

    /** Bind the plan [6, n] of rows after [past] tokens: a chain, unless parents are given. */
    private fun plan(tokens: IntArray, past: Int, visible: IntArray? = null, parents: IntArray? = null) {
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
     * Run what the plan says: [n] rows, of which the first [rows] reach the LM head (-1: the last one), with [times] rows
     * of logits for each of them; [tapping]: give the residual stream where it is tapped, too;
     * [read]: rows that are a text's own, a chain: states hold them at once.
     */
    private fun launch(
        n: Int, rows: Int, hidden: Boolean = false, tapping: Boolean = false, times: Int = 1, columns: Int = this.columns,
        read: Int = 0,
    ): Pass {
        val count = if (rows < 0) 1 else rows
        val wanted = model.buffer("rows", OnnxJavaType.INT64, count)
        for (at in 0 until count) wanted.longs.put(at, if (rows < 0) n - 1L else at.toLong())
        io.input("rows", wanted)
        val tapped = if (tapping) model.part.tapped.size else 0
        gates.bytes.put(this.hidden, if (hidden || tapped > 0) 1 else 0)
        if (model.part.tapped.isNotEmpty()) gates.bytes.put(taps, if (tapped > 0) 1 else 0)
        if (facts.delta != null) noMoves.longs.put(2, committed(read))
        var moving: Bound? = null
        if (moves.isNotEmpty()) {
            moving = Bound.of(OnnxJavaType.INT64, moves.size + noMoves.longs.capacity() / 3, 3)
            moving.longs.duplicate().also { it.position(3 * moves.size) }.put(noMoves.longs.duplicate())
            moves.forEachIndexed { at, (from, to) ->
                moving.longs.put(3 * at, 0)
                moving.longs.put(3 * at + 1, from.toLong())
                moving.longs.put(3 * at + 2, to.toLong())
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
    private fun readCodes(on: Boolean) {
        val window = if (on) kv.draftWindow else kv.window
        control.longs.put(READ_CODES, if (on) 1 else 0)
        control.longs.put(WINDOW, window.toLong())
        control.longs.put(SINKS, if (window > 0) kv.sinks.toLong() else 0)
    }

    private fun setGates(skip: SkipSet?) {
        if (skip == skipped) return
        gates.bytes.duplicate().put(plainGates)
        skip?.attention?.forEach { gates.bytes.put(2 * it, 0) }
        skip?.mlp?.forEach { gates.bytes.put(2 * it + 1, 0) }
        skipped = skip
    }

    /** Let the next pass begin with these rows of the residual stream, [n, hidden]. */
    private fun loadRows(rows: FloatArray, n: Int) {
        if (rows.size != n * givenSize) throw InvalidRequest("hidden states of ${rows.size} numbers: expected [$n, $givenSize]")
        val bound = model.buffer("hidden_in", OnnxJavaType.FLOAT, n, givenSize)
        bound.floats.duplicate().put(rows)
        io.input("hidden_in", bound)
    }

    /** A pass over these layers only, from tokens or hidden states, to the LM head or a group of heads. */
    private fun <T> parts(first: Int, last: Int, loaded: Boolean, lmHead: Boolean = false, number: Int? = null, run: () -> T): T {
        for (at in plainGates.indices) gates.bytes.put(at, if (at in 2 * first until 2 * last) 1 else 0)
        gates.bytes.put(if (loaded) load else embed, 1)
        gates.bytes.put(lm, if (lmHead) 1 else 0)
        if (number != null) gates.bytes.put(groups + number, 1)
        try {
            return run()
        } finally {
            gates.bytes.duplicate().put(plainGates)
            io.input("hidden_in", noHiddenIn)
        }
    }

    /** A pass that gives only the best so many tokens of each row. */
    private inline fun <T> top(top: Int, run: () -> T): T {
        control.longs.put(TOP, top.toLong())
        try {
            return run()
        } finally {
            control.longs.put(TOP, 0)
        }
    }
}
