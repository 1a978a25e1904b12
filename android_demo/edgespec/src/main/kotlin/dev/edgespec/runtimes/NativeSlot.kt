package dev.edgespec.runtimes

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.nio.ByteBuffer
import java.util.TreeSet

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
private const val COLUMNS = 2048L // in the control of the top: so many times the columns of the LM head that are computed
private const val READ_CODES = 4
private const val WINDOW = 5
private const val SINKS = 6

/** Keys and values of one source, for all layers of a decoder that attends over it: filled once, and never written again. */
class Memory internal constructor(val digest: String, val rows: Int, part: ModelPart, kv: KvFormat) {
    internal val bound = Bound.of(Dtype.UINT8, 1, memoryFormat(kv).nbytes(part.facts, rows).toInt())
    internal var users = 0 // slots that refer to it, and whoever keeps it
        set(count) {
            field = count
            if (count == 0) bound.close()
        }

    val nbytes: Long get() = bound.bytes.capacity().toLong()
}

/**
 * A KV slot over native operators: one node runs the whole pass, and is told of every row where it stands, what it sees.
 * [encodes]: of an encoder, whose layers take turns with the room of one.
 */
class NativeSlot(model: Model, context: Int?, reserve: Int, private val encodes: Boolean = false) : Slot(model, context), GreedyTarget {
    override val exactTrees get() = true
    private val kv = model.kv
    private val io = model.runner.binding()
    private val facts = model.facts
    val attends = model.part.source != null // over a memory
    private var memory: Memory? = null
    private val at = Gates(layers, model.part.heads.size, model.part.tapped.isNotEmpty(), model.part.planes, attends)
    private val plainGates =
        ByteArray(at.count) { if (it <= at.embed || it == at.lm || (it in at.planes until at.fill && !model.part.highAlone)) 1 else 0 }
    private val gates = Bound.of(Dtype.BOOL, plainGates.size).also { it.bytes.duplicate().put(plainGates) }
    private val noHiddenIn = Bound.of(Dtype.FLOAT, 0, model.givenSize)
    private val control = Bound.of(Dtype.INT64, 8).also { it.longs.duplicate().put(longArrayOf(0) + kv.controls()) }
    private val noMoves = Bound.of(Dtype.INT64, if (facts.delta == null) 0 else 1, 3)
    private var moves = ArrayList<IntArray>() // (from, to), before the next pass
    // coded keys are exact only lately
    private val checkpoints = if (facts.convolutions.isNotEmpty() && kv.ring == 0) Checkpoints(facts) else null
    override val stateful = kv.ring > 0 || facts.convolutions.isNotEmpty() // exact recent keys and states are not kept
    private var certain = 0 // tokens that will not be taken back
    private var furthest = 0 // tokens ever written, of those whose exact keys or states may be lost
    private var since = 0 // tokens of the text before which they are not there either
    private val tried = HashMap<Int, Int>() // tokens whose first layers were run, by place
    private val marks = TreeSet<Int>() // lengths of the text at which checkpoints are taken
    private var end = 0 // of the rows that are planned
    private var cache: Bound? = null

    init {
        if (facts.delta != null) noMoves.longs.put(1, COMMITTED)
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
        val memory = Bound.memory(kv.nbytes(model.facts, need) / if (encodes) model.facts.kvLayers else 1)
        val fresh = Bound.over(memory, Dtype.UINT8, 1, memory.capacity())
        cache?.let { held ->
            val used = minOf(kv.nbytes(facts, maxOf(this.tokens.size, furthest)), held.bytes.capacity().toLong()).toInt()
            fresh.bytes.duplicate().put(held.bytes.duplicate().also { it.limit(used) })
            held.close()
        }
        cache = fresh
        io.input("kv", fresh)
        capacity = minOf(need, most) // the last block may reach beyond the table of angles
    }

    override val kvBytes: Long get() = (checkpoints?.nbytes ?: 0) + (cache?.bytes?.capacity() ?: 0)
    private val bytes: ByteBuffer get() = cache!!.bytes

    override fun close() {
        if (attends) attend(null)
        listOf(gates, noHiddenIn, control, noMoves).forEach { it.close() }
        cache?.close()
        cache = null
        tokens.crop(0)
    }

    override fun takeUp(tokens: IntArray, furthest: Int) {
        super.takeUp(tokens, furthest)
        checkpoints?.crop(0)
        moves.clear()
        certain = tokens.size
        this.furthest = furthest
        since = 0
    }

    override fun takenUp(): Boolean {
        if (held().any { it != tokens.size.toLong() }) {
            restart()
            return false
        }
        remember()
        return true
    }

    override fun part(start: Int, stop: Int): List<ByteBuffer> {
        if (moves.isNotEmpty()) settle()
        val first = kv.headerBytes(facts).toInt()
        val block = kv.blockBytes(facts).toInt()
        return listOf(within(first + start / KV_BLOCK * block, first + up(stop, KV_BLOCK) / KV_BLOCK * block))
    }

    override fun state(): ByteArray {
        if (!stateful) return super.state()
        settle()
        val states = checkpoints?.copy(bytes, tokens.size) ?: ByteArray(0)
        return states + ByteArray(recent.remaining()).also(recent::get)
    }

    override fun putState(state: ByteArray): Boolean {
        if (!stateful) return super.putState(state)
        val cut = state.size - recent.remaining()
        if (cut < 0 || (cut > 0) != facts.convolutions.isNotEmpty()) return false
        recent.put(state, cut, state.size - cut)
        since = tokens.size
        return checkpoints?.put(bytes, tokens.size, state.copyOf(cut)) ?: true
    }

    private val recent: ByteBuffer get() = within(stateBytes(facts).toInt(), kv.headerBytes(facts).toInt()) // exact keys
    private fun within(first: Int, last: Int): ByteBuffer = bytes.duplicate().also {
        it.limit(last)
        it.position(first)
    }

    // -- one pass

    override fun settle() {
        val behind = held().any { it < tokens.size }
        if (moves.isEmpty() && !behind) return
        val rows = if (behind) 1 else 0 // it brings the states up to the tokens, and is forgotten
        plan(IntArray(rows), tokens.size)
        launch(rows, 0)
    }

    /** How many tokens the states of each layer with a delta rule hold, in place. */
    private fun held(): List<Long> = places().map(bytes::getLong)
    private fun forgetStates() = places().forEach { bytes.putLong(it, 0) }

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
    private fun plan(tokens: IntArray, past: Int, visible: IntArray? = null, parents: IntArray? = null) {
        val n = tokens.size
        needRoom(past + n)
        end = if (n == 0) 0 else past + n
        furthest = maxOf(furthest, end) // kept or not, the rows are in the ring
        val bound = model.buffer("plan", Dtype.INT64, 6, n)
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
        if (attends) see(n, memory)
    }

    /** Let the next pass's [n] rows attend over a memory. */
    private fun see(n: Int, memory: Memory?, fill: Boolean = false) {
        if (memory == null && n > 0) throw InvalidRequest("this model attends over a source, and is given none")
        val bound = model.buffer("sources", Dtype.INT64, 2, n)
        for (row in 0 until n) {
            bound.longs.put(row, 0)
            bound.longs.put(n + row, if (fill) row.toLong() else memory!!.rows.toLong())
        }
        io.input("sources", bound)
        memory?.let { io.input("memory", it.bound) }
    }

    /** Attend over this memory from now on; tokens that were read beside another source are forgotten. */
    fun attend(memory: Memory?) {
        val before = this.memory
        memory?.let { it.users++ }
        this.memory = memory
        if (before?.digest != memory?.digest) crop(0)
        before?.let { it.users-- }
    }

    /** A pass of [n] rows, of which each sees all: those of a block, or of a source. */
    private fun planBlock(tokens: IntArray) {
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
    private fun nowhere(n: Int, over: Memory? = memory, fill: Boolean = false) {
        val plan = model.buffer("plan", Dtype.INT64, 6, n)
        for (at in 0 until 6 * n) plan.longs.put(at, if (at / n == PARENT) -1 else 0)
        io.input("plan", plan)
        if (attends) see(n, over, fill)
    }

    /**
     * Run what the plan says: [n] rows, of which [rows] from [first] on reach the LM head (-1: the last one), with [times] rows
     * of logits for each of them; [auxHidden]: give the auxiliary hidden states, too;
     * [read]: rows that are a text's own, a chain: states hold them at once.
     */
    private fun launch(
        n: Int, rows: Int, hidden: Boolean = false, auxHidden: Boolean = false, times: Int = 1, columns: Int = this.columns,
        read: Int = 0, first: Int = 0,
    ): Pass {
        val count = if (rows < 0) 1 else rows
        val wanted = model.buffer("rows", Dtype.INT64, count)
        for (row in 0 until count) wanted.longs.put(row, if (rows < 0) n - 1L else (first + row).toLong())
        io.input("rows", wanted)
        val tapped = if (auxHidden) model.part.tapped.size else 0
        gates.bytes.put(at.hidden, if (hidden || tapped > 0) 1 else 0)
        if (model.part.tapped.isNotEmpty()) gates.bytes.put(at.auxHidden, if (tapped > 0) 1 else 0)
        if (facts.delta != null) noMoves.longs.put(2, committed(read))
        var moving: Bound? = null
        if (moves.isNotEmpty()) {
            moving = Bound.of(Dtype.INT64, moves.size + noMoves.longs.capacity() / 3, 3)
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
        }
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
            model.matrix(logits, if (top > 0) 0 else given, wide),
            if (hidden) model.matrix(stream, n, hiddenSize, width) else null, best,
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

    private var headRows = 0 // that passes compute, the first ones; 0 = all

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
    private fun loadRows(rows: FloatArray, n: Int) {
        if (rows.size != n * model.givenSize) throw InvalidRequest("hidden states of ${rows.size} numbers: expected [$n, ${model.givenSize}]")
        val bound = model.buffer("hidden_in", Dtype.FLOAT, n, model.givenSize)
        bound.floats.duplicate().put(rows)
        io.input("hidden_in", bound)
    }

    /** A pass over these layers only, from tokens or hidden states, to the LM head or a group of heads. */
    private fun <T> parts(first: Int, last: Int, loaded: Boolean, lmHead: Boolean = false, number: Int? = null, run: () -> T): T {
        val ends = setOf(if (loaded) at.load else at.embed, if (lmHead) at.lm else -1, number?.let(at::group))
        return gated({ if (it >= at.planes) plainGates[it] else if (it in 2 * first until 2 * last || it in ends) 1 else 0 }, run)
    }

    /** A pass with these gates. */
    private fun <T> gated(how: (Int) -> Byte, run: () -> T): T {
        for (gate in plainGates.indices) gates.bytes.put(gate, how(gate))
        try {
            return run()
        } finally {
            gates.bytes.duplicate().put(plainGates)
            io.input("hidden_in", noHiddenIn)
        }
    }

    /** A pass that gives only the best so many tokens of each row; 0 = all logits. */
    private fun <T> top(top: Int, run: () -> T): T {
        control.longs.put(TOP, top.toLong())
        try {
            return run()
        } finally {
            control.longs.put(TOP, 0)
        }
    }

    // -- the Target contract

    override fun crop(length: Int): Int {
        var same = super.crop(length)
        if (lost(same)) {
            marks.add(same) // what was gone back to once is likely to be gone back to again
            same = restart(same)
        } else {
            checkpoints?.crop(same)
        }
        certain = same
        return same
    }

    override fun cropped(length: Int): Int {
        val same = super.cropped(length)
        return if (lost(same)) checkpoints?.lengths?.lastOrNull { it <= same } ?: 0 else same
    }

    private fun lost(same: Int): Boolean = (stateful && (furthest - same > LONGEST_PASS || same < since)) || held().any { it > same }

    override fun beginLike(other: Slot, length: Int): Int {
        check(other is NativeSlot)
        if (other.memory !== memory) return crop(0)
        // what is moved by the next pass does not lie where it should yet
        val same = other.cropped(minOf(length, other.moves.minOfOrNull { it[1] } ?: length))
        if (same == 0) return crop(0)
        val back = other.lost(same) // to a checkpoint
        takeUp(other.tokens.slice(0, same), if (back) same else other.furthest)
        since = other.since
        bytes.duplicate().put(other.bytes.duplicate().also { it.limit(kv.nbytes(facts, same).toInt()) })
        other.checkpoints?.let { checkpoints?.share(it, same) }
        return if (back) restart(same) else same
    }

    override fun mark(lengths: List<Int>, most: Int) {
        marks.clear()
        marks.addAll(lengths)
        checkpoints?.limit(most)
    }

    override fun prefill(tokens: IntArray) {
        val past = this.tokens.size
        reserve(past + tokens.size)
        val stops = if (checkpoints == null) emptyList() else marks.subSet(past, false, past + tokens.size, true).map { it - past }
        var start = 0
        for (stop in stops) {
            super.prefill(tokens.copyOfRange(start, stop))
            remember()
            start = stop
        }
        super.prefill(tokens.copyOfRange(start, tokens.size))
    }

    private fun remember() {
        if (revocable || held().any { it != tokens.size.toLong() }) return
        settle()
        checkpoints?.take(bytes, tokens.size)
    }

    /** Forget the text behind the last checkpoint of at most so many tokens, or all of it; returns what is left. */
    private fun restart(most: Int = 0): Int {
        forgetStates()
        val left = checkpoints?.restore(bytes, most) ?: 0
        tokens.crop(left)
        moves.clear()
        furthest = left
        certain = left
        since = left
        return left
    }

    override fun forward(tokens: IntArray, parents: IntArray?): Pass {
        verifying(tokens, parents)
        return launch(tokens.size, tokens.size, keepHidden, keepAuxHidden)
    }

    override fun forwardBest(tokens: IntArray, parents: IntArray?): Pass {
        verifying(tokens, parents)
        return best(true) { launch(tokens.size, tokens.size, keepHidden, keepAuxHidden) }
    }

    private fun verifying(tokens: IntArray, parents: IntArray?) {
        if (facts.convolutions.isNotEmpty() && tokens.size > LONGEST_PASS) {
            throw InvalidRequest("a pass of ${tokens.size} rows: expected at most $LONGEST_PASS", "prefill first")
        }
        pending = tokens
        pendingParents = parents
        plan(tokens, this.tokens.size, parents = parents)
    }

    override fun move(from: Int, to: Int) {
        moves.add(intArrayOf(from, to))
    }

    override fun forwardSkipped(tokens: IntArray, offset: Int, skip: SkipSet): Pass {
        plan(tokens, this.tokens.size + offset)
        readCodes(kv.codes != null)
        try {
            return skipping(skip) { launch(tokens.size, -1) }
        } finally {
            readCodes(false)
        }
    }

    // -- parts of the model

    override fun forwardHeads(group: String, hidden: FloatArray, rows: Int, top: Int): Heads {
        val (number, found) = group(group)
        nowhere(rows)
        loadRows(hidden, rows)
        val output = parts(0, 0, true, number = number) {
            top(top) { launch(rows, rows, times = found.count, columns = headSize) }
        }
        return Heads(if (output.best == null) output.logits else null, headTokens, output.best?.named(headTokens))
    }

    override fun forwardLayers(tokens: IntArray, offset: Int, last: Int): FloatArray {
        val past = this.tokens.size + offset
        if (facts.layerEmbedding > 0) tokens.forEachIndexed { at, token -> tried[past + at] = token }
        plan(tokens, past)
        return parts(0, last, false) { launch(tokens.size, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardLayers(hidden: FloatArray, rows: Int, offset: Int, first: Int, last: Int): FloatArray {
        val past = tokens.size + offset
        // layers with embeddings of their own ask for the tokens again
        plan(IntArray(rows) { tried[past + it] ?: 0 }, past)
        loadRows(hidden, rows)
        return parts(first, last, true) { launch(rows, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardResumed(tokens: IntArray, hidden: FloatArray, layer: Int, best: Boolean): Pass {
        if (layer !in 0..layers) throw InvalidRequest("resumed after $layer layers: expected 0 to $layers")
        loadRows(hidden, tokens.size)
        verifying(tokens, null)
        return parts(layer, layers, true, lmHead = true) { best(best) { launch(tokens.size, tokens.size, keepHidden) } }
    }

    /** A pass; [only] the best of each row, as tokens. */
    private fun best(only: Boolean, run: () -> Pass): Pass {
        if (!only) return run()
        val output = top(1, run)
        val found = if (model.part.cut) output.best!!.named(headTokens) else output.best
        return Pass(output.logits, output.hidden, found, output.auxHidden)
    }

    /** As tokens; -1 where more are asked for than there are. */
    private fun Best.named(tokens: IntArray?) =
        if (tokens == null) this else Best(IntArray(this.tokens.size) { tokens.getOrElse(this.tokens[it]) { -1 } }, logits, top)

    // -- a drafter conditioned on a target

    override fun embed(tokens: IntArray): FloatArray {
        plan(tokens, 0) // no layer runs: the rows stand nowhere
        return parts(0, 0, false) { launch(tokens.size, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardGiven(given: FloatArray, n: Int, recycled: Boolean, best: Boolean, parents: IntArray?): Pass {
        loadRows(given, n)
        verifying(IntArray(n), parents)
        val rows = if (parents == null) -1 else n
        return parts(0, layers, recycled, lmHead = true) { best(best) { launch(n, rows, hidden = true) } }
    }

    override fun forwardBlock(given: FloatArray, n: Int, best: Boolean): Pass {
        loadRows(given, n)
        planBlock(IntArray(n))
        return parts(0, layers, true, lmHead = true) { best(best) { launch(n, n - 1, first = 1) } }
    }

    override fun absorbGiven(given: FloatArray, n: Int) {
        loadRows(given, n)
        verifying(IntArray(n), null)
        // of a block nothing but keys and values; else nothing reads what the last MLP gives
        parts(0, if (model.part.decoder?.block == null) layers else 0, false) {
            gates.bytes.put(2 * layers - 1, 0)
            launch(n, 0)
        }
        keep(IntArray(n) { it })
    }

    // -- scoring many hypotheses in one pass

    override fun forwardHypotheses(tokens: IntArray, visible: IntArray, parents: IntArray, skip: SkipSet?): Pass {
        val past = this.tokens.size
        val reach = maxOf(furthest, past + tokens.size) - visible.min() + facts.taps
        val far = facts.convolutions.isNotEmpty() && (reach > STATE_ROWS || visible.min() < since)
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
        if (kv.ring > 0 && reach > LONGEST_PASS) throw InvalidRequest(
            "hypotheses reach $reach tokens back, but exact recent keys $LONGEST_PASS", "score hypotheses with attention f32, f16 or int8",
        )
        plan(tokens, past, visible, parents)
        return skipping(skip) { launch(tokens.size, tokens.size, keepHidden) }
    }

    override fun fill(chunk: IntArray): Matrix? {
        certain = tokens.size + chunk.size
        plan(chunk, tokens.size)
        return launch(chunk.size, 0, auxHidden = auxHiddenSink != null, read = chunk.size).auxHidden
    }
}

/**
 * Where the gates of a native graph stand: two a layer, four for what comes before and after, one a group of heads.  A target
 * whose layers are [tapped] has one more.  A drafter that is conditioned on it fuses what was tapped with [embed] on, and
 * goes on with its own hidden state with [load] on.  One that [attends] over memories has the last to fill them.
 */
internal class Gates(layers: Int, groups: Int, tapped: Boolean, hasPlanes: Boolean, attends: Boolean) {
    val embed = 2 * layers // look tokens up
    val load = embed + 1 // begin with the rows of `hidden_in` instead
    val hidden = embed + 2 // give the residual stream after the last layer
    val lm = embed + 3 // the model's own final norm and LM head
    private val first = embed + 4
    val auxHidden = first + groups // give the auxiliary hidden states, behind the columns of `hidden`
    val planes = auxHidden + if (tapped) 1 else 0 // read low planes: of 2 a layer, of the head, of the embedding
    val fill = planes + if (hasPlanes) 2 * layers + 2 else 0 // make keys and values of a memory of `hidden_in`, and nothing else
    val count = fill + if (attends) 1 else 0

    fun group(number: Int): Int = first + number
}
