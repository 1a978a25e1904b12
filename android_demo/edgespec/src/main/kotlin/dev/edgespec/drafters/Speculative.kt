package dev.edgespec.drafters

import dev.edgespec.decoding.*
import dev.edgespec.runtimes.Slot

// tokens the draft has not seen yet are fed in one pass with the pending one up to this many; more are prefilled first
private const val FEED = 4
private const val BEHIND = 32 // if the draft missed at least this many tokens, it reads them by pieces before it drafts

/**
 * Draws chains or trees from a draft model (Leviathan arXiv 2211.17192, Chen arXiv 2302.01318).  Its slot follows the
 * committed tokens by longest common prefix.  [branch]: guesses per node; null or [1] = a chain, one number =
 * a chain of nodes with siblings, several = a full tree by depth.
 */
class DraftModel(private val model: Slot, private val vocabSize: Int, branch: List<Int>? = null) : Drawer() {
    override val name = "speculative"
    private val branch = branch ?: listOf(1)
    private val trees = this.branch != listOf(1)
    private var least = 0 // tokens that are read by pieces; 0 = the slot may hold another text
    private var text: Tokens? = null // the slot was found to begin with the first [common] of its tokens
    private var common = 0
    override var caughtUp = true
        private set

    init { model.revocable = true }

    override fun forecast(budget: Int) = Forecast(rows = rowsOf(branch, budget))

    override fun begin(request: DraftRequest): Int? {
        least = 0
        text = null
        return super.begin(request)
    }

    /** Crop the slot to its common prefix with all except the pending token -> its length; a text only grows within a request. */
    private fun follow(tokens: Tokens): Int {
        val same = model.tokens.commonPrefix(tokens, if (tokens === text) common else 0)
        common = model.crop(minOf(same, tokens.size - 1))
        text = tokens
        return common
    }

    /** Whether there is a padding row of the target's vocabulary, which the draft lacks; rows of pictures are no such. */
    private fun unknown(tokens: IntArray) = tokens.any { it in model.vocabSize until INSERTED }

    /** Read by pieces, except the last tokens, which [propose] reads. */
    override fun prefill(tokens: Tokens, most: Int): Int {
        if (least == 0) {
            follow(tokens)
            least = FEED
        }
        val known = model.tokens.size // it may also hold rejected draft tokens, but few
        val left = tokens.size - 1 - known
        if (left < FEED) least = maxOf(least, BEHIND)
        if (left < least) return 0
        if (most > 0) {
            if (tokens.size >= model.context || unknown(tokens.slice(known))) {
                least = Int.MAX_VALUE // it proposes nothing
                return 0
            }
            model.prefill(tokens.slice(known, known + minOf(left, most)))
        }
        return maxOf(left - most, 0)
    }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val length = minOf(budget, model.context - tokens.size)
        if (length < 1) return Proposal.EMPTY
        var known = follow(tokens)
        if (unknown(tokens.slice(known))) return Proposal.EMPTY
        caughtUp = tokens.size - known <= FEED
        if (!caughtUp) {
            model.prefill(tokens.slice(known, tokens.size - 1))
            known = tokens.size - 1
        }
        return if (trees) tree(tokens, known, length) else chain(tokens, known, length)
    }

    private fun chain(tokens: Tokens, known: Int, length: Int): Proposal {
        fun feed(guess: Int?) = if (guess == null) tokens.slice(known) else intArrayOf(guess)
        val step = { guess: Int? -> feed(guess).let { run(it, it.size).row(0) } }
        // the likeliest token may not be one of the draft's padding, which the target does not know
        val greedy = { guess: Int? ->
            val fed = feed(guess)
            val found = model.forwardBest(fed).best!!
            model.keep(IntArray(fed.size) { it })
            found.tokens.last() to found.logits.last()
        }
        return drawing(tokens, length, vocabSize).chain(step, best = greedy.takeIf { model.model.native && model.vocabSize <= vocabSize })
    }

    /** A chain with siblings, at the cost of its first choices, or a full tree, whose nodes run again at every depth. */
    private fun tree(tokens: Tokens, known: Int, length: Int): Proposal {
        val single = branch.size == 1 // one node of each depth continues
        val levels = widthsOf(branch, length).size
        val level: Level = level@{ nodes, guesses, parents ->
            if (nodes[0] < 0) {
                val feed = tokens.slice(known)
                // the rows of a tree need a common root: the pending token, which therefore stays out of the slot
                return@level run(feed, feed.size - if (!single && levels > 1) 1 else 0)
            }
            if (single) return@level run(intArrayOf(guesses[nodes[0]]), 1)
            val above = IntArray(guesses.size + 1) { if (it == 0) -1 else parents[it - 1] + 1 }
            val logits = model.forward(intArrayOf(tokens.at(-1)) + guesses, above).logits
            val rows = whole(logits, IntArray(nodes.size) { nodes[it] + 1 }, model)
            val path = intArrayOf(0) + pathTo(nodes[0], parents::get).map { it + 1 }
            // the deepest that is run: what the first choices were stays for the next round
            if (path.size == levels) model.keep(path)
            rows
        }
        return drawing(tokens, length, vocabSize).tree(level, branch)
    }

    /** Logits [1, vocab] after a chain of rows, of which the slot keeps the first [kept]. */
    private fun run(feed: IntArray, kept: Int): Matrix {
        val logits = model.forward(feed).logits
        model.keep(IntArray(kept) { it })
        return whole(logits, intArrayOf(logits.rows - 1), model)
    }

    override fun dryStep(first: Boolean) = { model.forward(intArrayOf(0)) }.takeUnless { first }
}
