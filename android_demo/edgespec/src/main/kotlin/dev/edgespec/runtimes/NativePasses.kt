package dev.edgespec.runtimes

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.nio.ByteBuffer
import java.nio.LongBuffer

// lines of the plan
private const val TOKEN = 0
private const val POSITION = 1
private const val SLOT = 2
private const val VISIBLE = 3
private const val PARENT = 4

private const val COMMITTED = -1 // source of a move: that many tokens are committed, states may hold them

// among the controls
private const val TOP = 0
private const val COLUMNS = 2048L // factor, in the control of the top, of the number of columns of the LM head that are computed
private const val READ_CODES = 4
private const val WINDOW = 5
private const val SINKS = 6

/**
 * Passes of native operators over one cache: the plan of the rows, gates, cross-attention caches, and a pass's outputs.  [encodes]: for an
 * encoder, whose layers share the room of one; [beams]: number of texts of equal length in it.
 */
abstract class NativePasses(model: Model, context: Int?, private val encodes: Boolean, private val beams: Int = 1) : Slot(model, context) {
    internal val kv = model.kv
    internal val io = model.runner.binding()
    internal val facts = model.facts
    val attends = model.part.source != null // over a memory
    internal var memory: Memory? = null
    internal val at = Gates(layers, model.part.heads.size, model.part.tapped.isNotEmpty(), model.part.planes, attends)
    internal val plainGates =
        ByteArray(at.count) { if (it <= at.embed || it == at.lm || (it in at.planes until at.fill && !model.part.highAlone)) 1 else 0 }
    internal val gates = Bound.of(Dtype.BOOL, plainGates.size).also { it.bytes.duplicate().put(plainGates) }
    internal val noHiddenIn = Bound.of(Dtype.FLOAT, 0, model.givenSize)
    internal val control = Bound.of(Dtype.INT64, 8).also { it.longs.duplicate().put(longArrayOf(0) + kv.controls()) }
    internal val noMoves = Bound.of(Dtype.INT64, if (facts.delta == null) 0 else 1, 3)
    private val noRows = if (model.part.image == null) null else Bound.of(Dtype.FLOAT, 0, facts.hidden) // of pictures
    internal val moves = ArrayList<IntArray>() // (slot, from, to), before the next pass
    internal var certain = 0 // tokens that will not be taken back
    internal var furthest = 0 // tokens ever written, of those whose exact keys or states may be lost
    internal var end = 0 // of the rows that are planned
    internal var cache: Bound? = null

    init {
        if (facts.delta != null) noMoves.longs.put(1, COMMITTED.toLong())
        io.input("gates", gates)
        io.input("hidden_in", noHiddenIn)
        io.input("control", control)
        io.input("tables", model.keyTables)
        io.input("moves", noMoves)
        noRows?.let { io.input("inserted", it) }
    }

    // -- memory

    override fun reserve(tokens: Int) {
        val most = model.facts.context + model.part.headroom
        var need = up(minOf(most, tokens + model.part.headroom), KV_BLOCK)
        if (minOf(need, most) <= capacity) return
        need = minOf(up(most, KV_BLOCK), maxOf(need, up(capacity * 3 / 2, KV_BLOCK)))
        // blocks of tokens are contiguous: the present ones are the beginning of the larger cache
        val memory = Bound.memory(beams * kv.nbytes(model.facts, need) / if (encodes) model.facts.kvLayers else 1)
        val fresh = Bound.over(memory, Dtype.UINT8, beams, memory.capacity() / beams)
        cache?.let { held ->
            val used = minOf(kv.nbytes(facts, maxOf(this.tokens.size, furthest)), held.bytes.capacity().toLong()).toInt()
            fresh.bytes.duplicate().put(held.bytes.duplicate().also { it.limit(used) })
            held.close()
        }
        cache = fresh
        io.input("kv", fresh)
        capacity = minOf(need, most) // the last block may reach beyond the table of angles
    }

    internal val cacheBytes: Long get() = (cache?.bytes?.capacity() ?: 0).toLong()
    internal val bytes: ByteBuffer get() = cache!!.bytes

    override fun close() {
        if (attends) attend(null)
        listOfNotNull(gates, noHiddenIn, control, noMoves, noRows).forEach { it.close() }
        cache?.close()
        cache = null
        tokens.crop(0)
    }

    // -- one pass

    /** How many tokens the states of each layer with a delta rule hold, in place. */
    internal fun held(): List<Long> = places().map(bytes::getLong)
    internal fun forgetStates() = places().forEach { bytes.putLong(it, 0) }

    internal fun places(): List<Int> {
        if (facts.delta == null) return emptyList()
        val each = (stateBytes(facts) / facts.convolutions.size).toInt()
        return (1..facts.convolutions.size).map { it * each - HELD_BYTES }
    }

    /** How many tokens the states may hold after the planned pass: what may be taken back waits in their rows. */
    internal fun committed(read: Int): Long {
        val all = tokens.size + read.toLong()
        if (!revocable) return all
        return minOf(all, maxOf(certain.toLong(), held().max(), (end + facts.taps - STATE_ROWS).toLong()))
    }

    /** Bind the plan [6, n] of rows after [past] tokens: a chain, unless parents are given. */
    internal fun plan(tokens: IntArray, past: Int, visible: IntArray? = null, parents: IntArray? = null) {
        val n = tokens.size
        needRoom(past + n)
        end = if (n == 0) 0 else past + n
        furthest = maxOf(furthest, end) // kept or not, the rows are in the ring
        val depths = parents?.let(::depthsOf)
        model.give(io, "plan", 6, n) { at ->
            val row = at % n
            when (at / n) {
                TOKEN -> tokens[row]
                POSITION -> (visible?.get(row) ?: past) + (depths?.get(row) ?: row)
                SLOT -> 0
                VISIBLE -> visible?.get(row) ?: past
                PARENT -> parents?.get(row) ?: (row - 1)
                else -> past + row // its place
            }
        }
        if (tokens.any { it >= INSERTED }) insert(tokens, model.buffer("plan", Dtype.INT64, 6, n).longs)
        if (attends) see(n, memory)
    }

    /** Set the input embeddings of pictures' rows, or, if the model reads none, the token that replaces them. */
    private fun insert(tokens: IntArray, plan: LongBuffer) {
        val rows = tokens.indices.filter { tokens[it] >= INSERTED }
        val pictures = model.inserted ?: return rows.forEach { plan.put(TOKEN * tokens.size + it, model.instead.toLong()) }
        val bound = model.buffer("inserted", Dtype.FLOAT, rows.size, facts.hidden)
        val to = bound.floats.duplicate()
        rows.forEachIndexed { at, row ->
            val (found, first) = pictures.find(tokens[row])
            to.put(found, first, facts.hidden)
            plan.put(TOKEN * tokens.size + row, -1L - at)
        }
        io.input("inserted", bound)
    }

    /** A pass over one more row of each text at these [places] -> logits of all; [spread] may move the texts that continue. */
    internal fun forwardBeams(tokens: IntArray, places: IntArray): Pass {
        val (n, past) = tokens.size to this.tokens.size
        needRoom(past + 1)
        val order = places.indices.sortedBy { places[it] } // rows of a pass come by slots
        model.give(io, "plan", 6, n) { at ->
            when (at / n) {
                TOKEN -> tokens[order[at % n]]
                SLOT -> places[order[at % n]]
                PARENT -> -1
                else -> past
            }
        }
        if (attends) see(n, memory)
        end = past + 1
        furthest = maxOf(furthest, end)
        val found = launch(n, n).logits
        this.tokens.push(tokens[0])
        val rows = FloatArray(n * columns)
        order.forEachIndexed { row, text -> found.row(row).copyInto(rows, text * columns) }
        return Pass(Matrix.of(rows, n, columns), null)
    }

    /** Let text i continue text [parents] i, whose keys and values are at [places]: the first child stays there, others get a copy. */
    internal fun spread(places: List<Int>, parents: List<Int>): List<Int> {
        val found = arrayOfNulls<Int>(parents.size)
        val taken = HashSet<Int>()
        for ((text, parent) in parents.withIndex()) if (taken.add(places[parent])) found[text] = places[parent]
        val free = places.filterTo(ArrayDeque()) { it !in taken }
        val each = bytes.capacity() / beams
        for ((text, parent) in parents.withIndex()) if (found[text] == null) {
            val from = bytes.duplicate().also { it.limit(places[parent] * each + kv.nbytes(facts, tokens.size).toInt()) }
            from.position(places[parent] * each)
            found[text] = free.removeFirst().also { bytes.duplicate().apply { position(it * each) }.put(from) }
        }
        return found.map { it!! } + free
    }

    /** Let the next pass's [n] rows attend over a memory. */
    internal fun see(n: Int, memory: Memory?, fill: Boolean = false) {
        if (memory == null && n > 0) throw InvalidRequest("this model attends over a source, and is given none")
        model.give(io, "sources", 2, n) { if (it < n) 0 else if (fill) it - n else memory!!.rows }
        memory?.let { io.input("memory", it.bound) }
    }

    /** Attend over this cross-attention cache from now on; tokens that were read with another source are forgotten. */
    fun attend(memory: Memory?) {
        val before = this.memory
        memory?.let { it.users++ }
        this.memory = memory
        if (before?.digest != memory?.digest) crop(0)
        before?.let { it.users-- }
    }

    /** A pass of [n] rows, of which each sees all: those of a block, or of a source. */
    internal fun planBlock(tokens: IntArray) {
        val n = tokens.size
        plan(tokens, this.tokens.size, parents = IntArray(n) { -1 })
        val plan = model.buffer("plan", Dtype.INT64, 6, n).longs
        for (row in 0 until n) {
            plan.put(POSITION * n + row, this.tokens.size + row.toLong())
            plan.put(VISIBLE * n + row, this.tokens.size + n.toLong())
        }
    }

    /** Run an encoder over token ids, or over rows of features [n * columns] -> [n * width]. */
    fun encode(tokens: IntArray, rows: FloatArray?): FloatArray {
        planBlock(tokens)
        rows?.let { loadRows(it, tokens.size) }
        return parts(0, layers, rows != null) { launch(tokens.size, 0, hidden = true, columns = 0).hidden!!.copy() }
    }

    /** Make the memory of a source of what an encoder gave, [n * width]. */
    fun fill(digest: String, rows: FloatArray, n: Int): Memory = Memory(digest, n, model.part, kv).also { made ->
        nowhere(n, made, fill = true)
        loadRows(rows, n)
        gated({ if (it == at.fill) 1 else if (it in at.planes until at.fill) plainGates[it] else 0 }) { launch(n, 0) }
    }

    /** Plan rows that no layer runs over. */
    internal fun nowhere(n: Int, over: Memory? = memory, fill: Boolean = false) {
        model.give(io, "plan", 6, n) { if (it / n == PARENT) -1 else 0 }
        if (attends) see(n, over, fill)
    }

    /**
     * Run the planned rows: [n] rows, of which [rows] from [first] on reach the LM head (-1: the last one), with [times] rows of logits
     * for each of them; [auxHidden]: also return the auxiliary hidden states; [read]: rows that belong to the text, a chain: states take
     * them up immediately.
     */
    internal fun launch(
        n: Int, rows: Int, hidden: Boolean = false, auxHidden: Boolean = false, times: Int = 1, columns: Int = this.columns,
        read: Int = 0, first: Int = 0,
    ): Pass {
        val count = if (rows < 0) 1 else rows
        model.give(io, "rows", count) { if (rows < 0) n - 1 else first + it }
        val tapped = if (auxHidden) model.part.tapped.size else 0
        gates.bytes.put(at.hidden, if (hidden || tapped > 0) 1 else 0)
        if (model.part.tapped.isNotEmpty()) gates.bytes.put(at.auxHidden, if (tapped > 0) 1 else 0)
        if (facts.delta != null) noMoves.longs.put(2, committed(read))
        if (moves.isNotEmpty()) model.give(io, "moves", moves.size + noMoves.longs.capacity() / 3, 3) { at ->
            moves.getOrNull(at / 3)?.get(at % 3) ?: noMoves.longs[at - 3 * moves.size].toInt()
        }
        val top = control.longs[TOP].toInt()
        val given = count * times
        val wide = if (headRows > 0) headRows else columns
        control.longs.put(TOP, top + COLUMNS * headRows)
        val logits = model.buffer("logits", Dtype.FLOAT, if (top > 0) 0 else given, wide)
        val ids = model.buffer("ids", Dtype.INT64, given, top)
        val values = model.buffer("values", Dtype.FLOAT, given, top)
        val width = (1 + tapped) * hiddenSize
        val stream = model.buffer("hidden", Dtype.FLOAT, if (hidden || tapped > 0) n else 0, width)
        io.output("logits", logits)
        io.output("ids", ids)
        io.output("values", values)
        io.output("hidden", stream)
        try {
            io.run()
        } finally {
            control.longs.put(TOP, top.toLong())
            noRows?.let { io.input("inserted", it) }
        }
        if (moves.isNotEmpty()) {
            moves.clear()
            io.input("moves", noMoves)
        }
        val best = if (top == 0) null else Best(IntArray(given * top) { ids.longs[it].toInt() }, FloatArray(given * top) { values.floats[it] }, top)
        return Pass(
            model.matrix(logits, if (top > 0) 0 else given, wide),
            if (hidden) model.matrix(stream, n, hiddenSize, width) else null, best,
            if (tapped > 0) model.matrix(stream, n, tapped * hiddenSize, width, hiddenSize) else null,
        )
    }

    /** Let passes read the coarser copy of the keys, with a separate window. */
    internal fun readCodes(on: Boolean) {
        val window = if (on) kv.draftWindow else kv.window
        control.longs.put(READ_CODES, if (on) 1 else 0)
        control.longs.put(WINDOW, window.toLong())
        control.longs.put(SINKS, if (window > 0) kv.sinks.toLong() else 0)
    }

    internal var headRows = 0 // that passes compute, the first ones; 0 = all

    override fun leaveOut(skip: SkipSet?) {
        gates.bytes.duplicate().put(plainGates)
        headRows = skip?.headRows?.takeIf { it < columns } ?: 0
        skip?.attention?.forEach { gates.bytes.put(2 * it, 0) }
        skip?.mlp?.forEach { gates.bytes.put(2 * it + 1, 0) }
        if (!model.part.planes || skip == null) return
        skip.highAttention.forEach { gates.bytes.put(at.planes + 2 * it, 0) }
        skip.highMlp.forEach { gates.bytes.put(at.planes + 2 * it + 1, 0) }
        if (skip.highHead) gates.bytes.put(at.planes + 2 * layers, 0)
    }

    /** Let the next pass begin with these rows of the residual stream, [n, hidden]. */
    internal fun loadRows(rows: FloatArray, n: Int) {
        if (rows.size != n * model.givenSize) throw InvalidRequest("hidden states of ${rows.size} numbers: expected [$n, ${model.givenSize}]")
        val bound = model.buffer("hidden_in", Dtype.FLOAT, n, model.givenSize)
        bound.floats.duplicate().put(rows)
        io.input("hidden_in", bound)
    }

    /** A pass over these layers only, from tokens or hidden states, to the LM head or a group of heads. */
    internal fun <T> parts(first: Int, last: Int, loaded: Boolean, lmHead: Boolean = false, number: Int? = null, run: () -> T): T {
        val ends = setOf(if (loaded) at.load else at.embed, if (lmHead) at.lm else -1, number?.let(at::group))
        return gated({ if (it >= at.planes) plainGates[it] else if (it in 2 * first until 2 * last || it in ends) 1 else 0 }, run)
    }

    /** A pass with these gates. */
    internal fun <T> gated(how: (Int) -> Byte, run: () -> T): T {
        for (gate in plainGates.indices) gates.bytes.put(gate, how(gate))
        try {
            return run()
        } finally {
            gates.bytes.duplicate().put(plainGates)
            io.input("hidden_in", noHiddenIn)
        }
    }

    /** A pass that returns only the best [top] tokens of each row; 0 = all logits. */
    internal fun <T> top(top: Int, run: () -> T): T {
        control.longs.put(TOP, top.toLong())
        try {
            return run()
        } finally {
            control.longs.put(TOP, 0)
        }
    }
}
