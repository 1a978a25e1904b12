package dev.edgespec.drafters

import dev.edgespec.EdgespecError
import dev.edgespec.decoding.*
import dev.edgespec.runtimes.DecoderPart
import dev.edgespec.runtimes.FIRST_ROWS
import dev.edgespec.runtimes.Slot

/* What a drafter that is conditioned on a target makes of a text: entries in a slot, and guesses after them. */


/**
 * An entry for every token but the first, of that token and what was tapped of the target at the token before.  A token of
 * [slot] stands for an entry; [target] gives embeddings of tokens; [branch]: guesses per node, see [DraftModel].
 */
internal open class Entries(protected val target: TappedTarget, protected val slot: Slot, private val branch: List<Int> = listOf(1)) {
    protected val decoder: DecoderPart = slot.model.part.decoder ?: throw EdgespecError("the drafter's part of the bundle is no decoder")
    protected val columns = decoder.columns
    private val wide = slot.hiddenSize
    private var states = FloatArray(0) // [1 + n, hidden]: its own, of the last token and of guesses
    open val held = 1 // rows that are left to the pass that guesses

    /** Numbers of the taps of a row. */
    val width = columns - wide
    val size: Int get() = slot.tokens.size

    /** Forget all but the first so many. */
    fun crop(entries: Int) = slot.tokens.crop(entries)

    /** Append those of [tokens] [n] and [taps] [n * width]. */
    open fun absorb(tokens: IntArray, taps: FloatArray) = slot.absorbGiven(given(tokens, taps, width), tokens.size)

    /**
     * Append the last entries, of [taps] [n * width] of what the last n tokens make entries with, and guess after them, at
     * most [length] levels; entries of guesses are appended, too.
     */
    open fun draw(tokens: Tokens, taps: FloatArray, length: Int, params: SamplingParams, noise: Noise): Proposal {
        fun run(guess: Int?, best: Boolean): Pass {
            val fed = if (guess == null) tokens.slice(tokens.size - taps.size / width) else intArrayOf(guess)
            val given = if (guess == null) given(fed, taps, width) else given(fed, states, wide)
            val output = slot.forwardGiven(given, fed.size, guess != null, best)
            slot.keep(IntArray(fed.size) { it })
            states = output.hidden!!.copy(fed.size - 1, 1)
            return output
        }
        val step = { guess: Int? -> run(guess, false).logits.let { whole(it, intArrayOf(it.rows - 1)) } }
        val level: Level = level@{ nodes, guesses, parents ->
            // siblings have no children
            if (nodes[0] < 0 || branch.size == 1) return@level step(if (nodes[0] < 0) null else guesses[nodes[0]])
            val above = FloatArray(guesses.size * wide)
            for (at in guesses.indices) states.copyInto(above, at * wide, (parents[at] + 1) * wide, (parents[at] + 2) * wide)
            val output = slot.forwardGiven(given(guesses, above, wide), guesses.size, true, false, parents)
            states = states.copyOf(wide) + output.hidden!!.copy()
            whole(output.logits, nodes)
        }
        val best = { guess: Int? -> run(guess, true).best!!.let { it.tokens.last() to it.logits.last() } }
        val vocab = target.vocabSize
        if (branch == listOf(1)) return drawChain({ step(it).row(0) }, tokens, length, vocab, params, noise, best = best)
        return drawTree(level, tokens, branch, length, vocab, params, noise)
    }

    /** One step of nothing, to be timed. */
    open fun tryOnce() {
        slot.forwardGiven(given(intArrayOf(0), FloatArray(wide), wide), 1, true, true)
    }

    /** A round's first step, over what was accepted before, to be timed. */
    open fun tryFirst() {
        slot.forwardGiven(given(IntArray(FIRST_ROWS), FloatArray(FIRST_ROWS * width), width), FIRST_ROWS, false, true)
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

    /** [rows, vocab]: some rows of the logits; a token without a column cannot be guessed. */
    protected fun whole(logits: Matrix, rows: IntArray): Matrix {
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

/**
 * An entry for every token, of what was tapped of the target there alone, and a [block] of guesses in one pass: DFlash
 * (arXiv 2602.06036).  The guesses of a block do not know each other: each is drawn from its own row.
 */
internal class Blocks(target: TappedTarget, slot: Slot, private val block: Int) : Entries(target, slot) {
    override val held = 0

    override fun draw(tokens: Tokens, taps: FloatArray, length: Int, params: SamplingParams, noise: Noise): Proposal {
        if (taps.isNotEmpty()) absorb(IntArray(taps.size / width), taps)
        val count = minOf(length, block - 1)
        val given = masked(tokens.at(-1), count)
        val best = if (params.plainGreedy) slot.forwardBlock(given, count + 1, true).best else null
        val rows = if (best == null) whole(slot.forwardBlock(given, count + 1, false).logits, IntArray(count) { it }) else null
        var at = 0
        return drawChain(
            { rows!!.row(at++) }, tokens, count, target.vocabSize, params, noise,
            best = best?.let { { _ -> it.tokens[at] to it.logits[at++] } },
        )
    }

    override fun absorb(tokens: IntArray, taps: FloatArray) {
        val given = FloatArray(tokens.size * columns)
        for (row in tokens.indices) taps.copyInto(given, (row + 1) * columns - width, row * width, (row + 1) * width)
        slot.absorbGiven(given, tokens.size)
    }

    override fun tryOnce() {
        slot.forwardBlock(masked(0, block - 1), block, true)
    }

    override fun tryFirst() {
        val known = slot.tokens.size
        absorb(IntArray(FIRST_ROWS), FloatArray(FIRST_ROWS * width))
        tryOnce()
        crop(known)
    }

    /** [(1 + count) * columns]: the pending token, and masks where guesses will be. */
    private fun masked(pending: Int, count: Int): FloatArray =
        given(IntArray(1 + count) { if (it == 0) pending else decoder.mask!! }, FloatArray(0), 0)
}

/** Those of the slot's kind. */
internal fun entriesOf(target: TappedTarget, slot: Slot, branch: List<Int>): Entries =
    slot.model.part.decoder?.block?.let { Blocks(target, slot, it) } ?: Entries(target, slot, branch)
