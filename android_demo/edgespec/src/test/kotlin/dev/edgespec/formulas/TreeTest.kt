package dev.edgespec.formulas

import dev.edgespec.support.doubles
import dev.edgespec.support.int
import dev.edgespec.support.ints
import dev.edgespec.support.vectors
import org.junit.jupiter.api.Assertions.assertArrayEquals
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Test

class TreeTest {
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
