package dev.edgespec.decoding

/**
 * Guessed tokens hanging off the pending token, parents before children; a chain where [parents] is null.
 *
 * @property tokens [n], the guesses.
 * @property parents [n], index of each node's parent, -1 = the pending token.
 * @property probs [n][vocab], the draft distribution each token was drawn from; null = a deterministic guess.
 * @property replacement whether siblings were drawn with replacement.
 * @property bucket how sure the drafter is: adaptive control keeps one acceptance record per label.
 * @property resume [n + 1] rows, the pending token's first: layers that ran while the guesses were made.
 */
data class Proposal(
    val tokens: IntArray,
    val parents: IntArray? = null,
    val probs: Array<DoubleArray>? = null,
    val replacement: Boolean = true,
    val bucket: Int = 0,
    val resume: Resume? = null,
) {
    val size: Int get() = tokens.size

    fun parent(node: Int): Int = if (parents == null) node - 1 else parents[node]

    /** Number of nodes on the path from the pending token to [node], itself included. */
    fun depth(node: Int): Int {
        var count = 0
        var at = node
        while (at >= 0) {
            at = parent(at)
            count++
        }
        return count
    }

    /** The same proposal without nodes deeper than [budget]. */
    fun truncated(budget: Int): Proposal {
        if (parents == null) {
            if (size <= budget) return this
            return copy(
                tokens = tokens.copyOf(budget),
                probs = probs?.copyOfRange(0, budget),
                resume = resume?.truncated(budget + 1),
            )
        }
        val kept = (0 until size).filter { depth(it) <= budget }
        return if (kept.size == size) this else only(kept)
    }

    /** The nodes [kept], ascending, of a tree. */
    internal fun only(kept: List<Int>): Proposal {
        val new = IntArray(size + 1) { -1 } // new index of the parent, shifted by one
        kept.forEachIndexed { at, old -> new[old + 1] = at }
        return copy(
            tokens = IntArray(kept.size) { tokens[kept[it]] },
            parents = IntArray(kept.size) { new[parent(kept[it]) + 1] },
            probs = probs?.let { all -> Array(kept.size) { all[kept[it]] } },
            resume = null,
        )
    }

    /** Nodes whose parent is [node] (-1 = the pending token), in the drafter's order. */
    fun children(node: Int): IntArray {
        if (parents == null) return if (node + 1 < size) intArrayOf(node + 1) else NONE
        return (0 until size).filter { parents[it] == node }.toIntArray()
    }

    /** Depth of the deepest guess. */
    val deepest: Int get() = if (parents == null) size else (0 until size).maxOf(::depth)

    // arrays: identity is what two proposals have in common
    override fun equals(other: Any?): Boolean = this === other

    override fun hashCode(): Int = System.identityHashCode(this)

    companion object {
        val EMPTY = Proposal(IntArray(0))
    }
}

internal val NONE = IntArray(0)

/** Accepted nodes of a proposal, from the pending token down, and the token after them: recovered or bonus. */
class Verdict(val path: IntArray = NONE, val nextToken: Int = -1)
