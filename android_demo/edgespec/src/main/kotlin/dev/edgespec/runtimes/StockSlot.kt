package dev.edgespec.runtimes

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.nio.ByteBuffer

private const val HIDE = -1e30f // finite, so that a row that hides everything cannot become NaN

/**
 * A KV slot over stock operators.  The Java interface has no binding, but outputs that are given: the same memory is input
 * and output of attention, which then writes in place.  `seqlens_k` must be exact, `total` may be the capacity; a rollback
 * is a smaller past, nothing else.
 */
class StockSlot(model: Model, context: Int?, reserve: Int) : Slot(model, context) {
    private val facts = model.facts
    private val fewest = if (model.graph.padded && needsPairs(model)) 2 else 1 // rows of a pass, and of an LM head
    private val extra = if (model.graph.padded) 1 else 0 // dummy rows of a pass in which attention may be left out
    private val least = minOf(model.graph.leastLength, facts.context + model.part.headroom) // tokens of attention
    private val io = model.runner.binding()
    private val cache = LinkedHashMap<String, Bound>() // "LAYER.key" and "LAYER.value": [1, kv_heads, capacity, head_dim]
    private val held = ArrayList<Bound>()
    private val seqlens = given("seqlens_k", Dtype.INT32, 1)
    private val total = given("total", Dtype.INT32)
    private val gateAttn = if (model.graph.gated) ones("gate_attn", layers) else null
    private val gateMlp = if (model.graph.gated) ones("gate_mlp", layers) else null
    private val gateEmbed = if (model.graph.hidden) ones("gate_embed") else null
    private val noHiddenIn = if (model.graph.hidden) given("hidden_in", Dtype.FLOAT, 1, 1, model.givenSize) else null
    private val gateLm = if (model.graph.hidden && model.part.heads.isNotEmpty()) ones("gate_lm") else null
    private val gateHeads = if (gateLm != null) given("gate_heads", Dtype.BOOL, model.part.heads.size) else null

    init { reserve(reserve) }

    private fun given(name: String, type: Dtype, vararg shape: Int): Bound {
        val bound = Bound.of(type, *shape)
        held.add(bound)
        io.input(name, bound)
        return bound
    }

    private fun ones(name: String, vararg shape: Int) =
        given(name, Dtype.BOOL, *shape).also { fill(it, 0 until it.bytes.capacity()) }
    private fun open(layers: IntRange) = listOfNotNull(gateAttn, gateMlp).forEach { fill(it, layers) }

    private fun fill(gates: Bound, on: IntRange) {
        for (at in 0 until gates.bytes.capacity()) gates.bytes.put(at, if (at in on) 1 else 0)
    }

    override fun close() {
        (held + cache.values).forEach { it.close() }
        held.clear()
        cache.clear()
        tokens.crop(0)
    }

    override fun forward(tokens: IntArray, parents: IntArray?): Pass {
        pending = tokens
        pendingParents = parents
        return run(tokens, this.tokens.size, rows = tokens.size, parents = parents)
    }

    override fun move(from: Int, to: Int) { // keys carry positions by depth, so they move without a new rotation
        copy(part(from, from + 1), part(to, to + 1))
    }

    private fun copy(from: List<ByteBuffer>, to: List<ByteBuffer>) = from.zip(to).forEach { (one, other) -> other.put(one) }

    override fun beginLike(other: Slot, length: Int): Int {
        check(other is StockSlot)
        val same = other.cropped(length)
        takeUp(other.tokens.slice(0, same), same)
        copy(other.part(0, same), part(0, same))
        return same
    }

    override fun forwardSkipped(tokens: IntArray, offset: Int, skip: SkipSet): Pass =
        skipping(skip) { run(tokens, this.tokens.size + offset, rows = -1) }

    override fun forwardHypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass =
        skipping(skip) { run(tokens, this.tokens.size, tokens.size, parents, visible, exact = true) }

    override fun embed(tokens: IntArray): FloatArray = layers(0, 0, null, 0) { outside(tokens, 1, 1, columns, true).hidden!!.copy() }

    /** A pass in which no layer takes part: nothing of the cache is read or written. */
    private fun outside(tokens: IntArray, wanted: Int, heads: Int, columns: Int, hidden: Boolean): Pass {
        chooseRows(0, wanted)
        val count = fed(tokens.size) + extra
        seeAll(count, capacity)
        return launch(tokens, null, 0, count, wanted, columns, hidden, heads)
    }

    /** Number of rows of a pass or an LM head for [n]: two for one if single rows run as pairs. */
    private fun fed(n: Int) = if (n == 1) fewest else n

    override fun forwardGiven(given: FloatArray, n: Int, recycled: Boolean, best: Boolean, parents: IntArray?): Pass {
        pending = IntArray(n)
        pendingParents = parents
        val output = layers(0, layers, given, n, look = !recycled) {
            run(pending, tokens.size, rows = if (parents == null) -1 else n, parents = parents, hidden = true)
        }
        return if (best) output.copy(best = bestOfRows(output.logits, headTokens, 1)) else output
    }

    override fun absorbGiven(given: FloatArray, n: Int) {
        forwardGiven(given, n, recycled = false, best = false)
        keep(IntArray(n) { it })
    }

    override fun forwardHeads(group: String, hidden: FloatArray, rows: Int, top: Int): Pass {
        val (at, which) = group(group)
        if (gateHeads == null || gateLm == null) throw noHidden()
        gateHeads.bytes.put(at, 1)
        gateLm.bytes.put(0, 0)
        try {
            val logits = layers(0, 0, hidden, rows) { outside(IntArray(rows), rows, which.count, headSize, false).logits }
            return Pass(logits, best = if (top > 0) bestOfRows(logits, headTokens, top) else null)
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

    /** A pass inside runs these layers only, from [hidden] [rows, columns] if given; [look]: with tokens looked up. */
    private fun <T> layers(first: Int, last: Int, hidden: FloatArray?, rows: Int, look: Boolean = hidden == null, run: () -> T): T {
        if (gateEmbed == null || noHiddenIn == null || (gateAttn == null && last - first < layers)) throw noHidden()
        open(first until last)
        gateEmbed.bytes.put(0, if (look) 1 else 0)
        try {
            if (hidden != null) {
                val bound = model.buffer("hidden_in", Dtype.FLOAT, 1, fed(rows), model.givenSize)
                val given = bound.floats.duplicate().put(hidden, 0, rows * model.givenSize)
                if (fed(rows) > rows) given.put(hidden, (rows - 1) * model.givenSize, model.givenSize)
                io.input("hidden_in", bound)
            }
            return run()
        } finally {
            open(0 until layers)
            gateEmbed.bytes.put(0, 1)
            io.input("hidden_in", noHiddenIn)
        }
    }

    override fun reserve(tokens: Int) {
        val headroom = model.part.headroom
        val most = facts.context + headroom
        var need = minOf(most, up(tokens + headroom, ROUND_CAPACITY))
        if (need <= capacity) return
        need = minOf(most, maxOf(need, capacity * 3 / 2))
        val (old, before) = cache.values.toList() to part(0, this.tokens.size)
        for (layer in 0 until facts.layers) for (kind in listOf("key", "value")) {
            val name = "$layer.$kind"
            val fresh = Bound.of(Dtype.FLOAT, 1, facts.kvHeads, need, facts.headDim)
            cache[name] = fresh
            io.input("past_key_values.$name", fresh)
            io.output("present.$name", fresh)
        }
        capacity = need
        copy(before, part(0, this.tokens.size))
        old.forEach { it.close() }
    }

    override fun part(start: Int, stop: Int): List<ByteBuffer> = cache.values.flatMap { bound ->
        (0 until facts.kvHeads).map { head ->
            val part = bound.bytes.duplicate()
            part.limit((head * capacity + stop) * facts.headDim * Float.SIZE_BYTES)
            part.position((head * capacity + start) * facts.headDim * Float.SIZE_BYTES)
            part
        }
    }

    override val kvBytes: Long get() = cache.values.sumOf { it.bytes.capacity().toLong() }

    override fun fill(chunk: IntArray): Matrix? = run(chunk, tokens.size, rows = model.part.minRows, exact = true).auxHidden

    /** A pass after [past] tokens; logits of the first [rows], -1 = the last; [exact]: attention's scratch is as the tokens. */
    private fun run(
        tokens: IntArray, past: Int, rows: Int, parents: IntArray? = null, visible: IntArray? = null, exact: Boolean = false,
        hidden: Boolean = false,
    ): Pass {
        val count = maxOf(fed(tokens.size) + extra, least - past) // rows of attention, some of which are dummies
        needRoom(past + count)
        val width = if (exact) past + count else capacity
        if (parents == null) seeAll(count, width)
        val positions = parents?.let { mask(it, past, count, width, visible) }
        if (rows < 0) chooseRows(tokens.size - 1, 1) else chooseRows(0, rows)
        return launch(tokens, positions, past, count, if (rows < 0) 1 else rows, columns, hidden || (keepHidden && model.graph.hidden))
    }

    /** Everything but mask and rows is bound and written here; attention has [count] rows, logits [rows] of each of [heads]. */
    private fun launch(
        tokens: IntArray, positions: IntArray?, past: Int, count: Int, rows: Int, columns: Int, hidden: Boolean, heads: Int = 1,
    ): Pass {
        val n = tokens.size
        val (width, reached) = fed(n) to fed(rows)
        model.give(io, "input_ids", 1, width) { tokens[minOf(it, n - 1)] }
        model.give(io, "position_ids", 1, count) { positions?.get(it) ?: (past + it) }
        seqlens.ints.put(0, past + count - 1)
        val logits = model.buffer("logits", Dtype.FLOAT, 1, heads * reached, columns)
        io.output("logits", logits)
        val stream = if (hidden) model.buffer("hidden", Dtype.FLOAT, 1, width, hiddenSize) else null
        io.output("hidden", stream)
        val wide = model.part.tapped.size * hiddenSize
        val wanted = wide > 0 && model.graph.hidden && (keepAuxHidden || auxHiddenSink != null)
        val auxHidden = if (wanted) model.buffer("taps", Dtype.FLOAT, 1, width, wide) else null
        if (wide > 0) io.output("taps", auxHidden)
        io.run()
        return Pass(
            model.matrix(logits, heads * rows, columns, if (reached > rows) reached * columns else columns), stream?.let { model.matrix(it, n, hiddenSize) }, null,
            auxHidden?.let { model.matrix(it, n, wide) },
        )
    }

    private fun chooseRows(first: Int, count: Int) = model.give(io, "rows", fed(count)) { first + minOf(it, count - 1) }

    /** Let [count] rows see all before them, in a cache of [width] tokens. */
    private fun seeAll(count: Int, width: Int) {
        io.input("bias", model.buffer("zero_bias", Dtype.FLOAT, 1, 1, count, width))
        total.ints.put(0, width)
    }

    /** Let rows see the first [visible] tokens, by default all, their ancestors and themselves; returns positions [count]. */
    private fun mask(parents: IntArray, past: Int, count: Int, width: Int, visible: IntArray?): IntArray {
        val bias = model.buffer("tree_bias", Dtype.FLOAT, 1, 1, count, width)
        val above = parents.copyOf(count).also { it.fill(-1, parents.size, count) } // dummy rows see only themselves
        val sees = IntArray(count) { visible?.getOrNull(it) ?: past }
        val rows = Array(count) { FloatArray(width) { HIDE } }
        for ((row, parent) in above.withIndex()) {
            if (parent >= 0) rows[parent].copyInto(rows[row]) else rows[row].fill(0f, 0, sees[row])
            rows[row][past + row] = 0f
            bias.floats.duplicate().also { it.position(row * width) }.put(rows[row])
        }
        io.input("bias", bias)
        total.ints.put(0, width)
        val depths = depthsOf(above)
        return IntArray(count) { sees[it] + depths[it] }
    }

    override fun leaveOut(skip: SkipSet?) {
        if (gateAttn == null || gateMlp == null) {
            throw InvalidRequest("this graph has no gates: layers cannot be skipped", "export with `--method self-spec`")
        }
        open(0 until layers)
        skip?.attention?.forEach { gateAttn.bytes.put(it, 0) }
        skip?.mlp?.forEach { gateMlp.bytes.put(it, 0) }
    }
}
