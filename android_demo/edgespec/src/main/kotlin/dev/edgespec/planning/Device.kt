package dev.edgespec.planning

import java.io.File
import java.util.Locale

/* Facts of the device: memory, heat, cores. */

/** The system's current memory figures; on Android those of ActivityManager.MemoryInfo. */
interface MemoryFacts {
    val total: Long // bytes of the machine
    val available: Long // bytes that this process may allocate in addition
    val low: Boolean // whether the system is short of memory already
}

/** How hot a device says it is whenever it is asked, as Android's PowerManager counts: 0 = not at all, 1 = light, 2 = moderate, 3 = severe ... */
fun interface Heat {
    fun level(): Int
}

/** Threads for passes of a hot device: moderate heat removes one, severe heat half of them. */
internal fun sparing(level: Int, threads: Int): Int = when {
    level < 2 -> threads
    level == 2 -> maxOf(1, threads - 1)
    else -> maxOf(1, threads / 2)
}

/** Human-readable bytes: 1610612736 -> "1.50 GiB". */
fun showBytes(count: Long): String {
    var value = count.toDouble()
    var unit = "B"
    for (larger in listOf("KiB", "MiB", "GiB", "TiB")) {
        if (value < 1024) break
        value /= 1024
        unit = larger
    }
    val digits = if (unit == "B") 0 else if (value >= 100) 1 else 2
    return "%.${digits}f %s".format(Locale.ROOT, value, unit)
}

private const val LARGE = 0.5 // of the largest core's capacity: a pass ends with its slowest thread

/** More than these machines have cores. */
internal const val MOST_THREADS = 512

/**
 * Default threads of passes: the large cores of a phone, at most four, by the capacity that Linux has measured of each (`cpu_capacity`,
 * 1024 = the largest), else by its highest frequency; all cores if neither is known.
 */
fun defaultThreads(cores: File = File("/sys/devices/system/cpu"), processors: Int = Runtime.getRuntime().availableProcessors()): Int {
    fun told(name: String) = (0 until processors).mapNotNull { at ->
        runCatching { File(cores, "cpu$at/$name").readText().trim().toDouble() }.getOrNull()
    }
    val known = listOf("cpu_capacity", "cpufreq/cpuinfo_max_freq").map(::told).firstOrNull { it.size == processors } ?: emptyList()
    val large = known.count { it >= LARGE * known.max() }
    return (if (large > 1) large else processors).coerceIn(1, 4)
}
