package dev.edgespec.runtimes

import ai.onnxruntime.OnnxJavaType
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.Best
import dev.edgespec.decoding.GreedyTarget
import dev.edgespec.decoding.Heads
import dev.edgespec.decoding.Pass
import dev.edgespec.decoding.Resume
import dev.edgespec.decoding.SkipSet
import dev.edgespec.decoding.Tokens

// lines of the plan
private const val TOKEN = 0
private const val POSITION = 1
private const val SLOT = 2
private const val VISIBLE = 3
private const val PARENT = 4
private const val PLACE = 5

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
    private val plainGates = ByteArray(groups + model.part.heads.size + (if (model.part.tapped) 1 else 0)) { if (it <= embed || it == lm) 1 else 0 }
    private val gates = Bound.of(OnnxJavaType.BOOL, plainGates.size).also { it.bytes.duplicate().put(plainGates) }
    private val noHiddenIn = Bound.of(OnnxJavaType.FLOAT, 0, hiddenSize)
    private val control = Bound.of(OnnxJavaType.INT64, 8).also { it.longs.duplicate().put(longArrayOf(0) + kv.controls()) }
    private val noMoves = Bound.of(OnnxJavaType.INT64, 0, 3)
    private var moves = ArrayList<IntArray>() // (from, to), before the next pass
    private var furthest = 0 // tokens ever written, of those that the ring may have lost
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
        if (kv.ring > 0 && furthest - same > LONGEST_PASS) {
            // the ring has overwritten exact keys that the next rows would read: begin again
            this.tokens.crop(0)
            furthest = 0
            return 0
        }
        return same
    }

    override fun forward(tokens: IntArray, parents: IntArray?): Pass {
        verifying(tokens, parents)
        return launch(tokens.size, tokens.size, keepHidden)
    }

    override fun forwardBest(tokens: IntArray, parents: IntArray?): Pass {
        verifying(tokens, parents)
        return top(1) { likeliest(launch(tokens.size, tokens.size, keepHidden)) }
    }

    /** The plan of a pass whose rows may be kept. */
    private fun verifying(tokens: IntArray, parents: IntArray?) {
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
        plan(tokens, past)
        furthest = maxOf(furthest, past + tokens.size)
        return parts(0, last, false) { launch(tokens.size, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardLayers(hidden: FloatArray, rows: Int, offset: Int, first: Int, last: Int): FloatArray {
        val past = tokens.size + offset
        plan(IntArray(rows), past)
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

    override fun forwardHypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass {
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

    override fun fill(chunk: IntArray) {
        plan(chunk, tokens.size)
        furthest = maxOf(furthest, tokens.size + chunk.size)
        launch(chunk.size, 0)
    }

    /** Bind the plan [6, n] of rows after [past] tokens: a chain, unless parents are given. */
    private fun plan(tokens: IntArray, past: Int, visible: IntArray? = null, parents: IntArray? = null) {
        val n = tokens.size
        needRoom(past + n)
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
     * of logits for each of them.
     */
    private fun launch(n: Int, rows: Int, hidden: Boolean = false, times: Int = 1, columns: Int = this.columns): Pass {
        val count = if (rows < 0) 1 else rows
        val wanted = model.buffer("rows", OnnxJavaType.INT64, count)
        for (at in 0 until count) wanted.longs.put(at, if (rows < 0) n - 1L else at.toLong())
        io.input("rows", wanted)
        gates.bytes.put(this.hidden, if (hidden) 1 else 0)
        var moving: Bound? = null
        if (moves.isNotEmpty()) {
            moving = Bound.of(OnnxJavaType.INT64, moves.size, 3)
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
        val stream = model.buffer("hidden", OnnxJavaType.FLOAT, if (hidden) n else 0, hiddenSize)
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
        return Pass(model.matrix(logits, if (top > 0) 0 else given, columns), if (hidden) model.matrix(stream, n, hiddenSize) else null, best)
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
        if (rows.size != n * hiddenSize) throw InvalidRequest("hidden states of ${rows.size} numbers: expected [$n, $hiddenSize]")
        val bound = model.buffer("hidden_in", OnnxJavaType.FLOAT, n, hiddenSize)
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
