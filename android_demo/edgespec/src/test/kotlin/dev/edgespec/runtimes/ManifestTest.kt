package dev.edgespec.runtimes

import com.google.gson.JsonObject
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

    private fun read(data: JsonObject): Manifest {
        File(folder.toFile(), MANIFEST).writeText(data.toString())
        return readManifest(folder.toFile())
    }

    @Test
    fun `every key that the exporter may write is known, and caches have the bytes of the Python side`() {
        for (case in vectors("manifests")) {
            val data = case["manifest"].asJsonObject
            val found = read(data)
            assertEquals(METHODS.toSet(), found.methods.keys)
            assertEquals(data["methods"].asJsonObject.keySet() - found.methods.keys, found.elsewhere)
            assertTrue("peagle" in found.elsewhere)
            assertEquals(SamplingParams(0.6, 20, 0.95, 0.05, 1.1), found.sampling)
            val target = data["target"].asJsonObject
            assertArrayEquals(target.ints("aux_hidden_layers"), found.target.tapped.toIntArray())
            assertEquals(data["drafter"].asJsonObject["decoder"].asJsonObject.int("columns"), found.drafter!!.decoder!!.columns)
            val sizes = case["kv_bytes"].asJsonObject
            assertEquals(sizes.keySet(), ATTENTION.keys)
            for ((name, kv) in ATTENTION) {
                val bytes = listOf(1, 128, 1000).map { kv.nbytes(found.target.facts, it).toInt() }
                assertEquals(sizes.ints(name).asList(), bytes, "$name ${target["facts"]}")
            }
        }
    }

    @Test
    fun `manifests of schema 5 have other names of keys and the same values`() {
        val stored = vectors("schema_5").map { it.deepCopy().apply { this["target"].asJsonObject.remove("kept") } }
        val known = stored.filter { data ->
            val target = data["target"].asJsonObject
            val kind = target["image"]?.asJsonObject?.get("processor")?.asJsonObject?.text("kind")
            !data.has("codes") && !target.has("sound") && kind !in listOf("qwen2-vl", "gemma3")
        }
        assertTrue(known.size > 5)
        for (data in known) read(data)
        val (data, found) = known.first().let { it to read(it) }
        val target = data["target"].asJsonObject
        assertEquals(listOf(target.int("headroom"), 65), listOf(found.target.headroom, found.target.graphs.getValue("strict").leastLength))
        assertArrayEquals(target.ints("tapped"), found.target.tapped.toIntArray())
        assertTrue(found.target.planes && found.target.encoder!!.planes)
        assertEquals(target["source"].asJsonObject.int("most"), found.target.source!!.most)
        assertArrayEquals(intArrayOf(7), found.golden.single().begin)
        for (rules in listOf(found.rules!!, found.text!!.rules)) {
            assertEquals(listOf(listOf(3), listOf(4), listOf(listOf(5, 6))), listOf(rules.suppressed, rules.beginSuppressed, rules.badWords))
            assertEquals(listOf(3, 1, 2, 200, 2), listOf(rules.noRepeat, rules.least, rules.leastNew, rules.most, rules.forcedEnd))
        }
        assertEquals(listOf(1, 2, 50), found.speech!!.let { listOf(it.suppressed.single(), it.suppressedFirst.single(), it.latestFirst) })
        assertEquals(64, read(known.last { "image" in it["target"].asJsonObject.keySet() }).target.image!!.most)
        val today = vectors("manifests").first()["manifest"].asJsonObject
        for ((whole, name) in listOf(data to "extra_rows", today to "headroom")) { // both names of a key
            val mixed = whole.deepCopy().apply { this["target"].asJsonObject.addProperty(name, 64) }
            val error = assertThrows(BundleError::class.java) { read(mixed) }
            assertTrue("headroom: Extra inputs are not permitted" in error.what, error.what)
        }
    }

    @Test
    fun `a model that says nothing of sampling is decoded greedily, and nonsense is refused`() {
        val data = vectors("manifests").first()["manifest"].asJsonObject
        for (silent in listOf(null, JsonObject().apply { addProperty("repetition_penalty", 1.5) })) {
            val found = read(data.deepCopy().apply { if (silent == null) remove("sampling") else add("sampling", silent) })
            assertEquals(0.0, found.sampling.temperature)
        }
        val wrong = data.deepCopy().apply { this["sampling"].asJsonObject.addProperty("top_p", 1.5) }
        val error = assertThrows(BundleError::class.java) { read(wrong) }
        assertTrue("sampling" in error.what && "top_p is 1.5" in error.what, error.what)
    }

    @Test
    fun `an unknown key of any part is an error that names it`() {
        fun parts(at: String, data: JsonObject): List<String> = data.entrySet().flatMap { (name, value) ->
            when {
                value.isJsonObject && name !in FREE -> listOf("$at$name") + parts("$at$name.", value.asJsonObject)
                else -> emptyList()
            }
        }
        val known = vectors("manifests").map { it["manifest"].asJsonObject }
        val whole = known.last { it["target"].asJsonObject["facts"].asJsonObject.has("delta") }
        val all = parts("", whole).filter { it.substringAfterLast('.') !in MAPS }
        assertTrue("target.facts.delta" in all && "drafter.decoder" in all && "methods.self-spec.skip" in all, "$all")
        for (where in all) {
            val changed = whole.deepCopy()
            var part = changed
            for (name in where.split(Regex("\\.(?!data)"))) part = part[name].asJsonObject
            part.addProperty("surprise", 1)
            val error = assertThrows(BundleError::class.java, { read(changed) }, where)
            assertTrue("surprise: Extra inputs are not permitted" in error.what, error.what)
        }
    }

    private companion object {
        val FREE = setOf("rope", "parity", "cost", "memory", "provenance") // whose keys are not fixed
        val MAPS = setOf("graphs", "gates", "methods", "files") // by names
    }

    @Test
    fun `states are kept where the Python side keeps them`() {
        for (case in vectors("turns")) {
            assertEquals(case.ints("lengths").asList(), endsOfTurns(case.ints("tokens"), case.ints("eos").toSet()), "$case")
        }
    }

    @Test
    fun `a library is a file, or a name that the system finds`() {
        assertNull(whyNot(File(System.mapLibraryName("prefs")))) // of the JDK
        assertTrue("no native operators" in whyNot(File("libnobody.so"))!!)
        assertTrue("does not exist" in whyNot(File(folder.toFile(), "libprefs.so"))!!)
        assertTrue("no library was given" in whyNot(null)!!)
    }
}
