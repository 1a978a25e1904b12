package dev.edgespec.control

import com.google.gson.JsonObject
import dev.edgespec.decoding.*
import dev.edgespec.decoding.Target
import dev.edgespec.formulas.CostModel
import dev.edgespec.support.*
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

private val NOTHING = Pass(matrix(listOf(FloatArray(1))))
private val CURVE = mapOf(1 to 1.0, 2 to 1.2, 8 to 2.1)
private const val BUDGET = 8

/** Named as Python's error, which the vectors quote. */
private class ValueError(message: String) : Exception(message)

/** A target that has only a size. */
private class Empty(override val trees: Boolean = true) : Target {
    override val vocabSize = 10
    override val context = 1000
    override val tokens = Tokens()

    override fun follow(tokens: Tokens) = 0
    override fun crop(length: Int) = 0
    override fun prefill(tokens: IntArray) = Unit
    override fun forward(tokens: IntArray, parents: IntArray?) = NOTHING
    override fun keep(rows: IntArray) = Unit
}

/** Offers as many guesses as a script says in each round; -1 = it fails. */
private class Scripted(override val name: String, override val cheap: Boolean, val script: IntArray) : Drafter {
    var round = 0
    val seen = intArrayOf(0, 0)

    override fun propose(tokens: Tokens, budget: Int): Proposal {
        if (script[round] < 0) throw ValueError("no idea")
        return Proposal(IntArray(minOf(script[round], budget)))
    }

    override fun observe(proposal: Proposal, verdict: Verdict, output: Pass) {
        seen[0] += proposal.size
        seen[1] += verdict.path.size
    }
}

class ControlTest {
    private fun control(case: JsonObject, inside: List<Scripted>): Drafter {
        val made = inside.map { Adaptive(it, CostModel(CURVE, if (it.cheap) 0.0 else 0.15)) }
        if (case.text("kind") == "chain") return Chain(if (case.flag("adaptive")) made else inside)
        val (cheap, costly) = made
        return Auto(listOf(Candidate("draft", 1.3, { costly }), Candidate("ngram", 1.0, { cheap }, true)), case.flag("adaptive"))
    }

    @Test
    fun `chains and method auto decide as on the Python side`() {
        for ((number, case) in vectors("controls").withIndex()) {
            val scripts = case["scripts"].asJsonArray.map { it.ints() }
            val stand = case["stand"].asJsonArray.map { it.ints() }
            val inside = listOf(Scripted("ngram", true, scripts[0]), Scripted("draft", false, scripts[1]))
            val control = control(case, inside)
            val stats = Stats()
            val guard = Guard(control, stats, emptySet(), Empty())
            val params = SamplingParams(temperature = if (case.flag("seeded")) 1.0 else 0.0, seed = 1)
            guard.begin(DraftRequest(Tokens(intArrayOf(1)), params, Noise(1), stats))
            val what = "case $number, ${case.text("kind")}"
            for (at in stand[0].indices) {
                inside.forEach { it.round = at }
                val proposal = guard.propose(Tokens(IntArray(at + 1) { 1 }), BUDGET)
                val count = proposal.size
                val by = if (count > 0) inside.indexOfFirst { it.name == guard.proposer } else -1
                assertEquals(case.ints("who")[at] to case.ints("counts")[at], by to count, "$what, round $at")
                val right = if (count > 0) minOf(count, stand[by][at]) else 0
                val draft = if (count == 0 || inside[by].cheap) 0.0 else 0.8 * count
                guard.observe(proposal, Verdict(IntArray(right) { it }, 0), NOTHING)
                guard.timed(proposal, RoundTime(draft, 5.0 + 0.3 * count, count + 1))
            }
            assertEquals(case["seen"].asJsonArray.map { it.ints().asList() }, inside.map { it.seen.asList() }, what)
            assertEquals(case.text("reason"), control.reason, what)
            assertEquals(case.flag("dropped"), stats.droppedReason != null, what)
            val switches = case["switches"].asJsonArray.map { one -> one.asJsonArray.map { it.asString } }
            assertEquals(switches, stats.switches.map { listOf("${it.round}", it.left, it.taken) }, what)
        }
    }

    @Test
    fun `the guard lets through what the Python side does`() {
        for (case in vectors("guards")) {
            val q = case["q"]?.asJsonArray?.doubles()?.map { sum -> DoubleArray(10) { sum / 10 } }?.toTypedArray()
            val given = Proposal(case.ints("tokens"), case.intsOrNull("parents"), q)
            val drafter = object : Drafter {
                override val name = "given"

                override fun propose(tokens: Tokens, budget: Int) = given
            }
            val stats = Stats()
            val guard = Guard(drafter, stats, setOf(9), Empty(case["trees"]?.asBoolean ?: true))
            val made = guard.propose(Tokens(intArrayOf(1)), case["budget"]?.asInt ?: BUDGET)
            assertEquals(case.flag("dropped"), stats.droppedReason != null, "$case")
            assertArrayEquals(case.ints("made"), made.tokens, "$case")
            assertArrayEquals(case.intsOrNull("above"), made.parents, "$case")
        }
    }

    /** Offers as many guesses as it may, of a bucket that a recording names; with [chances] it stops where they are too small. */
    private class Guesser(override val cheap: Boolean, private val buckets: IntArray, private val chances: List<DoubleArray>) : Drafter {
        override val name = "recorded"
        override val stops = chances.isNotEmpty()
        override var leastGain: ((Int) -> Double)? = null
        var round = 0

        override fun propose(tokens: Tokens, budget: Int): Proposal {
            var count = 1
            while (count < budget && !weak(count)) count++
            return Proposal(IntArray(count), bucket = buckets[round])
        }

        private fun weak(depth: Int) = leastGain?.let { chances[round].take(depth + 1).fold(1.0, Double::times) < it(depth) } ?: false
    }

    @Test
    fun `decisions on recorded clocks are those of the Python side`() {
        for (case in vectors("adaptive")) {
            val cheap = case.flag("cheap")
            val inner = Guesser(cheap, case.ints("buckets"), case["chances"].asJsonArray.map { it.asJsonArray.doubles() })
            val first = case["first_ms"].asDouble
            val costs = CostModel(CURVE, if (cheap) 0.0 else 0.15, (first / 5).takeIf { it > 0 })
            val control = Adaptive(inner, costs, 8, case.flag("fallback"))
            // a seeded text never follows the clock
            val stats = Stats()
            val params = SamplingParams(temperature = if (case.flag("seeded")) 1.0 else 0.0, seed = 1)
            control.begin(DraftRequest(Tokens(intArrayOf(1)), params, Noise(1), stats))
            val stand = case.ints("stand")
            val draft = case.doubles("draft_ms")
            val extra = case.doubles("row_ms")
            val (from, until) = case.ints("slow").toList()
            val lengths = IntArray(stand.size) { at ->
                val pace = if (at in from until until) 2.0 else 1.0
                inner.round = at
                val proposal = control.propose(Tokens(intArrayOf(1)), 1 + at % 8)
                val count = proposal.size
                control.observe(proposal, Verdict(IntArray(minOf(count, stand[at])) { it }, 0), NOTHING)
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
