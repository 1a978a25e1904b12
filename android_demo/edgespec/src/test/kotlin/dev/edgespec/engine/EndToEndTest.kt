package dev.edgespec.engine

import com.google.gson.JsonObject
import dev.edgespec.Edgespec
import dev.edgespec.decoding.DraftOptions
import dev.edgespec.decoding.Proposal
import dev.edgespec.decoding.Settings
import dev.edgespec.drafters.Proposer
import dev.edgespec.support.GOLDEN
import dev.edgespec.support.flag
import dev.edgespec.support.int
import dev.edgespec.support.ints
import dev.edgespec.support.paramsOf
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
    private fun load(bundle: JsonObject): Engine = Edgespec.load(
        File(bundle.text("path")),
        threads = 2,
        operators = bundle.text("operators"),
        library = File(GOLDEN.text("library")),
    )

    private fun settings(case: JsonObject): Settings {
        val given = case["settings"].asJsonObject
        val method = given.text("method")
        val seed = given["seed"]?.asLong
        return Settings(
            method = method.takeIf { it != "proposer" },
            maxNewTokens = case.int("max_new_tokens"),
            sampling = paramsOf(given, seed),
            drafts = DraftOptions(
                branch = given["branch"]?.ints()?.asList(),
                proposers = given["proposers"]?.asJsonArray?.map { it.asString } ?: emptyList(),
                cycles = given["cycles"]?.asInt,
            ),
            proposer = if (method == "proposer") LastToken() else null,
            ignoreEos = true,
        )
    }

    /** Guesses that the last token comes again. */
    private class LastToken : Proposer {
        override fun propose(tokens: IntArray, budget: Int) = Proposal(IntArray(minOf(budget, 3)) { tokens.last() })
    }

    @Test
    fun `every method writes Python's tokens, greedy and seeded, of every format and on both kinds of operators`() {
        var compared = 0
        val wrong = ArrayList<String>()
        val operators = System.getProperty("edgespec.operators")
        for (bundle in bundles(operators)) load(bundle).use { engine ->
            for (case in bundle["cases"].asJsonArray.map { it.asJsonObject }) {
                val where = "${bundle.text("format")} ${bundle.text("operators")} ${case["settings"]}"
                val result = engine.generate(case.ints("prompt"), settings(case))
                assertEquals(null, result.stats.droppedReason, where)
                if (!case.ints("tokens").contentEquals(result.tokens)) wrong.add("$where: ${case["tokens"]}, got ${result.tokens.asList()}")
                else assertEquals(case.text("text"), result.text, where)
                if (case.flag("exact")) assertTrue(result.exact, where)
                compared += result.tokens.size
            }
            assertTrue(engine.proof().all { it }, "golden vectors of ${bundle.text("path")}")
        }
        assertEquals(emptyList<String>(), wrong)
        assertEquals(bundles(operators).sumOf { bundle -> bundle["cases"].asJsonArray.sumOf { it.asJsonObject.ints("tokens").size } }, compared)
        assertTrue(compared > 0)
    }

    private fun bundles(operators: String) =
        GOLDEN["bundles"].asJsonArray.map { it.asJsonObject }.filter { it.text("operators") == operators }
}
