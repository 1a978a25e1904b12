package dev.edgespec.runtimes

import com.google.gson.JsonObject
import dev.edgespec.InvalidRequest
import dev.edgespec.audio.*
import dev.edgespec.engine.SpeechRules
import dev.edgespec.engine.pieces
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Path
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

/** Inputs and constraints of encoder-decoders equal those of the Python side. */
class SourcesTest {
    private fun <T> part(case: JsonObject, make: Reader.() -> T): T = Reader(File("vectors"), case).make()

    @Test
    fun `tokens that may follow a text are those of the Python side`() {
        for (case in vectors("rules")) {
            val (vocab, prompt, eos) = Triple(24, 2, 9)
            val rules = if (case.has("speech")) {
                SpeechRules(vocab, prompt, eos, part(case["speech"].asJsonObject) { speech() }, case.flag("timestamps"))
            } else {
                RuledText(part(case["writing"].asJsonObject) { rules() }, vocab, setOf(eos), prompt, eos)
            }
            val mask = rules.allowed(case.ints("prefix").asList(), row(case.int("row"), vocab))
            assertEquals(case.ints("allowed").asList(), mask.indices.filter { mask[it] }, "$case")
        }
    }

    @Test
    fun `languages go by codes and by names`() {
        for (case in vectors("languages")) for ((wanted, found) in case["found"].asJsonObject.entrySet()) {
            val known = case["known"].asJsonArray.map { it.asString }
            if (found.isJsonNull) assertThrows(InvalidRequest::class.java, { chooseLanguage(wanted, known) }, "$wanted $case")
            else assertEquals(found.asString, chooseLanguage(wanted, known))
        }
    }

    @Test
    fun `long texts are cut as on the Python side`() {
        for (case in vectors("sentences")) {
            val found = pieces(case.text("text")) { it.length <= case.int("most") }
            assertEquals(case["pieces"].asJsonArray.map { it.asString }, found, "$case")
        }
    }

    @Test
    fun `features of sound are the Python side's`() {
        for (case in vectors("features")) {
            val mels = logMel(row(case.int("bins"), case.int("samples"), 0.5), case.int("bins"), case.int("least"))
            assertEquals(case.int("frames"), mels.frames)
            fun check(name: String, step: Int, values: FloatArray) {
                val wanted = case.doubles(name)
                assertEquals(wanted.size, (values.size + step - 1) / step)
                for (at in wanted.indices) assertEquals(wanted[at], values[step * at].toDouble(), 2e-6, "$name $at")
            }
            check("mels", 7, mels.values)
            check("rows", 101, encoderRows(mels, FeaturePart(mels.bins, mels.frames, case.int("columns"))))
        }
        assertTrue(logMel(FloatArray(5), 80, 16_000).values.all { it == -1.5f })
        assertThrows(InvalidRequest::class.java) { logMel(FloatArray(200), 80, 0) }
    }

    @Test
    fun `what is no recording is refused`(@TempDir folder: Path) {
        val file = File(folder.toFile(), "a.wav")
        val whole = File("../../tests/data/digits/en.wav").readBytes()
        assertEquals((whole.size - 44) / 2, WavFile(File("../../tests/data/digits/en.wav")).read { false }.size)
        for (bytes in listOf(ByteArray(0), ByteArray(50), whole.copyOf(20), whole.copyOf(30), whole.clone().also { it[24] = 1 })) {
            file.writeBytes(bytes)
            assertTrue("16-bit" in assertThrows(InvalidRequest::class.java) { WavFile(file).read { false } }.what)
        }
    }
}
