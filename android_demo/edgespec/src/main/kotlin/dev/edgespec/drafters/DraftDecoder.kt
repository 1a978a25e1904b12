package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.runtimes.*

private const val MOST_OWED = 64 // rows whose taps are kept while nothing is proposed
private const val ROUND = 12 // rows that a round may leave to be read, and its guesses be timed

/**
 * A small decoder conditioned on hidden states of the target: EAGLE-3 (Li et al., arXiv 2503.01840), or the layer for
 * multi-token prediction that some checkpoints hold (arXiv 2412.19437).
 *
 * Entry i of its slot is made of token i + 1 and of what was tapped of the target at token i, so that n tokens and the taps of
 * all but the pending one make n - 1 entries; the last of them gives the first guess.  It goes on with its own guesses and its
 * own hidden states, and what it made of those is forgotten after the round.
 *
 * Invariant: the slot holds the entries of the rows before [at], or of [held] more, and [taps] the taps of row [at] and all
 * after it, up to the row before the pending token.  [branch]: guesses per node, see [DraftModel]; [held]: rows that are left
 * to the pass that guesses.
 */
open class DraftDecoder(
    protected val target: TappedTarget, protected val slot: Slot, override val name: String, branch: List<Int>?, private val held: Int = 1,
) : Drawer() {
    private val branch = branch ?: listOf(1)
    protected val decoder: DecoderPart = slot.model.part.decoder ?: throw EdgespecError("the drafter's part of the bundle is no decoder")
    protected val columns = decoder.columns
    private val wide = slot.hiddenSize
    protected val width = columns - wide // numbers of the taps of a row
    override val wants = setOf(State.AUX_HIDDEN)
    override val stepsAtOnce = held == 0
    final override var caughtUp = true
        private set
    private var known = Tokens() // committed, the pending one last
    private var at = 0
    private var taps = FloatArray(0) // [rows * width]
    private val rows: Int get() = taps.size / width
    private var sound = false // nothing failed since the entries were right
    private var states = FloatArray(0) // [1 + n, hidden]: its own, of the last token and of guesses

    override fun forecast(budget: Int) = Forecast(rows = rowsOf(branch, budget))

    /** Rows whose entries are kept: entry i needs token i + 1, too, where entries are made of tokens. */
    override fun begin(request: DraftRequest): Int {
        super.begin(request)
        val tokens = request.tokens
        val same = if (sound) known.commonPrefix(tokens) else 0
        slot.tokens.crop(maxOf(0, minOf(maxOf(same - held, 0), slot.tokens.size, tokens.size - 1 - held)))
        known = Tokens(tokens.toIntArray())
        at = slot.tokens.size
        taps = FloatArray(0)
        sound = true
        return at
    }

    override fun absorb(first: Int, taps: Matrix) {
        val here = at + rows
        if (first > here) throw EdgespecError("taps of token $first: expected those of token $here")
        val skip = minOf(here - first, taps.rows) // a target with states may read again what is known here
        this.taps += taps.copy(skip, taps.rows - skip)
        settle(1)
    }

    /** A chain or tree; none where it was not shown all of the text, or where its context ends. */
    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val length = minOf(budget, slot.context - tokens.size)
        val count = tokens.size - 1
        val complete = sound && at + rows == count && known.at(-1) == tokens.at(-1)
        if (length < 1 || count < 1 || !complete) return Proposal.EMPTY
        sound = false
        val start = minOf(slot.tokens.size, count - held)
        caughtUp = count - start <= ROUND
        slot.tokens.crop(start)
        val made = draw(tokens, taps.copyOfRange((start - at) * width, taps.size), length)
        slot.tokens.crop(count)
        taps = taps.copyOfRange(taps.size - held * width, taps.size)
        at = count - held
        sound = true
        return made
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val found = output.taps
        if (!sound || found == null) return
        taps += (if (proposal.size > 0) found.only(verdict.rows) else found).copy()
        for (node in verdict.path) known.push(proposal.tokens[node])
        known.push(verdict.nextToken)
        settle(MOST_OWED)
    }

    override val reason: String get() = if (sound) "" else "the drafter was not shown this text from its beginning"

    /** Make entries of the rows with taps, but for those held back, where there are as many as [most]. */
    private fun settle(most: Int) {
        val count = rows - held
        if (count < most) return
        slot.tokens.crop(at)
        append(known.slice(at + 1, at + 1 + count), taps.copyOf(count * width))
        at += count
        taps = taps.copyOfRange(count * width, taps.size)
    }

    protected open fun append(tokens: IntArray, taps: FloatArray) = slot.absorbGiven(given(tokens, taps, width), tokens.size)

    /** Append the last entries, of [taps] [n * width] of the last n tokens, and guess at most [length] levels, appended too. */
    protected open fun draw(tokens: Tokens, taps: FloatArray, length: Int): Proposal {
        fun run(guess: Int?, best: Boolean): Pass {
            val fed = if (guess == null) tokens.slice(tokens.size - taps.size / width) else intArrayOf(guess)
            val given = if (guess == null) given(fed, taps, width) else given(fed, states, wide)
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

    override fun dryStep(first: Boolean): Boolean {
        val rows = if (first) FIRST_ROWS else 1
        val numbers = if (first) width else wide
        slot.forwardGiven(given(IntArray(rows), FloatArray(rows * numbers), numbers), rows, !first, true)
        return true
    }

    /** [n * columns]: what the slot is given of [tokens] [n], and of their taps or hidden states, [n * numbers]. */
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
 * Guesses a [block] in one pass: DFlash (arXiv 2602.06036).  An entry for every token, of what was tapped of the target there
 * alone.  The guesses of a block do not know each other: each is drawn from its own row.
 */
class BlockDecoder(target: TappedTarget, slot: Slot, name: String, branch: List<Int>?, private val block: Int) :
    DraftDecoder(target, slot, name, branch, held = 0) {
    override fun draw(tokens: Tokens, taps: FloatArray, length: Int): Proposal {
        if (taps.isNotEmpty()) append(IntArray(taps.size / width), taps)
        val count = minOf(length, block - 1)
        val given = masked(tokens.at(-1), count)
        val best = if (params.plainGreedy) slot.forwardBlock(given, count + 1, true).best else null
        val rows = if (best == null) whole(slot.forwardBlock(given, count + 1, false).logits, IntArray(count) { it }, slot) else null
        var at = 0
        val likeliest = best?.let { { _: Int? -> it.tokens[at] to it.logits[at++] } }
        return drawing(tokens, count, target.vocabSize).chain({ rows!!.row(at++) }, best = likeliest)
    }

    override fun append(tokens: IntArray, taps: FloatArray) {
        val given = FloatArray(tokens.size * columns)
        for (row in tokens.indices) taps.copyInto(given, (row + 1) * columns - width, row * width, (row + 1) * width)
        slot.absorbGiven(given, tokens.size)
    }

    override fun dryStep(first: Boolean): Boolean {
        val known = slot.tokens.size
        if (first) append(IntArray(FIRST_ROWS), FloatArray(FIRST_ROWS * width))
        slot.forwardBlock(masked(0, block - 1), block, true)
        slot.tokens.crop(known)
        return true
    }

    /** [(1 + count) * columns]: the pending token, and masks where guesses will be. */
    private fun masked(pending: Int, count: Int): FloatArray =
        given(IntArray(1 + count) { if (it == 0) pending else decoder.mask!! }, FloatArray(0), 0)
}
