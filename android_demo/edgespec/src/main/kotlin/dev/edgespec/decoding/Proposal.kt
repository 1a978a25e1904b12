package dev.edgespec.decoding

/** Part of the verifying pass that drafting has run: the layers before [layer], to the residual stream [rows, width] there. */
class HeadStart(private val hidden: FloatArray, private val rows: Int, private val layer: Int) {
    /** The first [rows] rows, the pending token's included. */
    fun truncated(rows: Int) = if (this.rows <= rows) this else HeadStart(hidden.copyOf(hidden.size / this.rows * rows), rows, layer)

    /** Reject a head start that does not fit [proposal], or that [target] cannot continue from. */
    fun check(target: LayeredTarget?, proposal: Proposal) {
        require(target != null) { "layers have run ahead, but the target cannot go on from them" }
        require(proposal.parents == null && rows == proposal.size + 1) { "expected ${proposal.size + 1} rows of a chain, got $rows" }
        require(hidden.all { it.isFinite() }) { "the hidden states to go on from must be finite" }
    }

    /** Share of the target's layers that the pass still runs. */
    fun left(target: LayeredTarget) = 1 - layer.toDouble() / target.layers

    /** Run the rest of the pass; [best]: only the likeliest token of each row. */
    fun forward(target: LayeredTarget, tokens: IntArray, best: Boolean) = target.forwardResumed(tokens, hidden, layer, best)
}

/**
 * Guessed tokens hanging off the pending token, parents before children; a chain where [parents] is null.
 *
 * @property tokens [n], the guesses.
 * @property parents [n], index of each node's parent, -1 = the pending token.
 * @property probs [n][vocab], the draft distribution each token was sampled from; null = a deterministic guess.
 * @property replacement whether siblings were sampled with replacement.
 * @property bucket how sure the drafter is: adaptive control keeps one acceptance record per label.
 * @property headStart layers of the pass that ran while the guesses were made; there may be one without guesses.
 */
data class Proposal(
    val tokens: IntArray, val parents: IntArray? = null, val probs: Array<DoubleArray>? = null,
    val replacement: Boolean = true, val bucket: Int = 0, val headStart: HeadStart? = null,
) {
    val size: Int get() = tokens.size
    val empty: Boolean get() = size == 0 && headStart == null // whether it has nothing to verify and no head start

    fun parent(node: Int): Int = if (parents == null) node - 1 else parents[node]

    /** Number of nodes on the path from the pending token to [node], itself included. */
    fun depth(node: Int): Int = if (parents == null) node + 1 else pathTo(node, ::parent).size

    /** The tokens from the pending one down to [node]. */
    fun path(node: Int): List<Int> = pathTo(node, ::parent).map { tokens[it] }

    fun truncated(budget: Int): Proposal {
        if (parents == null) {
            if (size <= budget) return this
            return copy(
                tokens = tokens.copyOf(budget), probs = probs?.copyOfRange(0, budget), headStart = headStart?.truncated(budget + 1),
            )
        }
        val kept = (0 until size).filter { depth(it) <= budget }
        return if (kept.size == size) this else only(kept)
    }

    fun pruned(leaves: List<Int>): Proposal {
        if (leaves.isEmpty()) return this
        if (parents == null) return truncated(leaves[0] + 1)
        val dead = HashSet<Int>()
        for (node in 0 until size) if (parents[node] in leaves || parents[node] in dead) dead.add(node)
        return only((0 until size).filter { it !in dead })
    }

    private fun only(kept: List<Int>): Proposal {
        val new = IntArray(size + 1) { -1 } // new index of the parent, shifted by one
        kept.forEachIndexed { at, old -> new[old + 1] = at }
        return copy(
            tokens = IntArray(kept.size) { tokens[kept[it]] }, parents = IntArray(kept.size) { new[parent(kept[it]) + 1] },
            probs = probs?.let { all -> Array(kept.size) { all[kept[it]] } }, headStart = null,
        )
    }

    /** Nodes whose parent is [node] (-1 = the pending token), in the drafter's order. */
    fun children(node: Int): IntArray {
        if (parents == null) return if (node + 1 < size) intArrayOf(node + 1) else NONE
        return (0 until size).filter { parents[it] == node }.toIntArray()
    }

    /** How many depths' guesses were tested, given the accepted [path]: its depths, and the rejected one's. */
    fun tested(path: IntArray): Int = path.size + if (children(path.lastOrNull() ?: -1).isNotEmpty()) 1 else 0

    /** The drafter's first choices below the accepted [path]. */
    fun refused(path: IntArray): IntArray {
        fun first(node: Int) = children(node).firstOrNull()
        return generateSequence(first(path.lastOrNull() ?: -1), ::first).map { tokens[it] }.toList().toIntArray()
    }

    /** Depth of the deepest draft token; 0 = none. */
    val deepest: Int get() = if (parents == null) size else (0 until size).maxOfOrNull(::depth) ?: 0

    companion object {
        val EMPTY = Proposal(IntArray(0))
    }
}

/** The path of nodes from the root down to [node]. */
internal fun pathTo(node: Int, parent: (Int) -> Int): List<Int> = generateSequence(node, parent).takeWhile { it >= 0 }.toList().reversed()

internal val NONE = IntArray(0)

/** Accepted nodes of a proposal, from the pending token down, and the token after them: recovered or bonus. */
class Verdict(val path: IntArray = NONE, val nextToken: Int = -1) {
    /** Rows of the pass that its tokens were chosen from. */
    val rows: IntArray get() = IntArray(path.size + 1) { if (it == 0) 0 else path[it - 1] + 1 }
}
