package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.runtimes.Slot

private const val MOST_OWED = 64 // rows whose taps are kept while nothing is proposed
private const val ROUND = 12 // rows that a round may leave to be read, and its guesses be timed

/**
 * A small decoder conditioned on hidden states of the target: EAGLE-3 (Li et al., arXiv 2503.01840), the layer for multi-token
 * prediction that some checkpoints hold (arXiv 2412.19437), or DFlash (arXiv 2602.06036), a block of guesses in one pass.
 *
 * An entry i of the first two is made of token i + 1 and of what was tapped of the target at token i, so that n tokens and
 * the taps of all but the pending one make n - 1 entries; the last of them gives the first guess.  It goes on with its own
 * guesses and its own hidden states, and what it made of those is forgotten after the round.  Entries of a block's drafter
 * are made of taps alone.
 *
 * Invariant: the slot holds the entries of the rows before [at], or of `held` more, and [taps] the taps of row [at] and all
 * after it, up to the row before the pending token.  [branch]: guesses per node, see [DraftModel].
 */
class DraftDecoder(target: TappedTarget, private val slot: Slot, override val name: String, branch: List<Int>?) : Drafter {
    private val branch = branch ?: listOf(1)
    private val entries = entriesOf(target, slot, this.branch)
    private val held = entries.held
    private val width = entries.width
    override val wants = setOf(State.AUX_HIDDEN)
    override val stepsAtOnce = held == 0
    override var caughtUp = true
        private set
    private var known = Tokens() // committed, the pending one last
    private var at = 0
    private var taps = FloatArray(0) // [rows * width]
    private val rows: Int get() = taps.size / width
    private var sound = false // nothing failed since the entries were right
    private var params = SamplingParams()
    private var noise = Noise(0)

    override fun forecast(budget: Int) = Forecast(rows = rowsOf(branch, budget))

    // -- the prompt

    /** Rows whose entries are kept: entry i needs token i + 1, too, where entries are made of tokens. */
    override fun begin(request: DraftRequest): Int {
        params = request.params
        noise = request.noise
        val tokens = request.tokens
        val same = if (sound) known.commonPrefix(tokens) else 0
        entries.crop(maxOf(0, minOf(maxOf(same - held, 0), entries.size, tokens.size - 1 - held)))
        known = Tokens(tokens.toIntArray())
        at = entries.size
        taps = FloatArray(0)
        sound = true
        return at
    }

    /** Make entries of the rows of the prompt, but for the last where that one gives the first guess. */
    override fun absorb(first: Int, taps: Matrix) {
        val here = at + rows
        if (first > here) throw EdgespecError("taps of token $first: expected those of token $here")
        val skip = minOf(here - first, taps.rows) // a target with states may read again what is known here
        this.taps += taps.copy(skip, taps.rows - skip)
        settle(1)
    }

    // -- rounds

    /** A chain or tree; none where it was not shown all of the text, or where its context ends. */
    override fun propose(tokens: Tokens, budget: Int): Proposal {
        val length = minOf(budget, slot.context - tokens.size)
        val count = tokens.size - 1
        val complete = sound && at + rows == count && known.at(-1) == tokens.at(-1)
        if (length < 1 || count < 1 || !complete) return Proposal.EMPTY
        sound = false
        val start = minOf(entries.size, count - held)
        caughtUp = count - start <= ROUND
        entries.crop(start)
        val made = entries.draw(tokens, taps.copyOfRange((start - at) * width, taps.size), length, params, noise)
        entries.crop(count)
        taps = taps.copyOfRange(taps.size - held * width, taps.size)
        at = count - held
        sound = true
        return made
    }

    /** Keep the taps of the rows that were kept. */
    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        val found = output.taps
        if (!sound || found == null) return
        val kept = if (proposal.size > 0) IntArray(verdict.path.size + 1) { if (it == 0) 0 else verdict.path[it - 1] + 1 } else IntArray(found.rows) { it }
        taps += found.only(kept).copy()
        for (node in verdict.path) known.push(proposal.tokens[node])
        known.push(verdict.nextToken)
        settle(MOST_OWED)
    }

    override val reason: String get() = if (sound) "" else "the drafter was not shown this text from its beginning"

    override fun dryStep(first: Boolean): Boolean {
        if (first) entries.tryFirst() else entries.tryOnce()
        return true
    }

    /** Make entries of the rows with taps, but for those held back, where there are as many as [most]. */
    private fun settle(most: Int) {
        val count = rows - held
        if (count < most) return
        entries.crop(at)
        entries.absorb(known.slice(at + 1, at + 1 + count), taps.copyOf(count * width))
        at += count
        taps = taps.copyOfRange(count * width, taps.size)
    }
}
