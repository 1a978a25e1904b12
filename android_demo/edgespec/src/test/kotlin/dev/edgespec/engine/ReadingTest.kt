package dev.edgespec.engine

import dev.edgespec.decoding.*
import dev.edgespec.support.*
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

private const val PIECE = 16

class ReadingTest {
    @Test
    fun `chunks of a prompt are as large as in Python`() {
        for (case in vectors("pace")) {
            val pace = Pace()
            case["steps"].asJsonArray.map { it.asJsonArray }.forEachIndexed { at, step ->
                assertEquals(step[2].asInt, pace.rows(step[0].asInt, step[1].asInt == 1), "chunk $at")
                pace.took(step[2].asInt, step[3].asDouble)
            }
        }
    }

    /** Asks the drafter inside from a length of the text on. */
    private class Late(private val inner: Drafter, private val from: Int) : Drafter by inner {
        val behind = ArrayList<Int>() // tokens that were left to be read, by piece
        val caughtUpAfter = ArrayList<Boolean>()

        override fun prefill(tokens: Tokens, most: Int): Int {
            if (tokens.size < from) return 0
            if (most > 0) behind.add(inner.prefill(tokens, 0))
            return inner.prefill(tokens, most)
        }

        override fun propose(tokens: Tokens, budget: Int): Proposal {
            if (tokens.size < from) return Proposal.EMPTY
            return inner.propose(tokens, budget).also { caughtUpAfter.add(inner.caughtUp) }
        }
    }

    @Test
    fun `a prompt is read by pieces, and so is what a draft missed in the middle of a text`() = loadNative().use { engine ->
        val prompt = IntArray(70) { 5 + it % 23 }
        val plain = engine.generate(prompt, Settings("ar", 120, ignoreEos = true)).tokens
        engine.trim(Trim.ALL)
        val lane = engine.lanes.take(Tokens())
        val bare = Settings("speculative", adaptive = false)
        val late = Late(lane.drafter(engine.chooseFor(bare), bare), prompt.size + 60)
        val rounds = Rounds(lane.target, late, prompt, Settings(maxNewTokens = 120), gamma = 4)
        var pieces = 0
        while (rounds.unread() != null) {
            assertFalse(rounds.unread()!!.draft)
            rounds.read(PIECE)
            pieces++
        }
        assertEquals((prompt.size - 1 + PIECE - 1) / PIECE, pieces)
        val text = ArrayList<Int>()
        while (rounds.finish == null) {
            while (rounds.unread() != null) rounds.read(PIECE)
            text.addAll(rounds.next().tokens.toList())
        }
        engine.lanes.giveBack(lane)
        assertArrayEquals(plain, text.toIntArray())
        assertEquals(List(8) { prompt.size + 59 - PIECE * it } + 0, late.behind) // one is left to the proposal
        assertTrue(late.caughtUpAfter.isNotEmpty() && late.caughtUpAfter.all { it })
    }
}
