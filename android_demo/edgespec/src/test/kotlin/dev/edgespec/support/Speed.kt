package dev.edgespec.support

import com.google.gson.Gson
import com.sun.management.ThreadMXBean
import dev.edgespec.Edgespec
import dev.edgespec.decoding.*
import dev.edgespec.engine.Engine
import java.io.File
import java.lang.management.ManagementFactory
import kotlin.system.exitProcess

/* Speed of the runtime on a JVM: see benchmarks/kotlin.py, which alternates this and Python's twin. */

private val PROMPT = IntArray(32) { 2 + it % 29 }

private fun pss(): Long = File("/proc/self/smaps_rollup").readLines().first { it.startsWith("Pss:") }.filter { it.isDigit() }.toLong()

private fun allocated(): Long {
    val threads = ManagementFactory.getThreadMXBean() as ThreadMXBean
    return threads.getThreadAllocatedBytes(threads.allThreadIds).filter { it > 0 }.sum()
}

private fun since(start: Long): Double = (System.nanoTime() - start) / 1e6

/** A bundle to load, and a method to decode [tokens] tokens with. */
private class Served(val bundle: File, val library: File, val method: String, val tokens: Int) {
    fun load(): Engine = Edgespec.load(bundle, threads = 2, library = library, check = false)

    /** Milliseconds a token, and rounds. */
    fun decode(engine: Engine): Pair<Double, Int> {
        val begun = System.nanoTime()
        val stats = engine.generate(PROMPT, Settings(method, tokens, ignoreEos = true)).stats
        return (since(begun) - stats.prefillMs) / tokens to stats.rounds
    }

    /** Figures by name, for JSON. */
    fun figures(): Map<String, Any?> {
        val start = System.nanoTime()
        val engine = load()
        val loaded = since(start)
        engine.generate(PROMPT, Settings(method, 1, ignoreEos = true))
        val first = since(start) - loaded
        decode(engine) // the JVM compiles what runs often
        val before = allocated()
        val (ms, rounds) = decode(engine)
        val allocated = allocated() - before
        val pss = pss() / 1024.0
        engine.close()
        val again = System.nanoTime()
        load().close()
        return mapOf(
            "load_ms" to loaded, "first_ms" to first, "ms_per_token" to ms, "allocated_per_token" to allocated / tokens,
            "allocated_per_round" to allocated / rounds, "pss_mib" to pss, "load_again_ms" to since(again),
        )
    }
}

/**
 * Arguments: bundle, library, a method, a number of tokens and perhaps "turns" (an engine stays open, and
 * decodes at every line of standard input); without any, the JVM's own PSS.
 */
fun main(arguments: Array<String>) {
    if (arguments.isEmpty()) return println("{\"jvm_pss_mib\": ${pss() / 1024.0}}")
    val served = Served(File(arguments[0]), File(arguments[1]), arguments[2], arguments[3].toInt())
    if (arguments.getOrNull(4) == "turns") {
        served.load().use { engine -> while (readlnOrNull() != null) println(served.decode(engine).first) }
    } else {
        println(Gson().toJson(served.figures()))
    }
    exitProcess(0)
}
