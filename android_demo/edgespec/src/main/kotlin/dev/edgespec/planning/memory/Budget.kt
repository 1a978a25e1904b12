package dev.edgespec.planning.memory

import java.util.Locale

/** What the system says of memory; on Android ActivityManager.MemoryInfo says it. */
interface MemoryFacts {
    val total: Long // bytes of the machine
    val available: Long // bytes that this process may take beyond what it has now
    val low: Boolean // whether the system is short of memory already
}

/** Bytes for people: 1610612736 -> "1.50 GiB". */
fun showBytes(count: Long): String {
    var value = count.toDouble()
    var unit = "B"
    for (larger in listOf("KiB", "MiB", "GiB", "TiB")) {
        if (value < 1024) break
        value /= 1024
        unit = larger
    }
    return if (unit == "B") "%.0f %s".format(Locale.ROOT, value, unit) else "%.${if (value >= 100) 1 else 2}f %s".format(Locale.ROOT, value, unit)
}
