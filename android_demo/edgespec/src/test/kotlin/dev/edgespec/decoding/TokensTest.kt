package dev.edgespec.decoding

import dev.edgespec.support.matrix
import kotlin.random.Random
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Index of a text as it grows. */
class TokensTest {
    private val random = Random(1)

    private fun different(prefix: List<Int>): List<Int> = ArrayList<Int>().also { found -> eachDifferent(prefix, found::add) }

    @Test
    fun `every different token is named once, whatever is appended or cropped`() {
        val tokens = Tokens()
        repeat(300) {
            repeat(random.nextInt(5)) { tokens.push(random.nextInt(200)) }
            if (random.nextInt(6) == 0) tokens.crop(random.nextInt(tokens.size + 1))
            val path = List(random.nextInt(4)) { random.nextInt(200) }
            assertEquals(tokens.toSet().sorted(), different(tokens).sorted())
            assertEquals((tokens + path).toSet().sorted(), different(Prefix(tokens, path)).sorted())
            assertEquals(tokens + path, Prefix(tokens, path).toList())
            for (token in 0 until 200) assertEquals(token in tokens.toList(), tokens.has(token))
        }
    }

    @Test
    fun `what was appended is all that is looked at`() {
        val tokens = Tokens(intArrayOf(3, 1, 3))
        assertEquals(listOf(3, 1), different(tokens))
        tokens.push(intArrayOf(1, 2, 3))
        assertEquals(listOf(3, 1, 2), different(tokens)) // in order of first occurrence
        assertSame(tokens.seen().first, tokens.seen().first)
    }

    @Test
    fun `penalties have the same bits along chains and trees`() {
        val params = SamplingParams(repetitionPenalty = 1.3)
        val text = Tokens(List(30) { random.nextInt(20) })
        val guesses = IntArray(8) { random.nextInt(20) }
        val logits = matrix(List(9) { FloatArray(20) { random.nextFloat() * 4 - 2 } })
        for (parents in listOf(null, IntArray(8) { random.nextInt(-1, it) })) {
            val proposal = Proposal(guesses, parents)
            val rows = RowSampler(Pass(logits), text, proposal, params, Noise(0))
            for (row in 0 until 9) {
                val path = ArrayList<Int>()
                var node = row - 1
                while (node >= 0) {
                    path.add(0, guesses[node])
                    node = parents?.get(node) ?: (node - 1)
                }
                assertSame(text, rows.prefix(row).text)
                val expected = adjusted(logits.row(row), params, text.toList() + path)
                assertArrayEquals(expected, adjusted(logits.row(row), params, rows.prefix(row)))
                assertEquals(argmax(expected), rows.choose(row))
            }
        }
    }
}
