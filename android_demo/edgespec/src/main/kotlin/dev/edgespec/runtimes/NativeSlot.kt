package dev.edgespec.runtimes

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.nio.ByteBuffer
import java.util.TreeSet

/** A KV slot over native operators: one node runs the whole pass, given each row's position and the tokens that it sees. */
class NativeSlot(model: Model, context: Int?, reserve: Int, encodes: Boolean = false, beams: Int = 1) :
    NativePasses(model, context, encodes, beams) {
    override val exactTrees get() = true
    // coded keys are exact only lately
    private val checkpoints = if (facts.convolutions.isNotEmpty() && kv.ring == 0) Checkpoints(facts) else null
    override val stateful = kv.ring > 0 || facts.convolutions.isNotEmpty() // exact recent keys and states are not kept
    private var since = 0 // tokens of the text before which they are not there either
    private val tried = HashMap<Int, Int>() // tokens whose first layers were run, by place
    private val marks = TreeSet<Int>() // lengths of the text at which checkpoints are taken

    init {
        reserve(reserve)
    }

    override val kvBytes: Long get() = (checkpoints?.nbytes ?: 0) + cacheBytes

    override fun takeUp(tokens: IntArray, furthest: Int) {
        super.takeUp(tokens, furthest)
        checkpoints?.crop(0)
        moves.clear()
        certain = tokens.size
        this.furthest = furthest
        since = 0
    }

    override fun standIn(tokens: Int) {
        super.standIn(tokens)
        places().forEach { bytes.putLong(it, tokens.toLong()) }
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
        // tokens that the next pass moves are not in place yet
        val same = other.cropped(minOf(length, other.moves.minOfOrNull { it[2] } ?: length))
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

    /** Forget the text after the last checkpoint of at most [most] tokens, or all of it; returns its length. */
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
        moves.add(intArrayOf(0, from, to))
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

    override fun forwardHeads(group: String, hidden: FloatArray, rows: Int, top: Int): Pass {
        val (number, found) = group(group)
        nowhere(rows)
        loadRows(hidden, rows)
        val output = parts(0, 0, true, number = number) {
            top(top) { launch(rows, rows, times = found.count, columns = headSize) }
        }
        return output.copy(best = output.best?.named(headTokens))
    }

    override fun forwardLayers(tokens: IntArray, offset: Int, last: Int): FloatArray {
        val past = this.tokens.size + offset
        if (facts.layerEmbedding > 0) tokens.forEachIndexed { at, token -> tried[past + at] = token }
        plan(tokens, past)
        return parts(0, last, false) { launch(tokens.size, 0, hidden = true).hidden!!.copy() }
    }

    override fun forwardLayers(hidden: FloatArray, rows: Int, offset: Int, first: Int, last: Int): FloatArray {
        val past = tokens.size + offset
        // layers with token embeddings need the tokens again
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
        return top(1, run).let { if (model.part.cut) it.copy(best = it.best!!.named(headTokens)) else it }
    }

    /** As tokens; -1 where more were requested than exist. */
    private fun Best.named(tokens: IntArray?) =
        if (tokens == null) this else Best(IntArray(this.tokens.size) { tokens.getOrElse(this.tokens[it]) { -1 } }, logits, top)

    // -- a drafter conditioned on a target

    override fun embed(tokens: IntArray): FloatArray {
        plan(tokens, 0) // no layer runs: the rows are not stored
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
        // for a block only keys and values; otherwise the output of the last MLP is not read
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

    /** Each right after the text that it sees: states that far back are not kept, so the text is run again. */
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
