package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.formulas.Layout
import dev.edgespec.formulas.Path
import dev.edgespec.formulas.chainOf
import dev.edgespec.runtimes.Slot

internal const val MEDUSA_NODES = 16 // of a tree: beyond it rows cost more on a CPU than they bring

/**
 * Trees of heads' guesses (arXiv 2401.10774).  Head i sees the hidden state from which the pending token was chosen and
 * guesses the token i + 1 places after it; guesses are verified by matching: lossless for sampling too.
 */
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
        val best = (target as HeadTarget).forwardHeads(group, state, 1, top).best!!
        for (at in best.logits.indices step best.top) {
            if (!best.logits[at].isFinite()) throw EdgespecError("expected finite logits of heads $group, got NaN or infinity")
        }
        return best
    }

    override fun dryStep(first: Boolean): Boolean {
        if (!first) target.forwardHeads(group, FloatArray(target.hiddenSize), 1, maxOf(top, 1))
        return !first
    }

    /** Keep the hidden state of the row that chose the token now pending. */
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

    /** Replace the [renewed] least certain guesses. */
    private fun refine(pending: Int, block: IntArray, margin: DoubleArray, renewed: Int) {
        val logits = target.forward(intArrayOf(pending) + block).logits // row i guesses block[i]
        for (at in margin.indices.sortedBy { margin[it] }.take(renewed)) {
            val row = logits.row(at)
            val best = dev.edgespec.decoding.argmax(row)
            var second = Float.NEGATIVE_INFINITY
            for (i in row.indices) if (i != best && row[i] > second) second = row[i]
            block[at] = best
            margin[at] = (row[best] - second).toDouble()
        }
    }
}
