package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.decoding.Target
import dev.edgespec.runtimes.Slot
import kotlin.math.exp

internal const val PARADECODE_THRESHOLD = 0.6 // of a bundle that names none
private const val IN_FLIGHT = 8 // tokens

/**
 * Early exits whose skipped layers are made up for together: AdaDecode / ParaDecode (arXiv 2506.03700).  Nothing runs
 * twice, and keys and values end as in plain decoding.  [exits]: after how many layers, ascending.
 */
class ParaDecode(private val target: Slot, private val exits: List<Int>, private val threshold: Double) : Drafter {
    override val name = "paradecode"
    private var params = SamplingParams()
    private var noise = Noise(0)

    override fun begin(request: DraftRequest): Int? {
        params = request.params
        noise = request.noise
        return null
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val most = minOf(budget, IN_FLIGHT)
        val edges = listOf(0) + exits
        val segments = exits.size
        // waiting[s]: rows that have run s segments and wait for a row that goes on, oldest first; [hidden] each
        val waiting = List(segments + 1) { ArrayList<FloatArray>() }
        val guesses = Tokens()
        val probs = ArrayList<DoubleArray>()
        while (true) {
            val newest = guesses.size
            var at = 0
            var row: FloatArray? = null
            var sure = false
            while (at < segments && !sure) {
                val together = ArrayList(waiting[at])
                waiting[at].clear()
                val given = row
                val out = if (given == null) {
                    target.forwardLayers(intArrayOf(if (guesses.size > 0) guesses.at(-1) else tokens.at(-1)), newest, edges[1])
                } else {
                    together.add(given)
                    target.forwardLayers(joined(together), together.size, newest + 1 - together.size, edges[at], edges[at + 1])
                }
                val width = target.hiddenSize
                val rows = out.size / width
                for (i in 0 until rows - 1) waiting[at + 1].add(out.copyOfRange(i * width, (i + 1) * width))
                val latest = out.copyOfRange((rows - 1) * width, rows * width)
                row = latest
                at++
                sure = newest < most && ask(at - 1, latest, tokens, guesses, probs)
            }
            waiting[at].add(row!!)
            if (!sure) break
        }
        val done = waiting[segments]
        val begun = Begun(joined(done), done.size, exits.last())
        return Proposal(guesses.toIntArray(), null, if (probs.isEmpty()) null else probs.toTypedArray(), headStart = begun)
    }

    private fun joined(rows: List<FloatArray>): FloatArray {
        val width = rows[0].size
        val found = FloatArray(rows.size * width)
        rows.forEachIndexed { at, row -> row.copyInto(found, at * width) }
        return found
    }

    /** Ask an exit about the newest row; if it is confident, add its guess. */
    private fun ask(exit: Int, row: FloatArray, tokens: Tokens, guesses: Tokens, probs: MutableList<DoubleArray>): Boolean {
        val found = target.forwardHeads("exit.${exits[exit]}", row, 1)
        var logits = found.logits!!.row(0)
        val best = argmax(logits)
        if (!logits[best].isFinite()) throw EdgespecError("expected finite logits of an exit, got NaN or infinity")
        // confidence is the distribution's, not the drawn guess's: else the offer would depend on the draw
        val total = logits.sumOf { exp((it - logits[best]).toDouble()).toFloat().toDouble() }
        if (1.0 / total <= threshold) return false
        val named = found.tokens
        if (params.plainGreedy) {
            guesses.push(if (named == null) best else named[best])
            return true
        }
        if (named != null) {
            val whole = FloatArray(target.vocabSize) { Float.NEGATIVE_INFINITY }
            for (column in named.indices) whole[named[column]] = logits[column]
            logits = whole
        }
        val sampled = params.rejects
        val prefix = Prefix(tokens, guesses)
        val choice = support(logits, params, prefix)
        // noise of its own for each round, as in drawChain
        guesses.push(choice.draw(noise, prefix.size, if (sampled) DRAFT + tokens.size else TARGET))
        if (sampled) probs.add(choice.spread(target.vocabSize))
        return true
    }

    override fun dryStep(first: Boolean): Boolean {
        if (!first) target.forwardHeads("exit.${exits[0]}", target.forwardLayers(intArrayOf(0), 0, exits[0]), 1)
        return !first
    }
}

/** Rows of a pass whose layers before [layer] have run: [hidden] is the residual stream [rows, width] there. */
private class Begun(private val hidden: FloatArray, private val rows: Int, private val layer: Int) : HeadStart {
    override fun truncated(rows: Int): HeadStart =
        if (this.rows <= rows) this else Begun(hidden.copyOf(hidden.size / this.rows * rows), rows, layer)

    override fun check(target: Target, proposal: Proposal) {
        require(target is LayeredTarget) { "layers have run ahead, but the target cannot go on from them" }
        require(proposal.parents == null && rows == proposal.size + 1) { "expected ${proposal.size + 1} rows of a chain, got $rows" }
        // in the target's pass they would be its failure
        require(hidden.all { it.isFinite() }) { "the hidden states to go on from must be finite" }
    }

    override fun left(target: Target) = 1 - layer.toDouble() / (target as LayeredTarget).layers

    override fun forward(target: Target, tokens: IntArray, best: Boolean) = (target as LayeredTarget).forwardResumed(tokens, hidden, layer, best)
}
