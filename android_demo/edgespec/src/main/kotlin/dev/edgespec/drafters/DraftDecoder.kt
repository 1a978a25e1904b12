package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.runtimes.*

private const val MOST_OWED = 64 // rows whose auxiliary hidden states are kept while nothing is proposed
private const val ROUND = 12 // rows that a round may leave to be read, and its guesses be timed

/**
 * A small decoder conditioned on hidden states of the target: EAGLE-3 (Li et al., arXiv 2503.01840), or the layer for multi-token
 * prediction that some checkpoints hold (arXiv 2412.19437).
 *
 * Row i of its slot combines token i + 1 with the target's auxiliary hidden states at token i.  So n tokens and the states of all except
 * the pending one make n - 1 rows, and the last row predicts the first draft token.  Further steps use the drafter's own tokens and hidden
 * states, and their rows are dropped after the round.
 *
 * Invariant: the slot holds the rows before [at], or [deferredRows] more, and [auxHidden] the states of row [at] and all after it, up to
 * the row before the pending token.  [branch]: draft tokens per node, see [DraftModel]; [deferredRows]: rows that are left to the pass
 * that drafts.
 */
open class DraftDecoder(
    protected val target: Slot, protected val slot: Slot, override val name: String, branch: List<Int>?,
    private val deferredRows: Int = 1,
) : Drawer() {
    private val branch = branch ?: listOf(1)
    protected val decoder: DecoderPart = slot.model.part.decoder ?: throw EdgespecError("the drafter's part of the bundle is no decoder")
    protected val columns = decoder.columns
    private val wide = slot.hiddenSize
    protected val width = columns - wide // numbers of a row's auxiliary hidden states
    override val wants = setOf(State.AUX_HIDDEN)
    override val stepsAtOnce = deferredRows == 0
    final override var caughtUp = true
        private set
    private var known = Tokens() // committed, the pending one last
    private var at = 0
    private var auxHidden = FloatArray(0) // [rows * width]
    private val rows: Int get() = auxHidden.size / width
    private var sound = false // nothing failed since the rows were right
    private var states = FloatArray(0) // [1 + n, hidden]: its own, of the last token and of guesses

    override fun forecast(budget: Int) = Forecast(rows = rowsOf(branch, budget))

    /** Keep the rows that are still right: row i also needs token i + 1, if rows depend on tokens. */
    override fun begin(request: DraftRequest): Int {
        super.begin(request)
        val tokens = request.tokens
        val same = if (sound) known.commonPrefix(tokens) else 0
        slot.tokens.crop(maxOf(0, minOf(maxOf(same - deferredRows, 0), slot.tokens.size, tokens.size - 1 - deferredRows)))
        known = Tokens(tokens.toIntArray())
        at = slot.tokens.size
        auxHidden = FloatArray(0)
        sound = true
        return at
    }

    override fun absorb(first: Int, auxHidden: Matrix) {
        val here = at + rows
        if (first > here) throw EdgespecError("auxiliary hidden states of token $first: expected those of token $here")
        val skip = minOf(here - first, auxHidden.rows) // a target with states may read known tokens again
        this.auxHidden += auxHidden.copy(skip, auxHidden.rows - skip)
        settle(1)
    }

    /** A chain or tree; none where it was not shown all of the text, or where its context ends. */
    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val length = minOf(budget, slot.context - tokens.size)
        val count = tokens.size - 1
        val complete = sound && at + rows == count && known.at(-1) == tokens.at(-1)
        if (length < 1 || count < 1 || !complete) return Proposal.EMPTY
        sound = false
        val start = minOf(slot.tokens.size, count - deferredRows)
        caughtUp = count - start <= ROUND
        slot.tokens.crop(start)
        val made = draw(tokens, auxHidden.copyOfRange((start - at) * width, auxHidden.size), length)
        slot.tokens.crop(count)
        auxHidden = auxHidden.copyOfRange(auxHidden.size - deferredRows * width, auxHidden.size)
        at = count - deferredRows
        sound = true
        return made
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val found = output.auxHidden
        if (!sound || found == null) return
        auxHidden += (if (proposal.size > 0) found.only(verdict.rows) else found).copy()
        for (node in verdict.path) known.push(proposal.tokens[node])
        known.push(verdict.nextToken)
        settle(MOST_OWED)
    }

    override val reason: String get() = if (sound) "" else "the drafter was not shown this text from its beginning"

    /** Append the rows whose states are kept, except the deferred ones, if there are at least [most]. */
    private fun settle(most: Int) {
        val count = rows - deferredRows
        if (count < most) return
        slot.tokens.crop(at)
        append(known.slice(at + 1, at + 1 + count), auxHidden.copyOf(count * width))
        at += count
        auxHidden = auxHidden.copyOfRange(count * width, auxHidden.size)
    }

    protected open fun append(tokens: IntArray, auxHidden: FloatArray) = slot.absorbGiven(given(tokens, auxHidden, width), tokens.size)

    /** Append the last rows, of [auxHidden] [n * width] of the last n tokens, and guess at most [length] levels, appended too. */
    protected open fun draw(tokens: Tokens, auxHidden: FloatArray, length: Int): Proposal {
        fun run(guess: Int?, best: Boolean): Pass {
            val fed = if (guess == null) tokens.slice(tokens.size - auxHidden.size / width) else intArrayOf(guess)
            val given = if (guess == null) given(fed, auxHidden, width) else given(fed, states, wide)
            val output = slot.forwardGiven(given, fed.size, guess != null, best)
            slot.keep(IntArray(fed.size) { it })
            states = output.hidden!!.copy(fed.size - 1, 1)
            return output
        }
        val step = { guess: Int? -> run(guess, false).logits.let { whole(it, intArrayOf(it.rows - 1), slot) } }
        val drawing = drawing(tokens, length, target.vocabSize)
        if (branch == listOf(1)) {
            return drawing.chain({ step(it).row(0) }) { guess -> run(guess, true).best!!.let { it.tokens.last() to it.logits.last() } }
        }
        val level: Level = level@{ nodes, guesses, parents ->
            // siblings have no children
            if (nodes[0] < 0 || branch.size == 1) return@level step(if (nodes[0] < 0) null else guesses[nodes[0]])
            val above = FloatArray(guesses.size * wide)
            for (at in guesses.indices) states.copyInto(above, at * wide, (parents[at] + 1) * wide, (parents[at] + 2) * wide)
            val output = slot.forwardGiven(given(guesses, above, wide), guesses.size, true, false, parents)
            states = states.copyOf(wide) + output.hidden!!.copy()
            whole(output.logits, nodes, slot)
        }
        return drawing.tree(level, branch)
    }

    override fun dryStep(first: Boolean): () -> Any = {
        val rows = if (first) FIRST_ROWS else 1
        val numbers = if (first) width else wide
        slot.forwardGiven(given(IntArray(rows), FloatArray(rows * numbers), numbers), rows, !first, true)
    }

    /** [n * columns]: what the slot is given of [tokens] [n], and of their auxiliary or own hidden states, [n * numbers]. */
    protected fun given(tokens: IntArray, state: FloatArray, numbers: Int): FloatArray {
        val embedded = target.embed(tokens) // [n * hidden]
        val found = FloatArray(tokens.size * columns)
        for (row in tokens.indices) {
            embedded.copyInto(found, row * columns, row * wide, (row + 1) * wide)
            state.copyInto(found, row * columns + wide, row * numbers, (row + 1) * numbers)
        }
        return found
    }
}

/**
 * Drafts a [block] in one pass: DFlash (arXiv 2602.06036).  It has a row for every token, computed only from the target's states.  The
 * draft tokens of a block are independent: each is sampled from its own row.
 */
class BlockDecoder(target: Slot, slot: Slot, name: String, branch: List<Int>?, private val block: Int) :
    DraftDecoder(target, slot, name, branch, deferredRows = 0) {
    override fun draw(tokens: Tokens, auxHidden: FloatArray, length: Int): Proposal {
        if (auxHidden.isNotEmpty()) append(IntArray(auxHidden.size / width), auxHidden)
        val count = minOf(length, block - 1)
        val given = masked(tokens.at(-1), count)
        val best = if (params.plainGreedy) slot.forwardBlock(given, count + 1, true).best else null
        val rows = if (best == null) whole(slot.forwardBlock(given, count + 1, false).logits, IntArray(count) { it }, slot) else null
        var at = 0
        val likeliest = best?.let { { _: Int? -> it.tokens[at] to it.logits[at++] } }
        return drawing(tokens, count, target.vocabSize).chain({ rows!!.row(at++) }, best = likeliest)
    }

    override fun append(tokens: IntArray, auxHidden: FloatArray) {
        val given = FloatArray(tokens.size * columns)
        for (row in tokens.indices) auxHidden.copyInto(given, (row + 1) * columns - width, row * width, (row + 1) * width)
        slot.absorbGiven(given, tokens.size)
    }

    override fun dryStep(first: Boolean): () -> Any = {
        val known = slot.tokens.size
        if (first) append(IntArray(FIRST_ROWS), FloatArray(FIRST_ROWS * width))
        slot.forwardBlock(masked(0, block - 1), block, true)
        slot.tokens.crop(known)
    }

    /** [(1 + count) * columns]: the pending token, and masks where guesses will be. */
    private fun masked(pending: Int, count: Int): FloatArray =
        given(IntArray(1 + count) { if (it == 0) pending else decoder.mask!! }, FloatArray(0), 0)
}
