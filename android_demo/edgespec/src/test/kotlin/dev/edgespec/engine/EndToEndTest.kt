package dev.edgespec.engine

import dev.edgespec.InvalidRequest
import dev.edgespec.audio.WavFile
import dev.edgespec.decoding.BeamOptions
import dev.edgespec.decoding.Settings
import dev.edgespec.runtimes.*
import dev.edgespec.support.*
import java.io.File
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Real bundles, once a kind of operators: token for token what Python wrote (tests/android/test_kotlin.py starts this). */
class EndToEndTest {
    private val operators = System.getProperty("edgespec.operators")

    @Test
    fun `every method writes Python's tokens, greedy and seeded, of every format and on both kinds of operators`() {
        val bundles = GOLDEN["bundles"].asJsonArray.map { it.asJsonObject }.filter { it.text("operators") == operators }
        val done = bundles.map { replay(it, File(GOLDEN.text("library"))) }
        assertEquals(emptyList<String>(), done.flatMap { it.wrong })
        assertTrue(done.isNotEmpty() && done.all { it.compared > 0 })
    }

    @Test
    fun `native operators write the same on ONNX Runtime`() {
        if (operators != "native") return
        val bundle = GOLDEN["bundles"].asJsonArray.map { it.asJsonObject }.last { it.text("operators") == operators }
        assertEquals(emptyList<String>(), replay(bundle, File(GOLDEN.text("library")), onOnnxRuntime = true).wrong)
    }

    @Test
    fun `sources have the tokens of their languages`() {
        val made = GOLDEN["forms"].asJsonObject
        val folder = File(made.text("folder"))
        TextCodec(folder).use { codec ->
            for (case in made["cases"].asJsonArray.map { it.asJsonObject }) {
                val (from, to) = listOf("from", "to").map { name -> case[name].takeUnless { it.isJsonNull }?.asString }
                SourceTexts(folder, Reader(folder, case["form"].asJsonObject).textForm(), codec).use { texts ->
                    if (texts.form.prefixes.isNotEmpty()) assertEquals(listOf("", "en") to listOf("", "de"), texts.origins to texts.targets)
                    if (case["found"].isJsonNull) {
                        assertThrows(InvalidRequest::class.java, { texts.encode(case.text("text"), from, to) + texts.begin(from, to) }, "$case")
                    } else {
                        assertArrayEquals(case["found"].asJsonObject.ints("ids"), texts.encode(case.text("text"), from, to), "$case")
                        assertArrayEquals(case["found"].asJsonObject.ints("begin"), texts.begin(from, to), "$case")
                    }
                }
            }
        }
    }

    @Test
    fun `beams find the texts that Python's find`() {
        if (operators != "native") return
        for ((path, cases) in GOLDEN["searched"].asJsonArray.map { it.asJsonObject }.groupBy { it.text("path") }) loadNative(File(path)).use { engine ->
            for (case in cases) {
                val how = case["how"].asJsonObject
                val options = BeamOptions(how.int("beams"), how["length_penalty"]?.asDouble, how["early_stopping"]?.asString)
                val result = engine.generate(case.text("text"), Settings(beams = options, maxNewTokens = 24))
                assertEquals(case.ints("tokens").asList(), result.tokens.asList(), "$case")
            }
        }
    }

    @Test
    fun `recordings are heard as Python hears them`() {
        if (operators != "native") return
        val made = GOLDEN["heard"].asJsonObject
        loadNative(File(made.text("path"))).use { engine ->
            for (case in made["cases"].asJsonArray.map { it.asJsonObject }) {
                val asked = TranscriptionSettings(
                    case["language"]?.asString, case["task"]?.asString ?: "transcribe", case["timestamps"]?.asBoolean ?: true, case["prompt"]?.asString,
                )
                val settings = Settings(case.text("method"), adaptive = false, fallback = false)
                val found = engine.transcribe(WavFile(File(case.text("file"))).read { false }, asked, settings)
                val wanted = case["segments"].asJsonArray.map { it.asJsonObject }
                assertEquals(wanted.map { it.text("text") to it.ints("tokens").asList() }, found.map { it.text to it.tokens.asList() }, "$case")
                for ((one, segment) in wanted.zip(found)) {
                    assertArrayEquals(doubleArrayOf(one["start"].asDouble, one["end"].asDouble), doubleArrayOf(segment.start, segment.end), 1e-9)
                    assertEquals(case.text("spoken"), segment.language)
                    assertEquals(true, segment.result.exact)
                }
            }
            assertThrows(InvalidRequest::class.java) { engine.generate("a text") }
        }
        val refused = assertThrows(InvalidRequest::class.java) { loadNative().use { it.transcribe(FloatArray(16_000)) } }
        assertTrue("not sound" in refused.what)
    }
}
