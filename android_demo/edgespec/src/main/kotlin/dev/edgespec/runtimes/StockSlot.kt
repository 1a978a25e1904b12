package dev.edgespec.runtimes

import ai.onnxruntime.OnnxJavaType
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.nio.FloatBuffer

private const val HIDE = -1e30f // finite, so that a row that hides everything cannot become NaN

/**
 * A KV slot over stock operators.  The Java interface has no binding, but outputs that are given: the same memory is input
 * and output of attention, which then writes in place.  `seqlens_k` must be exact, `total` may be the capacity; a rollback
 * is a smaller past, nothing else.
 */
class StockSlot(model: Model, context: Int?, reserve: Int) : Slot(model, context) {
    private val facts = model.facts
    private val extra = if (model.graph.padded) 1 else 0 // dummy rows of a pass in which attention may be left out
    private val least = minOf(model.graph.leastLength, facts.context + model.part.headroom) // tokens of attention
    private val io = Binding(model.session)
    private val cache = LinkedHashMap<String, Bound>() // "LAYER.key" and "LAYER.value": [1, kv_heads, capacity, head_dim]
    private val held = ArrayList<Bound>()
    private val seqlens = given("seqlens_k", OnnxJavaType.INT32, 1)
    private val total = given("total", OnnxJavaType.INT32)
    private val gateAttn = if (model.graph.gated) ones("gate_attn", layers) else null
    private val gateMlp = if (model.graph.gated) ones("gate_mlp", layers) else null
    private val gateEmbed = if (model.graph.hidden) ones("gate_embed") else null
    private val noHiddenIn = if (model.graph.hidden) given("hidden_in", OnnxJavaType.FLOAT, 1, 1, givenSize) else null
    private val gateLm = if (model.graph.hidden && model.part.heads.isNotEmpty()) ones("gate_lm") else null
    private val gateHeads = if (gateLm != null) given("gate_heads", OnnxJavaType.BOOL, model.part.heads.size) else null
    private var skipped: SkipSet? = null

    init {
        reserve(reserve)
    }

    private fun given(name: String, type: OnnxJavaType, vararg shape: Int): Bound {
        val bound = Bound.of(type, *shape)
        held.add(bound)
        io.input(name, bound)
        return bound
    }

    private fun ones(name: String, vararg shape: Int) = given(name, OnnxJavaType.BOOL, *shape).also { fill(it, 0 until it.bytes.capacity()) }

    private fun fill(gates: Bound, on: IntRange) {
        for (at in 0 until gates.bytes.capacity()) gates.bytes.put(at, if (at in on) 1 else 0)
    }

    override fun close() {
        (held + cache.values).forEach { it.close() }
        held.clear()
        cache.clear()
    }

    // -- the Target contract

    override fun forward(tokens: IntArray, parents: IntArray?): Pass {
        pending = tokens
        pendingParents = parents
        return run(tokens, this.tokens.size, rows = tokens.size, parents = parents)
    }

    override fun keep(rows: IntArray) {
        if (pendingParents != null && rows.indices.any { rows[it] != it }) {
            val past = tokens.size
            val width = facts.headDim
            val row = FloatArray(width)
            for (bound in cache.values) { // keys carry positions by depth, so they move without a new rotation
                for (head in 0 until facts.kvHeads) for ((at, source) in rows.withIndex()) {
                    if (at != source) move(bound.floats, row, (head * capacity + past + source) * width, (head * capacity + past + at) * width)
                }
            }
        }
        for (row in rows) tokens.push(pending[row])
        pending = IntArray(0)
        pendingParents = null
    }

    override fun beginLike(other: Slot, length: Int): Int {
        check(other is StockSlot)
        val same = other.cropped(length)
        reserve(same)
        tokens.crop(0)
        tokens.push(other.tokens.slice(0, same))
        val width = facts.headDim
        for ((name, bound) in cache) for (head in 0 until facts.kvHeads) {
            val lent = other.cache.getValue(name).floats.duplicate()
            lent.limit((head * other.capacity + same) * width)
            lent.position(head * other.capacity * width)
            bound.floats.duplicate().also { it.position(head * capacity * width) }.put(lent)
        }
        return same
    }

    private fun move(floats: FloatBuffer, row: FloatArray, from: Int, to: Int) {
        val view = floats.duplicate()
        view.position(from)
        view.get(row)
        view.position(to)
        view.put(row)
    }

    override fun forwardDraft(tokens: IntArray, offset: Int, skip: SkipSet?): Pass {
        setGates(skip)
        try {
            return run(tokens, this.tokens.size + offset, rows = -1)
        } finally {
            setGates(null)
        }
    }

    override fun forwardHypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass {
        val past = this.tokens.size
        val n = tokens.size
        val count = n + dummies(past, n)
        needRoom(past + count)
        val width = past + count
        setGates(skip)
        try {
            val mask = model.buffer("hypotheses_bias", OnnxJavaType.FLOAT, 1, 1, count, width)
            val rows = Array(count) { FloatArray(width) { HIDE } }
            for (row in 0 until count) {
                if (row < n && parents[row] >= 0) rows[parents[row]].copyInto(rows[row]) else if (row < n) rows[row].fill(0f, 0, visible[row])
                rows[row][past + row] = 0f
                mask.floats.duplicate().also { it.position(row * width) }.put(rows[row])
            }
            io.input("bias", mask)
            chooseRows("hypotheses_rows", n)
            total.ints.put(0, width)
            val depths = depthsOf(parents)
            return launch(tokens, IntArray(count) { if (it < n) visible[it] + depths[it] else past + n }, past, count, n, columns, saysHidden)
        } finally {
            setGates(null)
        }
    }

    // -- parts of the model

    /** Whether passes are to say their hidden states, and the graph can. */
    private val saysHidden: Boolean get() = keepHidden && model.graph.hidden

    override fun embed(tokens: IntArray): FloatArray = layers(0, 0, null, 0) {
        chooseRows("rows", 1)
        io.input("bias", model.buffer("zero_bias", OnnxJavaType.FLOAT, 1, 1, tokens.size + extra, capacity))
        total.ints.put(0, capacity)
        launch(tokens, null, 0, tokens.size + extra, 1, columns, true).hidden!!.copy()
    }

    override fun forwardGiven(given: FloatArray, n: Int, recycled: Boolean, best: Boolean, parents: IntArray?): Pass {
        val none = noHiddenIn ?: throw noHidden()
        loadRows(given, n)
        pending = IntArray(n)
        pendingParents = parents
        gateEmbed!!.bytes.put(0, if (recycled) 0 else 1)
        try {
            val output = run(pending, tokens.size, rows = if (parents == null) -1 else n, parents = parents, hidden = true)
            return if (best) Pass(output.logits, output.hidden, bestOfRows(output.logits, headTokens, 1)) else output
        } finally {
            gateEmbed.bytes.put(0, 1)
            io.input("hidden_in", none)
        }
    }

    override fun absorbGiven(given: FloatArray, n: Int) {
        forwardGiven(given, n, recycled = false, best = false)
        keep(IntArray(n) { it })
    }

    private fun loadRows(rows: FloatArray, n: Int) {
        val bound = model.buffer("hidden_in", OnnxJavaType.FLOAT, 1, n, givenSize)
        bound.floats.duplicate().put(rows, 0, n * givenSize)
        io.input("hidden_in", bound)
    }

    override fun forwardHeads(group: String, hidden: FloatArray, rows: Int, top: Int): Heads {
        val (at, which) = group(group)
        if (gateHeads == null || gateLm == null) throw noHidden()
        gateHeads.bytes.put(at, 1)
        gateLm.bytes.put(0, 0)
        try {
            val logits = layers(0, 0, hidden, rows) {
                // nothing of the cache is read or written
                chooseRows("rows", rows)
                io.input("bias", model.buffer("zero_bias", OnnxJavaType.FLOAT, 1, 1, rows + extra, capacity))
                total.ints.put(0, capacity)
                launch(IntArray(rows), null, 0, rows + extra, which.count * rows, headSize, false).logits
            }
            return if (top > 0) Heads(null, headTokens, bestOfRows(logits, headTokens, top)) else Heads(logits, headTokens)
        } finally {
            gateHeads.bytes.put(at, 0)
            gateLm.bytes.put(0, 1)
        }
    }

    override fun forwardLayers(tokens: IntArray, offset: Int, last: Int): FloatArray =
        layers(0, last, null, 0) { some(tokens, offset) }

    override fun forwardLayers(hidden: FloatArray, rows: Int, offset: Int, first: Int, last: Int): FloatArray =
        layers(first, last, hidden, rows) { some(IntArray(rows), offset) }

    private fun some(tokens: IntArray, offset: Int): FloatArray =
        run(tokens, this.tokens.size + offset, rows = model.part.minRows, hidden = true).hidden!!.copy()

    override fun forwardResumed(tokens: IntArray, hidden: FloatArray, layer: Int, best: Boolean): Pass {
        pending = tokens
        pendingParents = null
        return layers(layer, layers, hidden, tokens.size) { run(tokens, this.tokens.size, rows = tokens.size) }
    }

    /** A pass inside runs these layers only, from rows of the residual stream [rows, hidden] if given. */
    private fun <T> layers(first: Int, last: Int, hidden: FloatArray?, rows: Int, run: () -> T): T {
        if (gateEmbed == null || gateAttn == null || gateMlp == null || noHiddenIn == null) throw noHidden()
        fill(gateAttn, first until last)
        fill(gateMlp, first until last)
        gateEmbed.bytes.put(0, if (hidden == null) 1 else 0)
        try {
            if (hidden != null) loadRows(hidden, rows)
            return run()
        } finally {
            fill(gateAttn, 0 until layers)
            fill(gateMlp, 0 until layers)
            gateEmbed.bytes.put(0, 1)
            io.input("hidden_in", noHiddenIn)
        }
    }

    // -- memory

    override fun reserve(tokens: Int) {
        val headroom = model.part.headroom
        val most = facts.context + headroom
        var need = minOf(most, up(tokens + headroom, ROUND_CAPACITY))
        if (need <= capacity) return
        need = minOf(most, maxOf(need, capacity * 3 / 2))
        val used = this.tokens.size * facts.headDim
        for (layer in 0 until facts.layers) for (kind in listOf("key", "value")) {
            val name = "$layer.$kind"
            val fresh = Bound.of(OnnxJavaType.FLOAT, 1, facts.kvHeads, need, facts.headDim)
            cache[name]?.let { old ->
                for (head in 0 until facts.kvHeads) {
                    val from = old.floats.duplicate()
                    from.limit(head * capacity * facts.headDim + used)
                    from.position(head * capacity * facts.headDim)
                    fresh.floats.duplicate().also { it.position(head * need * facts.headDim) }.put(from)
                }
                old.close()
            }
            cache[name] = fresh
            io.input("past_key_values.$name", fresh)
            io.output("present.$name", fresh)
        }
        capacity = need
    }

    override val kvBytes: Long get() = cache.values.sumOf { it.bytes.capacity().toLong() }

    // -- one pass

    /** How many rows attention has beyond the [n] of a pass after [past] tokens. */
    private fun dummies(past: Int, n: Int) = maxOf(extra, least - past - n)

    override fun fill(chunk: IntArray): Matrix? {
        val past = tokens.size
        val total = past + chunk.size + dummies(past, chunk.size) // exact: attention's scratch space has a row of it per head and token
        return run(chunk, past, rows = model.part.minRows, total = total).taps
    }

    private fun run(tokens: IntArray, past: Int, rows: Int, parents: IntArray? = null, total: Int? = null, hidden: Boolean = false): Pass {
        val count = tokens.size + dummies(past, tokens.size)
        needRoom(past + count)
        val width = total ?: capacity
        this.total.ints.put(0, width)
        val positions = if (parents == null) {
            io.input("bias", model.buffer("zero_bias", OnnxJavaType.FLOAT, 1, 1, count, width))
            null
        } else {
            tree(parents, past, count, width)
        }
        val given = if (rows < 0) 1 else rows
        if (rows < 0) lastRow(tokens.size - 1) else chooseRows("rows", rows)
        return launch(tokens, positions, past, count, given, columns, hidden || saysHidden)
    }

    /** Everything but mask and rows is bound and written here; attention has [count] rows, logits [rows]. */
    private fun launch(tokens: IntArray, positions: IntArray?, past: Int, count: Int, rows: Int, columns: Int, hidden: Boolean): Pass {
        val n = tokens.size
        val ids = model.buffer("ids", OnnxJavaType.INT64, 1, n)
        for (at in 0 until n) ids.longs.put(at, tokens[at].toLong())
        io.input("input_ids", ids)
        val pos = model.buffer("pos", OnnxJavaType.INT64, 1, count)
        for (at in 0 until count) pos.longs.put(at, (positions?.get(at) ?: (past + at)).toLong())
        io.input("position_ids", pos)
        seqlens.ints.put(0, past + count - 1)
        val logits = model.buffer("logits", OnnxJavaType.FLOAT, 1, rows, columns)
        io.output("logits", logits)
        val stream = if (hidden) model.buffer("hidden", OnnxJavaType.FLOAT, 1, n, hiddenSize) else null
        io.output("hidden", stream)
        val wide = model.part.tapped.size * hiddenSize
        val tapping = wide > 0 && model.graph.hidden && (keepTaps || tapSink != null)
        val taps = if (tapping) model.buffer("taps", OnnxJavaType.FLOAT, 1, n, wide) else null
        if (wide > 0) io.output("taps", taps)
        io.run()
        return Pass(
            model.matrix(logits, rows, columns), stream?.let { model.matrix(it, n, hiddenSize) }, null, taps?.let { model.matrix(it, n, wide) },
        )
    }

    private fun chooseRows(buffer: String, rows: Int) {
        val wanted = model.buffer(buffer, OnnxJavaType.INT64, rows)
        for (at in 0 until rows) wanted.longs.put(at, at.toLong())
        io.input("rows", wanted)
    }

    private fun lastRow(row: Int) {
        val wanted = model.buffer("last_row", OnnxJavaType.INT64, 1)
        wanted.longs.put(0, row.toLong())
        io.input("rows", wanted)
    }

    /** Bind the mask of a tree; returns the rows' positions [count]. */
    private fun tree(given: IntArray, past: Int, count: Int, width: Int): IntArray {
        val bias = model.buffer("tree_bias", OnnxJavaType.FLOAT, 1, 1, count, width)
        val parents = given.copyOf(count).also { it.fill(-1, given.size, count) } // dummy rows stand alone
        val rows = Array(count) { FloatArray(width) }
        for ((row, parent) in parents.withIndex()) {
            rows[row].fill(HIDE, past, width)
            if (parent >= 0) rows[parent].copyInto(rows[row], past, past, past + row)
            rows[row][past + row] = 0f
            bias.floats.duplicate().also { it.position(row * width) }.put(rows[row])
        }
        io.input("bias", bias)
        return depthsOf(parents).also { for (at in it.indices) it[at] += past }
    }

    private fun setGates(skip: SkipSet?) {
        if (skip == skipped) return
        if (gateAttn == null || gateMlp == null) {
            throw InvalidRequest("this graph has no gates: layers cannot be skipped", "export with `--method self-spec`")
        }
        fill(gateAttn, 0 until layers)
        fill(gateMlp, 0 until layers)
        skip?.attention?.forEach { gateAttn.bytes.put(it, 0) }
        skip?.mlp?.forEach { gateMlp.bytes.put(it, 0) }
        skipped = skip
    }
}
