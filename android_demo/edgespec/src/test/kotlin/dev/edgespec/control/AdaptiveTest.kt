package dev.edgespec.control

import dev.edgespec.decoding.*
import dev.edgespec.formulas.CostModel
import dev.edgespec.support.*
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Test

class AdaptiveTest {
    /** Offers as many guesses as it may, of a bucket that a recording names. */
    private class Guesser(override val cheap: Boolean, private val buckets: IntArray) : Drafter {
        override val name = "recorded"
        var round = 0

        override fun propose(tokens: Tokens, budget: Int) = Proposal(IntArray(budget), bucket = buckets[round])
    }

    @Test
    fun `decisions on recorded clocks are those of the Python side`() {
        val nothing = Pass(matrix(listOf(FloatArray(1))))
        for (case in vectors("adaptive")) {
            val cheap = case.flag("cheap")
            val inner = Guesser(cheap, case.ints("buckets"))
            val first = case["first_ms"].asDouble
            val curve = mapOf(1 to 1.0, 2 to 1.2, 8 to 2.1)
            val costs = CostModel(curve, if (cheap) 0.0 else 0.15, (first / 5).takeIf { it > 0 })
            val control = Adaptive(inner, costs, 8, case.flag("fallback"))
            // a seeded text never follows the clock
            val stats = Stats()
            control.begin(DraftRequest(Tokens(intArrayOf(1)), SamplingParams(temperature = if (case.flag("seeded")) 1.0 else 0.0, seed = 1), Noise(1), stats))
            val stand = case.ints("stand")
            val draft = case.doubles("draft_ms")
            val extra = case.doubles("row_ms")
            val (from, until) = case.ints("slow").toList()
            val lengths = IntArray(stand.size) { at ->
                val pace = if (at in from until until) 2.0 else 1.0
                inner.round = at
                val proposal = control.propose(Tokens(intArrayOf(1)), 1 + at % 8)
                val count = proposal.size
                control.observe(proposal, Verdict(IntArray(minOf(count, stand[at])) { it }, 0), nothing)
                val drafted = if (count > 0) pace * (first + draft[at] * count) else 0.0
                control.timed(proposal, RoundTime(drafted, pace * (5 + extra[at] * count), count + 1))
                count
            }
            assertArrayEquals(case.ints("lengths"), lengths, "cheap $cheap, seeded ${case["seeded"]}")
            assertEquals(case.int("probes"), control.probes)
            assertEquals(case.text("reason"), control.reason)
        }
    }
}
