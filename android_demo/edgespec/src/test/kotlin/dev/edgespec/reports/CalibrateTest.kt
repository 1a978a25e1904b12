package dev.edgespec.reports

import com.google.gson.JsonParser
import dev.edgespec.Edgespec
import dev.edgespec.planning.Machine
import dev.edgespec.runtimes.defaultThreads
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Path
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

class CalibrateTest {
    /** Every bundle that is asked for gets its profile, which `edgespec plan --device` then reads (tests/android/test_kotlin.py). */
    @Test
    fun `a profile of this device is measured and written`() {
        for (one in GOLDEN["profiles"].asJsonArray.map { it.asJsonObject }) {
            val stages = LinkedHashSet<String>()
            val path = File(one.text("path"))
            Edgespec.load(path, threads = 1, library = File(GOLDEN.text("library"))).use { engine ->
                val before = engine.generate(intArrayOf(5, 9, 13))
                val profile = calibrate(engine, Machine("a phone", 6L shl 30), 0.5, Machine.resident()) { stage, _, _ -> stages.add(stage) }
                File(one.text("profile")).writeText(profile)
                val tried = engine.bundle.manifest.golden.isNotEmpty()
                assertEquals(listOf("passes", "prefill", "drafts", "trials").take(if (tried) 4 else 3), stages.toList())
                val trials = JsonParser.parseString(profile).asJsonObject["trials"].asJsonObject
                assertEquals(if (tried) engine.methods.toSet() else emptySet(), trials.keySet())
                assertArrayEquals(before.tokens, engine.generate(intArrayOf(5, 9, 13)).tokens) // nothing made up is left
            }
        }
    }

    @Test
    fun `the large cores of a phone decode`(@TempDir folder: Path) {
        fun cores(name: String, told: List<Int>): Int {
            val made = File(folder.toFile(), "$name${told.hashCode()}")
            told.forEachIndexed { at, value -> File(made, "cpu$at/$name").apply { parentFile.mkdirs() }.writeText("$value\n") }
            return defaultThreads(made, told.size)
        }
        assertEquals(4, cores("cpu_capacity", listOf(250, 250, 250, 250, 760, 760, 760, 1024)))
        assertEquals(2, cores("cpu_capacity", listOf(200, 200, 200, 200, 200, 200, 1024, 1024)))
        assertEquals(4, cores("cpu_capacity", List(8) { 1024 }))
        assertEquals(3, cores("cpufreq/cpuinfo_max_freq", listOf(1_700_000, 1_700_000, 1_700_000, 3_000_000, 3_000_000, 4_000_000)))
        assertEquals(listOf(1, 4), listOf(1, 6).map { defaultThreads(File(folder.toFile(), "nothing"), it) })
    }
}
