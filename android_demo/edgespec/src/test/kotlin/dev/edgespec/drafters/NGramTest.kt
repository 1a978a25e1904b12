package dev.edgespec.drafters

import dev.edgespec.decoding.Tokens
import dev.edgespec.support.ints
import dev.edgespec.support.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Test

class NGramTest {
    @Test
    fun `guesses while a text grows are those of the Python side`() {
        for (case in vectors("ngram")) {
            val given = case["settings"].asJsonObject
            val drafter = NGram(
                nMin = given["n_min"]?.asInt ?: 1,
                nMax = given["n_max"]?.asInt ?: 4,
                share = given["share"]?.asDouble ?: 0.6,
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
}
