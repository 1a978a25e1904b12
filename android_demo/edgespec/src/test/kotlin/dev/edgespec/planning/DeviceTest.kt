package dev.edgespec.planning

import java.io.File
import java.nio.file.Path
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

class DeviceTest {
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

    @Test
    fun `a hot device is spared threads`() {
        assertEquals(listOf(4, 4, 3, 2, 2, 1), (0..4).map { sparing(it, 4) } + sparing(4, 1))
    }
}
