package dev.edgespec.support

import ai.onnxruntime.OnnxJavaType
import com.google.gson.Gson
import com.sun.management.ThreadMXBean
import dev.edgespec.Edgespec
import dev.edgespec.decoding.*
import dev.edgespec.drafters.Plain
import dev.edgespec.engine.Engine
import dev.edgespec.formulas.median
import dev.edgespec.runtimes.*
import java.io.File
import java.lang.management.ManagementFactory
import kotlin.system.exitProcess

/* What the runtime takes on a JVM: see benchmarks/kotlin.py, which starts this and Python's twin in turn. */

private val PROMPT = IntArray(32) { 2 + it % 29 }
private const val WARM = 4000 // rounds before own cost is timed: the JVM compiles what runs often

private fun pss(): Long = File("/proc/self/smaps_rollup").readLines().first { it.startsWith("Pss:") }.filter { it.isDigit() }.toLong()

private fun allocated(thread: Thread = Thread.currentThread()): Long =
    (ManagementFactory.getThreadMXBean() as ThreadMXBean).getThreadAllocatedBytes(thread.id)

/** A bundle to load, and a method to decode so many tokens with. */
private class Served(val bundle: File, val library: File?, val operators: String, val method: String, val tokens: Int) {
    fun load(): Engine = Edgespec.load(bundle, threads = 2, operators = operators, library = library, check = false)

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
        val thread = Thread.getAllStackTraces().keys.first { it.name == "edgespec-decode" }
        val before = allocated(thread)
        val (ms, rounds) = decode(engine)
        val allocated = allocated(thread) - before
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

/** Microseconds of a plain round beyond ONNX Runtime's run, on a graph that costs next to nothing. */
private fun ownCost(bundle: File, library: File): Map<String, Any?> {
    val opened = Bundle.open(bundle)
    val model = Model(bundle, opened.manifest.target, "native", 1, library)
    val slot = openSlot(model) as NativeSlot
    val steps = minOf(100, slot.context - PROMPT.size - 1)
    var allocated = 0L
    fun round(): Double {
        val rounds = Rounds(slot, Plain(), PROMPT, Settings(maxNewTokens = steps + 1), gamma = 4)
        rounds.next()
        val bytes = allocated()
        val start = System.nanoTime()
        repeat(steps) { rounds.next() }
        val took = (System.nanoTime() - start) / 1e3 / steps
        allocated = (allocated() - bytes) / steps
        return took
    }
    val raw = rawPass(model, slot)
    fun pass(): Double {
        val start = System.nanoTime()
        repeat(steps) { raw.run() }
        return (System.nanoTime() - start) / 1e3 / steps
    }
    repeat(WARM / steps) {
        round()
        pass()
    }
    val bytes = allocated()
    pass()
    val inside = (allocated() - bytes) / steps
    val both = List(41) { round() to pass() }
    val own = median(both.map { it.first - it.second })
    return mapOf(
        "round_us" to median(both.map { it.first }), "pass_us" to median(both.map { it.second }), "own_us" to own,
        "allocated_per_round" to allocated, "allocated_per_pass" to inside,
    )
}

/** A pass over one row behind 82 tokens, with everything bound beforehand. */
private fun rawPass(model: Model, slot: NativeSlot): Binding {
    val io = Binding(model.session)
    val facts = model.facts
    val groups = model.part.heads.size + minOf(1, model.part.tapped.size)
    fun longs(vararg values: Long) = Bound.of(OnnxJavaType.INT64, values.size).also { it.longs.put(values) }
    val place = (PROMPT.size + 50).toLong()
    val first = 2 * facts.layers + 4 + groups // of the planes' gates
    val gates = Bound.of(OnnxJavaType.BOOL, first + if (model.part.planes) 2 * facts.layers + 2 else 0)
    for (at in 0 until gates.bytes.capacity())
        gates.bytes.put(at, if (at <= 2 * facts.layers || at == 2 * facts.layers + 3 || at >= first) 1 else 0)
    io.input("gates", gates)
    io.input("hidden_in", Bound.of(OnnxJavaType.FLOAT, 0, facts.hidden))
    io.input("control", longs(1, *model.kv.controls()))
    io.input("tables", model.keyTables)
    io.input("moves", Bound.of(OnnxJavaType.INT64, 0, 3))
    io.input("plan", Bound.of(OnnxJavaType.INT64, 6, 1).also { it.longs.put(longArrayOf(5, place, 0, place, -1, place)) })
    io.input("rows", longs(0))
    io.input("kv", Bound.of(OnnxJavaType.UINT8, 1, slot.kvBytes.toInt()))
    io.output("logits", Bound.of(OnnxJavaType.FLOAT, 0, facts.vocab))
    io.output("ids", Bound.of(OnnxJavaType.INT64, 1, 1))
    io.output("values", Bound.of(OnnxJavaType.FLOAT, 1, 1))
    io.output("hidden", Bound.of(OnnxJavaType.FLOAT, 0, facts.hidden))
    return io
}

/**
 * Arguments: bundle, library or "-", operators, and a method, a number of tokens and perhaps "turns" (an engine stays open, and
 * decodes at every line of standard input), or "own"; without any, the JVM's own PSS.
 */
fun main(arguments: Array<String>) {
    if (arguments.isEmpty()) return println("{\"jvm_pss_mib\": ${pss() / 1024.0}}")
    val library = arguments[1].takeIf { it != "-" }?.let(::File)
    val served = Served(File(arguments[0]), library, arguments[2], arguments[3], arguments.getOrNull(4)?.toInt() ?: 0)
    if (arguments.getOrNull(5) == "turns") {
        served.load().use { engine -> while (readlnOrNull() != null) println(served.decode(engine).first) }
    } else {
        println(Gson().toJson(if (served.method == "own") ownCost(served.bundle, library!!) else served.figures()))
    }
    exitProcess(0)
}
