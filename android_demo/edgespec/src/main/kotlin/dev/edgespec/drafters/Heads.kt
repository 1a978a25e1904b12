package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.formulas.*
import dev.edgespec.runtimes.Slot
import kotlin.math.exp

internal const val MEDUSA_NODES = 16 // of a tree: beyond it rows cost more on a CPU than they bring

/** Trees of guesses (arXiv 2401.10774): head i guesses the token i + 1 after the pending one; verified by matching, lossless. */
open class Medusa(protected val target: Slot, private val group: String, paths: List<Path>) : Drafter {
    override val name: String get() = "medusa"
    override val wants = setOf(State.HIDDEN)
    override val stepsAtOnce: Boolean get() = true
    private val layout = Layout(paths)
    private val top = 1 + (layout.ranks.maxOrNull() ?: 0)
    private val trees = layout.parents.indices.any { layout.parents[it] != it - 1 }
    protected var hidden: FloatArray? = null // [hidden]: of the row that chose the pending token

    /** Forget the last request: the first round has no hidden state yet and is plain. */
    override fun begin(request: DraftRequest): Int? {
        hidden = null
        return null
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val state = hidden ?: return Proposal.EMPTY
        if (layout.heads.isEmpty()) return Proposal.EMPTY
        val best = best(state, top)
        val guesses = IntArray(layout.heads.size) { best.tokens[layout.heads[it] * best.top + layout.ranks[it]] }
        return Proposal(guesses, if (trees) layout.parents else null).truncated(budget)
    }

    /** [count, top]: each head's best tokens and their logits. */
    protected fun best(state: FloatArray, top: Int): Best {
        val best = target.forwardHeads(group, state, 1, top).best!!
        for (at in best.logits.indices step best.top) {
            if (!best.logits[at].isFinite()) throw EdgespecError("expected finite logits of heads $group, got NaN or infinity")
        }
        return best
    }

    override fun dryStep(first: Boolean) = { target.forwardHeads(group, FloatArray(target.hiddenSize), 1, maxOf(top, 1)) }.takeUnless { first }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val states = output.hidden ?: throw EdgespecError("the target gave no hidden states")
        hidden = states.copy(if (verdict.path.isEmpty()) 0 else verdict.path.last() + 1, 1)
    }
}

/**
 * Blockwise parallel decoding (arXiv 1811.03115): a chain of the heads' first guesses.  With [cycles] a block is refined
 * before it is verified: each cycle replaces the least certain guesses by what the model says there.
 */
class Blockwise(target: Slot, group: String, count: Int, private val cycles: Int = 0) : Medusa(target, group, chainOf(count, count)) {
    override val name: String get() = "blockwise"
    override val stepsAtOnce: Boolean get() = cycles == 0

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        if (cycles == 0) return super.propose(tokens, budget)
        val best = best(hidden ?: return Proposal.EMPTY, 2)
        val heads = best.tokens.size / best.top
        val count = minOf(heads, budget)
        // beyond the heads: the last guess again
        val block = IntArray(budget) { best.tokens[minOf(it, count - 1) * best.top] }
        // how sure each guess is: logits between the best and the second
        val margin = DoubleArray(budget) {
            if (it < count) (best.logits[it * best.top] - best.logits[it * best.top + best.top - 1]).toDouble() else 0.0
        }
        for (cycle in 0 until cycles) refine(tokens.at(-1), block, margin, -Math.floorDiv(-budget * (cycles - cycle), cycles))
        return Proposal(block)
    }

    private fun refine(pending: Int, block: IntArray, margin: DoubleArray, renewed: Int) {
        val logits = target.forward(intArrayOf(pending) + block).logits // row i guesses block[i]
        for (at in margin.indices.sortedBy { margin[it] }.take(renewed)) {
            val row = logits.row(at)
            val best = argmax(row)
            val second = row.indices.maxOf { if (it == best) Float.NEGATIVE_INFINITY else row[it] }
            block[at] = best
            margin[at] = (row[best] - second).toDouble()
        }
    }
}

internal const val PARADECODE_THRESHOLD = 0.6 // of a bundle that names none
private const val IN_FLIGHT = 8 // tokens

/**
 * Early exits whose skipped layers are made up for together: AdaDecode / ParaDecode (arXiv 2506.03700).  Nothing runs
 * twice, and keys and values end as in plain decoding.  [exits]: after how many layers, ascending.
 */
class ParaDecode(private val target: Slot, private val exits: List<Int>, private val threshold: Double) : Drawer() {
    override val name = "paradecode"

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val most = minOf(budget, IN_FLIGHT)
        val edges = listOf(0) + exits
        val segments = exits.size
        // waiting[s]: rows that have run s segments and wait for a row that continues, oldest first; [hidden] each
        val waiting = List(segments + 1) { ArrayList<FloatArray>() }
        val guesses = Tokens()
        val probs = ArrayList<DoubleArray>()
        while (true) {
            val newest = guesses.size
            var at = 0
            var sure = false
            while (at < segments && !sure) {
                val together = waiting[at].toList()
                waiting[at].clear()
                val out = if (at == 0) {
                    target.forwardLayers(intArrayOf(if (guesses.size > 0) guesses.at(-1) else tokens.at(-1)), newest, edges[1])
                } else {
                    target.forwardLayers(joined(together), together.size, newest + 1 - together.size, edges[at], edges[at + 1])
                }
                for (first in out.indices step target.hiddenSize) waiting[at + 1].add(out.copyOfRange(first, first + target.hiddenSize))
                at++
                sure = newest < most && ask(at - 1, waiting[at].last(), tokens, guesses, probs)
            }
            if (!sure) break
        }
        val done = waiting[segments]
        val begun = HeadStart(joined(done), done.size, exits.last())
        return Proposal(guesses.toIntArray(), null, if (probs.isEmpty()) null else probs.toTypedArray(), headStart = begun)
    }

    private fun joined(rows: List<FloatArray>): FloatArray = rows.reduce(FloatArray::plus)

    /** Ask an exit about the newest row; if it is confident, add its guess. */
    private fun ask(exit: Int, row: FloatArray, tokens: Tokens, guesses: Tokens, probs: MutableList<DoubleArray>): Boolean {
        val found = target.forwardHeads("exit.${exits[exit]}", row, 1).logits
        val logits = found.row(0)
        val best = argmax(logits)
        if (!logits[best].isFinite()) throw EdgespecError("expected finite logits of an exit, got NaN or infinity")
        // confidence is the distribution's, not the sampled token's: else the offer would depend on the sample
        val total = logits.sumOf { exp((it - logits[best]).toDouble()).toFloat().toDouble() }
        if (1.0 / total <= threshold) return false
        val named = target.headTokens
        if (params.plainGreedy) {
            guesses.push(if (named == null) best else named[best])
            return true
        }
        val sampled = params.rejects
        val prefix = Prefix(tokens, guesses)
        val choice = support(whole(found, intArrayOf(0), target, named).row(0), params, prefix)
        // separate noise for each round, as in Drawing
        guesses.push(choice.draw(request.noise, prefix.size, if (sampled) DRAFT + tokens.size else TARGET))
        if (sampled) probs.add(choice.spread(target.vocabSize))
        return true
    }

    override fun dryStep(first: Boolean) =
        { target.forwardHeads("exit.${exits[0]}", target.forwardLayers(intArrayOf(0), 0, exits[0]), 1) }.takeUnless { first }
}
