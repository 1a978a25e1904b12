package dev.edgespec.runtimes

import java.nio.ByteBuffer
import java.util.TreeMap

private const val LEAST = 16 // tokens: shorter beginnings are read again as fast
private const val ASKING = 32 // most tokens by which a template asks for an answer

/**
 * Checkpoints of one slot's states: copies at chosen lengths of a text, since what a state holds cannot be cut back.
 *
 * A text that goes back to before what the states hold is read on from the last checkpoint that is still a beginning of it.
 * A checkpoint holds the matrices, and of the ring only the rows that the next tokens see; keys and values lie where they
 * were written.
 */
internal class Checkpoints(private val facts: ModelFacts) {
    private var most = CHECKPOINTS // that are kept: the first one, usually the end of the system prompt, and the newest ones
    private val kept = TreeMap<Int, ByteArray>() // by tokens of the text
    private val row = 4 * stateWidth(facts)
    private val layer = (stateBytes(facts) / facts.convolutions.size).toInt()

    /** Tokens of the text at each. */
    val lengths: List<Int> get() = kept.keys.toList()

    /** Bytes of all. */
    val nbytes: Long get() = kept.values.sumOf { it.size.toLong() }

    /** Copy the states of a cache; they hold exactly so many tokens, more than any checkpoint's. */
    fun take(cache: ByteBuffer, tokens: Int) {
        crop(tokens - 1)
        if (tokens < LEAST || most == 0) return
        val states = ByteArray(checkpointBytes(facts).toInt())
        pieces(cache, tokens) { from, at, size -> from.get(states, at, size) }
        kept[tokens] = states
        bound()
    }

    /**
     * Put the states back as they were after the most tokens up to [most]; returns how many, 0: there are none.  Later ones
     * are dropped: the text goes on otherwise.
     */
    fun restore(cache: ByteBuffer, most: Int): Int {
        crop(most)
        val (length, states) = kept.lastEntry() ?: return 0
        pieces(cache, length) { to, at, size -> to.put(states, at, size) }
        return length
    }

    /** Forget those of more tokens. */
    fun crop(most: Int) = kept.tailMap(most, false).clear()

    /** Keep those of another text that has the first [most] tokens of this one; nobody writes into them. */
    fun share(other: Checkpoints, most: Int) {
        kept.clear()
        kept.putAll(other.kept.headMap(most, true))
        bound()
    }

    /** Keep at most so many from now on. */
    fun limit(most: Int) {
        this.most = most
        bound()
    }

    private fun bound() {
        while (kept.size > most) kept.remove(lengths[if (most > 0) minOf(1, most - 1) else 0])
    }

    /** Each layer's rows of the ring that the token after [tokens] sees, and what else there is of it. */
    private inline fun pieces(cache: ByteBuffer, tokens: Int, use: (ByteBuffer, Int, Int) -> Unit) {
        val part = cache.duplicate()
        val ring = STATE_ROWS * row
        var at = 0
        for (first in facts.convolutions.indices.map { it * layer }) {
            val rows = (tokens - facts.taps + 1 until tokens).map { first + it % STATE_ROWS * row to row }
            for ((place, size) in rows + (first + ring to layer - ring)) {
                part.position(place)
                use(part, at, size)
                at += size
            }
        }
    }
}

/**
 * Lengths of a prompt that other prompts are likely to begin with: its first turn, its last one, or all of it.  Templates end
 * a turn by a token that ends an answer, too.  What follows the last one only asks for the answer, and is often written
 * otherwise in the next prompt.
 */
internal fun endsOfTurns(tokens: IntArray, eos: Set<Int>): List<Int> {
    val ends = (1 until tokens.size).filter { tokens[it - 1] in eos }
    val whole = tokens.size - 1
    return (ends.take(1) + ends.takeLast(1) + if (whole - (ends.lastOrNull() ?: 0) > ASKING) listOf(whole) else emptyList()).distinct()
}

/** Length of a prompt without what only asks for an answer: up to its last turn's end, else all of it. */
internal fun endOfQuestion(tokens: IntArray, eos: Set<Int>): Int =
    (tokens.size downTo maxOf(tokens.size - ASKING, 0) + 1).firstOrNull { tokens[it - 1] in eos } ?: tokens.size
