package dev.edgespec.drafters

import dev.edgespec.decoding.*

private const val EQUAL = 3 // tokens in a row that say where the text is

/**
 * Drafts from a text that the caller expects: an edited file is mostly unchanged (OpenAI's predicted outputs).  Drafting continues in
 * [expected] at the place of the text after the [prompt] tokens.  If the two differ, drafting stops until a few new tokens in a row occur
 * in the expected text again.
 */
class Predicted(private val expected: IntArray, private val prompt: Int) : Drafter {
    override val name = "predicted"
    override val cheap = true
    private var read = prompt
    private var at: Int? = 0 // index of the next draft token; null = not known
    private var last = 0 // where it was last
    private val places = (EQUAL..expected.size).groupBy { expected.slice(it - EQUAL until it) }

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        for (token in tokens.slice(read)) {
            at = at?.takeIf { it < expected.size && expected[it] == token }?.let { it + 1 }
            at?.let { last = it }
        }
        read = tokens.size
        if (at == null && read - prompt >= EQUAL) {
            val found = places[tokens.slice(read - EQUAL).asList()].orEmpty()
            at = found.firstOrNull { it >= last } ?: found.firstOrNull()
            at?.let { last = it }
        }
        val first = at ?: return Proposal.EMPTY
        val guesses = expected.copyOfRange(first, minOf(expected.size, first + budget))
        return if (guesses.isEmpty()) Proposal.EMPTY else Proposal(guesses)
    }
}
