package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.Drafter
import dev.edgespec.decoding.Matrix
import dev.edgespec.decoding.Noise
import dev.edgespec.decoding.Pass
import dev.edgespec.decoding.Proposal
import dev.edgespec.decoding.SamplingParams
import dev.edgespec.decoding.TappedTarget
import dev.edgespec.decoding.Tokens
import dev.edgespec.decoding.Verdict
import dev.edgespec.runtimes.Slot

private const val MOST_OWED = 64 // rows whose taps are kept while nothing is proposed

/**
 * A small decoder conditioned on hidden states of the target: EAGLE-3 (Li et al., arXiv 2503.01840), or the layer for
 * multi-token prediction that some checkpoints hold (arXiv 2412.19437).
 *
 * Its entry i is made of token i + 1 and of what was tapped of the target at token i, so that n tokens and the taps of all
 * but the pending one make n - 1 entries; the last of them gives the first guess.  It goes on with its own guesses and its
 * own hidden states, and what it made of those is forgotten after the round.
 *
 * Invariant: the slot holds the entries of the first [at] + 1 tokens, or of one token more, and [taps] the taps of row [at]
 * and all after it, up to the row before the pending token.  [branch]: guesses per node, see [DraftModel].
 */
class DraftDecoder(private val target: TappedTarget, private val slot: Slot, override val name: String, branch: List<Int>?) : Drafter {
    private val branch = branch ?: listOf(1)
    override val wantsTaps = true
    private val size = slot.hiddenSize
    private val columns = slot.model.part.decoder?.columns ?: throw EdgespecError("the drafter's part of the bundle is no decoder")
    private val width = columns - size // of the taps of a row
    private var known = Tokens() // committed, the pending one last
    private var at = 0
    private var taps = FloatArray(0) // [rows * width]
    private val rows: Int get() = taps.size / width
    private var states = FloatArray(0) // [1 + n, hidden]: its own, of the last token and of guesses
    private var sound = false // nothing failed since the entries were right
    private var params = SamplingParams()
    private var noise = Noise(0)

    override fun bind(params: SamplingParams, noise: Noise) {
        this.params = params
        this.noise = noise
    }

    override fun rows(budget: Int): IntArray = rowsOf(branch, budget)

    // -- the prompt

    /** Rows whose entries are kept: entry i needs token i + 1, too. */
    override fun known(tokens: Tokens): Int {
        val same = if (sound) known.commonPrefix(tokens) else 0
        slot.tokens.crop(maxOf(0, minOf(maxOf(same - 1, 0), slot.tokens.size, tokens.size - 2)))
        known = Tokens(tokens.toIntArray())
        at = slot.tokens.size
        taps = FloatArray(0)
        sound = true
        return at
    }

    /** Make entries of the rows of the prompt, but for the last: that one gives the first guess. */
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
        val start = minOf(slot.tokens.size, count - 1) // at least one row is run
        slot.tokens.crop(start)
        fun run(guess: Int?, best: Boolean): Pass {
            val fed = if (guess == null) tokens.slice(start + 1) else intArrayOf(guess)
            val given = if (guess == null) given(fed, taps, start - at, width) else given(fed, states, 0, size)
            val output = slot.forwardGiven(given, fed.size, guess != null, best)
            slot.keep(IntArray(fed.size) { it })
            states = output.hidden!!.copy(fed.size - 1, 1)
            return output
        }
        val step = { guess: Int? -> run(guess, false).logits.let { whole(it, intArrayOf(it.rows - 1)) } }
        val level: Level = level@{ nodes, guesses, parents ->
            // a comb goes on after its first choices
            if (nodes[0] < 0 || branch.size == 1) return@level step(if (nodes[0] < 0) null else guesses[nodes[0]])
            val above = FloatArray(guesses.size * size)
            for (at in guesses.indices) states.copyInto(above, at * size, (parents[at] + 1) * size, (parents[at] + 2) * size)
            val output = slot.forwardGiven(given(guesses, above, 0, size), guesses.size, true, false, parents)
            states = states.copyOf(size) + output.hidden!!.copy()
            whole(output.logits, nodes)
        }
        val best = { guess: Int? -> run(guess, true).best!!.let { it.tokens.last() to it.logits.last() } }
        val vocab = target.vocabSize
        val made = if (branch == listOf(1)) {
            drawChain({ step(it).row(0) }, tokens, length, vocab, params, noise, best = best)
        } else {
            drawTree(level, tokens, branch, length, vocab, params, noise)
        }
        slot.tokens.crop(count)
        taps = taps.copyOfRange(taps.size - width, taps.size)
        at = count - 1
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

    override val stepOnce: () -> Unit
        get() = { slot.forwardGiven(given(intArrayOf(0), FloatArray(size), 0, size), 1, true, true) }

    // -- entries

    /** Make entries of the rows with taps, but for the last one, where there are at least [most]. */
    private fun settle(most: Int) {
        val count = rows - 1
        if (count < most) return
        slot.tokens.crop(at)
        slot.absorbGiven(given(known.slice(at + 1, at + 1 + count), taps, 0, width), count)
        at += count
        taps = taps.copyOfRange(count * width, taps.size)
    }

    /** [n * columns]: what the slot is given of tokens [n], and of rows of [state] from [first] on, each [wide]. */
    private fun given(tokens: IntArray, state: FloatArray, first: Int, wide: Int): FloatArray {
        val embedded = target.embed(tokens) // [n * hidden]
        val found = FloatArray(tokens.size * columns)
        for (row in tokens.indices) {
            embedded.copyInto(found, row * columns, row * size, (row + 1) * size)
            state.copyInto(found, row * columns + size, (first + row) * wide, (first + row + 1) * wide)
        }
        return found
    }

    /** [rows, vocab]: some rows of the logits; a token without a column cannot be guessed. */
    private fun whole(logits: Matrix, rows: IntArray): Matrix {
        val named = slot.headTokens
        val vocab = target.vocabSize
        val found = FloatArray(rows.size * vocab) { Float.NEGATIVE_INFINITY }
        for ((at, row) in rows.withIndex()) {
            val from = logits.row(row)
            for (column in 0 until logits.columns) found[at * vocab + (named?.get(column) ?: column)] = from[column]
        }
        return Matrix.of(found, rows.size, vocab)
    }
}
