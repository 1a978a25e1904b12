package dev.edgespec.drafters

import com.google.gson.JsonObject
import dev.edgespec.decoding.*
import dev.edgespec.formulas.*
import dev.edgespec.support.*
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

private const val VOCAB = 40
private val TEXT = intArrayOf(3, 7, 7, 1, 12)

/** Guesses and beliefs of drafters are the Python side's, number for number. */
class DrawingTest {
    private fun logits(seed: Int, last: Int?) = row(131 * seed + if (last == null) 0 else last + 1, VOCAB, 3.0)

    private fun draw(case: JsonObject): Proposal {
        val (seed, length) = case.int("seed") to case.int("length")
        val shape = case["shape"].asJsonObject
        val params = paramsOf(case["params"].asJsonObject, seed.toLong())
        val (text, noise) = Tokens(TEXT) to Noise(seed.toLong())
        val weak: Weak? = shape["stop"]?.asDouble?.let { stop -> { it < stop } }
        val drawing = Drawing(text, length, VOCAB, params, noise)
        val step = { last: Int? -> logits(seed, last) }
        val level: Level = { nodes, guesses, _ -> matrix(nodes.map { step(if (it < 0) null else guesses[it]) }) }
        return when (shape.text("kind")) {
            "chain" -> drawing.chain(step, weak)
            "tree" -> drawing.tree(level, shape.ints("branch").asList())
            else -> {
                val price = shape["price"]?.asDouble?.let { price -> { _: Int, _: Double, rows: Int -> price * rows } }
                drawing.siblings(step, weak, SiblingPolicy(shape.ints("most").asList(), price))
            }
        }
    }

    @Test
    fun `chains, trees and siblings are drawn as on the Python side`() {
        for (case in vectors("drawing")) {
            val made = draw(case)
            assertArrayEquals(case.ints("tokens"), made.tokens, "$case")
            assertEquals(case.intsOrNull("parents")?.asList(), made.parents?.asList(), "$case")
            assertEquals(case["q"].isJsonNull, made.probs == null, "$case")
            made.probs?.let { probs -> assertClose(case.doubles("q"), DoubleArray(made.size) { probs[it][made.tokens[it]] }, "$case") }
        }
    }

    @Test
    fun `what is known of a draft's guesses is what the Python side counts`() {
        for (case in vectors("confidences")) {
            val made = Confidence(case.doubles("rates").asList(), case["mean"].takeUnless { it.isJsonNull }?.asDouble)
            for (step in case["steps"].asJsonArray.map { it.asJsonArray.doubles() }) {
                made.learn(step[0], step[1] > 0)
                assertEquals(step[2], made.chance(step[0]), 1e-12)
                assertEquals(step[3], made.mean, 1e-12)
            }
        }
    }

    @Test
    fun `a search believes what the Python side does`() {
        fun lists(step: JsonObject, name: String) = step[name].asJsonArray.map { it.ints().asList() }
        for (case in vectors("searches")) {
            val layers = case.int("layers")
            fun set(lists: List<List<Int>>) = SkipSet(lists[0], lists[1], lists[2], lists[3], case.flag("high_head"))
            val cost = StepCost(0.4 / layers, 0.5 / layers, Triple(0.18 / layers, 0.22 / layers, 0.05))
            val curve = CostModel(mapOf(1 to 1.0, 2 to 1.2, 8 to 2.1), null)
            val search = OnlineSearch(layers, set(lists(case, "initial")), cost::invoke, curve::v)
            for (step in case["steps"].asJsonArray.map { it.asJsonObject }) {
                val skip = set(lists(step, "skip"))
                assertEquals(step.flag("changed"), search.tell(skip, step.int("matched"), 16), "$step")
                assertEquals(step["acceptance"].asDouble, search.acceptance(skip), 1e-9, "$step")
                assertEquals(step["speed"].asDouble, search.speed(skip), 1e-9, "$step")
                assertEquals(set(lists(step, "best")), search.best, "$step")
            }
        }
    }

    @Test
    fun `guesses while a text grows are those of the Python side`() {
        for (case in vectors("ngram")) {
            val given = case["settings"].asJsonObject
            val drafter = NGram(
                nMin = given["n_min"]?.asInt ?: 1, nMax = given["n_max"]?.asInt ?: 4, share = given["share"]?.asDouble ?: 0.6,
            )
            val text = case.ints("text")
            for ((at, expected) in case["proposals"].asJsonArray.withIndex()) {
                val length = 8 + 3 * at
                val found = drafter.propose(Tokens(text.copyOf(length)), 1 + length % 8)
                val bucket = if (found.size > 0) found.bucket else 0
                assertArrayEquals(expected.ints(), intArrayOf(bucket) + found.tokens, "$given at $length")
            }
        }
    }

    @Test
    fun `guesses out of an expected text are those of the Python side`() {
        for (case in vectors("predicted")) {
            val drafter = Predicted(case.ints("expected"), case.int("prompt"))
            val text = case.ints("text")
            for (step in case["steps"].asJsonArray.map { it.asJsonArray }) {
                val found = drafter.propose(Tokens(text.copyOf(step[0].asInt)), step[1].asInt)
                assertArrayEquals(step[2].ints(), found.tokens, "$case")
            }
        }
    }

    @Test
    fun `trees of heads' guesses are those of the Python side`() {
        for (case in vectors("trees")) {
            val ranks = case["ranks"].asJsonArray.map { it.asJsonArray.doubles().asList() }
            val paths = grow(ranks, case.int("most")).map { it.first }
            assertEquals(case["paths"].asJsonArray.map { it.ints().asList() }, paths)
            val layout = Layout(paths)
            assertArrayEquals(case.ints("parents"), layout.parents)
            assertArrayEquals(case.ints("heads"), layout.heads)
            assertArrayEquals(case.ints("rank_of"), layout.ranks)
        }
    }
}
