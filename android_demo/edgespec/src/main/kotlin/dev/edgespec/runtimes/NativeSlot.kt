package dev.edgespec.runtimes

import ai.onnxruntime.OnnxJavaType
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import java.util.TreeSet

/**
 * A KV slot over native operators.  One node runs the whole pass: it is told, for every row, where it stands, what it sees
 * and where its key and value go (the plan), so a chain, a tree and a draft with layers left out are the same call.
 */
class NativeSlot(model: Model, context: Int?, reserve: Int) : NativeRunner(model, context, reserve), GreedyTarget {
    override val exactTrees get() = true
    private val tried = HashMap<Int, Int>() // tokens whose first layers were run, by place
    private val marks = TreeSet<Int>() // lengths of the text at which checkpoints are taken

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

    /** Whether exact keys or states that rows behind so many tokens would read are overwritten, or hold more. */
    private fun lost(same: Int): Boolean = (forgets && furthest - same > LONGEST_PASS) || held().any { it > same }

    override fun beginLike(other: Slot, length: Int): Int {
        check(other is NativeSlot)
        // what is moved by the next pass does not lie where it should yet
        val same = other.cropped(minOf(length, other.moves.minOfOrNull { it[1] } ?: length))
        if (same == 0) return crop(0)
        val back = other.lost(same) // to a checkpoint
        reserve(same)
        checkpoints?.crop(0)
        moves.clear()
        tokens.crop(0)
        tokens.push(other.tokens.slice(0, same))
        certain = same
        furthest = if (back) same else other.furthest
        val lent = other.bytes.duplicate()
        lent.limit(kv.nbytes(facts, same).toInt())
        lent.position(0)
        bytes.duplicate().also { it.position(0) }.put(lent)
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

    /** Keep the states of the text as it is now. */
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
        return left
    }

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

    override fun forwardResumed(tokens: IntArray, hidden: FloatArray, layer: Int, best: Boolean): Pass {
        if (layer !in 0..layers) throw InvalidRequest("resumed after $layer layers: expected 0 to $layers")
        loadRows(hidden, tokens.size)
        verifying(tokens, null)
        return parts(layer, layers, true, lmHead = true) {
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

    override fun forwardBlock(given: FloatArray, n: Int, best: Boolean): Pass {
        loadRows(given, n)
        verifying(IntArray(n), IntArray(n) { -1 })
        val plan = model.buffer("plan", OnnxJavaType.INT64, 6, n).longs
        for (row in 0 until n) {
            plan.put(POSITION * n + row, tokens.size + row.toLong())
            plan.put(VISIBLE * n + row, tokens.size + n.toLong())
        }
        return parts(0, layers, true, lmHead = true) { top(if (best) 1 else 0) { likeliest(launch(n, n - 1, first = 1)) } }
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
}
