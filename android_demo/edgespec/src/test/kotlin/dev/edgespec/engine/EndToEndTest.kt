package dev.edgespec.engine

import dev.edgespec.support.GOLDEN
import dev.edgespec.support.replay
import dev.edgespec.support.text
import java.io.File
import org.junit.jupiter.api.Assertions.assertEquals
import org.junit.jupiter.api.Assertions.assertTrue
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.condition.EnabledIfSystemProperty

/**
 * Real bundles on real ONNX Runtime: token for token what Python wrote.  The file that `edgespec.golden` names is made by
 * tests/android/test_kotlin.py, which also starts this: once for native operators, on the ONNX Runtime of the Maven
 * artefact, and once for stock operators, on the very library that Python uses, because those round otherwise by version.
 */
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
