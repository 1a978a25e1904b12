package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.BundleError
import dev.edgespec.decoding.SamplingParams
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Path
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

class ManifestTest {
    @TempDir
    lateinit var folder: Path
    private val whole = JsonParser.parseString(File(BUNDLE, MANIFEST).readText()).asJsonObject

    private fun read(change: (JsonObject) -> Unit): Manifest {
        File(folder.toFile(), MANIFEST).writeText(whole.deepCopy().also(change).toString())
        return readManifest(folder.toFile())
    }

    @Test
    fun `methods that run here are offered, and the others are known`() {
        val found = read { it["methods"].asJsonObject.add("swift", JsonObject()) }
        assertTrue("speculative" in found.methods && "ngram" in found.methods, "${found.methods}")
        assertTrue("swift" in found.elsewhere)
        assertTrue("speculative" in read { it.add("translation", JsonObject()) }.elsewhere)
    }

    @Test
    fun `a model that says nothing of sampling is decoded greedily, and nonsense is refused`() {
        fun sampling(text: String) = read { it.add("sampling", JsonParser.parseString(text)) }.sampling
        assertEquals(SamplingParams(0.6, 20, 0.95, 0.05, 1.1), sampling("""{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}"""))
        assertEquals(0.0, sampling("""{"repetition_penalty": 1.5}""").temperature)
        assertEquals(0.0, sampling("null").temperature)
        val error = assertThrows(BundleError::class.java) { sampling("""{"top_p": 1.5}""") }
        assertTrue("top_p is 1.5" in error.what, error.what)
    }

    @Test
    fun `models that read more than text, and rules of writing, are refused by name`() {
        for ((name, says) in mapOf("image" to "reads pictures", "source" to "reads a source", "sound" to "reads sound")) {
            val error = assertThrows(BundleError::class.java) { read { it["target"].asJsonObject.add(name, JsonObject()) } }
            assertTrue(says in error.what, error.what)
        }
        val error = assertThrows(BundleError::class.java) { read { it.add("rules", JsonObject()) } }
        assertTrue("rules" in error.what, error.what)
    }

    /** Every place of a manifest, without those in lists. */
    private fun places(data: JsonObject, at: List<String> = emptyList()): List<List<String>> = data.entrySet().flatMap { (name, value) ->
        listOf(at + name) + if (value.isJsonObject) places(value.asJsonObject, at + name) else emptyList()
    }

    @Test
    fun `a value of another type is an error of bundles, or not looked at`() {
        val others = listOf("null", "[]", "{}", "true", "-1", "1e999", "\"word\"", "[[1]]").map(JsonParser::parseString)
        for (place in places(whole).filter { it[0] != "cost" && it[0] != "parity" }) for (other in others) {
            try {
                read { data ->
                    val part = place.dropLast(1).fold(data) { within, name -> within[name].asJsonObject }
                    part.add(place.last(), other)
                }
            } catch (_: BundleError) {
            }
        }
    }
}
