package dev.edgespec.engine

import dev.edgespec.support.*
import java.io.File
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.condition.EnabledIfSystemProperty

/** Real bundles, once a kind of operators: token for token what Python wrote (tests/android/test_kotlin.py starts this). */
@EnabledIfSystemProperty(named = "edgespec.golden", matches = ".+")
class EndToEndTest {
    @Test
    fun `every method writes Python's tokens, greedy and seeded, of every format and on both kinds of operators`() {
        val operators = System.getProperty("edgespec.operators")
        val bundles = GOLDEN["bundles"].asJsonArray.map { it.asJsonObject }.filter { it.text("operators") == operators }
        val done = bundles.map { replay(it, File(GOLDEN.text("library"))) }
        assertEquals(emptyList<String>(), done.flatMap { it.wrong })
        assertTrue(done.isNotEmpty() && done.all { it.compared > 0 })
    }
}
