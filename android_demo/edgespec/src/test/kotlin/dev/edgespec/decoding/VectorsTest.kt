package dev.edgespec.decoding

import dev.edgespec.support.*
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Noise, sampling and verification are the Python side's, number for number. */
class VectorsTest {
    @Test
    fun `noise has the bits of the Python side`() {
        for (case in vectors("noise")) {
            val noise = Noise(case["seed"].asLong)
            val position = case.int("position")
            val stream = case["stream"].asLong
            val bits = LongArray(5) { case["bits"].asJsonArray[it].asLong }
            assertArrayEquals(bits, noise.bits(position, case.ints("tokens"), stream), "$case")
            assertEquals(case["uniform"].asDouble, noise.uniform(position, stream), 0.0)
            assertClose(case.doubles("gumbel"), noise.gumbel(position, case.ints("tokens"), stream), "$case")
        }
    }

    @Test
    fun `supports, probabilities and drawn tokens are those of the Python side`() {
        for (case in vectors("sampling")) {
            val params = paramsOf(case["params"].asJsonObject)
            val seed = case.int("row")
            val found = support(row(seed, case.int("vocab")), params, case.ints("prefix").asList())
            assertEquals(case.int("size"), found.ids.size, "$case")
            assertArrayEquals(case.ints("ids"), found.ids.copyOf(case.ints("ids").size), "$case")
            assertClose(case.doubles("probs"), found.probs().copyOf(case.doubles("probs").size), "$case")
            val first = case.int("first_position")
            val drawn = IntArray(8) { found.draw(Noise(seed.toLong()), first + it) }
            assertArrayEquals(case.ints("drawn"), drawn, "$case")
        }
    }

    /** A rule as the command line writes it. */
    private fun accept(text: String, minBlock: Int): Accept {
        val numbers = text.substringAfter(":", "").split(",").mapNotNull { it.toDoubleOrNull() }
        return when (val rule = text.substringBefore(":")) {
            "top-k" -> Accept(rule, k = numbers[0].toInt(), minBlock = minBlock)
            "distance" -> Accept(rule, distance = numbers[0].toInt(), minBlock = minBlock)
            else -> Accept(rule, numbers.getOrElse(0) { 0.09 }, numbers.getOrElse(1) { 0.3 }, minBlock = minBlock)
        }
    }

    @Test
    fun `verdicts over chains, trees and blocks are those of the Python side`() {
        for (case in vectors("verify")) {
            val vocab = case.int("vocab")
            val seed = case["seed"].asLong
            val params = paramsOf(case["params"].asJsonObject, seed)
            val parents = case.intsOrNull("parents")
            val probs = case.intsOrNull("q_rows")?.map { softmax(row(it, vocab, 2.0)) }?.toTypedArray()
            val proposal = Proposal(case.ints("tokens"), parents, probs, replacement = parents == null)
            val pass = Pass(matrix(case.ints("rows").map { row(it, vocab, 2.0) }))
            val rows = RowSampler(pass, Tokens(case.ints("committed")), proposal, params, Noise(seed))
            val verdict = verify(proposal, rows, Noise(seed), accept(case.text("accept"), case.int("min_block")))
            assertArrayEquals(case.ints("path"), verdict.path, "$case")
            assertEquals(case.int("next_token"), verdict.nextToken, "$case")
        }
    }
}
