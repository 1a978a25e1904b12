package dev.edgespec.engine

import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.support.*
import java.io.File
import kotlinx.coroutines.flow.toList
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Real bundles: token for token what Python wrote (tests/android/test_kotlin.py starts this). */
class EndToEndTest {
    @Test
    fun `every method writes Python's tokens, greedy and seeded, of every format`() {
        val done = GOLDEN["bundles"].asJsonArray.map { replay(it.asJsonObject, File(GOLDEN.text("library"))) }
        assertEquals(emptyList<String>(), done.flatMap { it.wrong })
        assertTrue(done.isNotEmpty() && done.all { it.compared > 0 })
    }

    @Test
    fun `without a number of new tokens a text goes to the end of the context`() = loadNative().use { engine ->
        val result = engine.generate(IntArray(engine.context - 150) { 5 + it % 23 }, Settings("ngram", ignoreEos = true))
        assertEquals("context" to 150, result.finish to result.tokens.size)
    }

    @Test
    fun `each text has the adapter that it names`() {
        val given = GOLDEN["adapters"].asJsonObject
        val folders = given["folders"].asJsonObject.entrySet().associate { it.key to File(it.value.asString) }
        val library = File(GOLDEN.text("library"))
        Edgespec.load(File(given.text("path")), threads = 1, library = library, adapters = folders).use { engine ->
            for (case in given["cases"].asJsonArray.map { it.asJsonObject }) {
                val adapter = case["adapter"].takeUnless { it.isJsonNull }?.asString
                val settings = Settings(case.text("method"), 24, ignoreEos = true, adapter = adapter)
                val result = engine.generate(case.ints("prompt"), settings)
                assertArrayEquals(case.ints("tokens"), result.tokens, "$case")
                assertEquals(null, result.stats.droppedReason)
            }
            val error = assertThrows(InvalidRequest::class.java) { engine.stream(intArrayOf(5), Settings(adapter = "none")) }
            assertTrue("expected one of" in error.what && folders.keys.all { it in error.what }, error.what)
        }
        val error = assertThrows(BundleError::class.java) {
            Edgespec.load(File(given.text("path")), threads = 1, library = library, adapters = mapOf("none" to File("nowhere"))).close()
        }
        assertTrue("adapter_config.json" in error.what, error.what)
    }

    @Test
    fun `only allowed tokens are written, by every method`() = loadNative().use { engine ->
        fun of(method: String) = engine.generate(
            intArrayOf(5, 9, 13), Settings(method, 24, sampling = SamplingParams(constraint = { text, row -> BooleanArray(row.size) { (it + text.size) % 3 == 0 } }), ignoreEos = true),
        ).tokens
        val plain = of("ar")
        plain.forEachIndexed { at, token -> assertEquals(0, (token + 3 + at) % 3) }
        for (method in engine.methods) assertArrayEquals(plain, of(method), method)
        val error = assertThrows(IllegalStateException::class.java) {
            engine.generate(intArrayOf(5), Settings(sampling = SamplingParams(constraint = { _, _ -> error("no idea") })))
        }
        assertEquals("no idea", error.message)
    }

    @Test
    fun `likely tokens are told with the chosen one among them`() = loadNative().use { engine ->
        val chunks = kotlinx.coroutines.runBlocking {
            engine.stream(intArrayOf(5, 9, 13), Settings("ngram", 16, ignoreEos = true, logprobs = true, topLogprobs = 3)).toList()
        }
        for (round in chunks.map { it.round }) {
            val likely = round.likely!!
            assertEquals(round.tokens.size, likely.size)
            round.tokens.forEachIndexed { at, token ->
                val (best, value) = likely[at].maxBy { it.value }
                assertEquals(token to round.logprobs!![at], best to value)
                assertEquals(3, likely[at].size)
            }
        }
        assertEquals(16, chunks.last().result!!.logprobs!!.size)
    }
}
