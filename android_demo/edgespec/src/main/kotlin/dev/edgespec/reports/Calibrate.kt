package dev.edgespec.reports

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.drafters.hex
import dev.edgespec.engine.*
import dev.edgespec.formulas.*
import dev.edgespec.planning.*
import dev.edgespec.runtimes.*
import java.io.File
import java.security.MessageDigest
import java.time.Instant
import java.time.temporal.ChronoUnit

/*
 * Measures passes, drafts, prefills and whole methods of a bundle on this device, within a time limit.  The result is the profile for
 * `edgespec plan --device FILE`, with the fields of Python's (edgespec/planning/profiles.py, edgespec/reports/calibrate.py).
 */

private const val PROFILE_SCHEMA = 1
private const val LEARN = 2 // texts that control learns from, before those that are timed
private const val NEW = 56 // tokens of a text: rounds of the last 64 are known one by one
private const val FEWEST_NEW = 16
private const val PREFILL = 128 // tokens of a timed prefill
private const val KV_SHARE = 0.25 // of the memory that is free: keys and values of the deepest pass take no more
private const val TRIES = 3 // of passes on a busy device: the steadiest count
private const val BUSY = 1.5 // from this spread of equal passes on, something else ran
private val OUTSIDE = Regex("(\"(?:[^\"\\\\]++|\\\\.)*+\")|\\s+") // strings of JSON, and the white space around them
private val ROWS = listOf(1, 2, 3, 5, 9, 17)
private val DEPTHS = listOf(64, 512, 2048, 8192, 32768, 131072)
private val SHARES = mapOf("passes" to 0.33, "prefill" to 0.10, "drafts" to 0.07, "trials" to 0.50)

/**
 * Measure an engine's bundle on this device.
 *
 * @param machine description of the device.
 * @param seconds of measuring, divided among its parts; each part makes its minimum number of turns in any case.
 * @param process resident bytes of the process before the bundle was loaded ([Machine.resident]).
 * @param progress called for every part: (its name, done, of).
 * @return the profile, as a file of JSON; call it outside the main thread.
 */
fun calibrate(
    engine: Engine, machine: Machine = Machine(), seconds: Double = 15.0, process: Long = 0, progress: (String, Int, Int) -> Unit = { _, _, _ -> },
): String = Calibration(engine, machine, seconds, progress).run(process)

private class Calibration(
    private val engine: Engine, private val machine: Machine, private val seconds: Double, private val progress: (String, Int, Int) -> Unit,
) {
    private val begun = System.nanoTime()
    private val notes = ArrayList<String>()
    private var spread = 1.0
    private val target = engine.bundle.manifest.target
    private val native = engine.operators.kind == "native"

    fun run(process: Long): String {
        val stored = JsonParser.parseString(File(engine.bundle.path, MANIFEST).readText()).asJsonObject
        val data = withNewNames(stored, stored["schema_version"].asInt)
        val part = data["target"].asJsonObject
        val weights = readBytes(part, native)
        val kv = kvTokenBytes(target, engine.attention)
        val exact = engine.onDecodeThread { engine.rowsExact }
        val times = LinkedHashMap<Int, Map<Int, Double>>()
        val read = LinkedHashMap<Int, Double>()
        val drafted = List(2) { LinkedHashMap<String, MutableMap<Int, Double>>() }
        engine.onDecodeThread {
            val lane = engine.lanes.any()
            try {
                lane.attend(null)
                times.putAll(passes(lane, depths(kv)))
                read.putAll(prefill(lane, times.keys.toList()))
                drafts(lane, times.keys.toList(), drafted)
            } finally {
                engine.lanes.drop(lane) // its drafters have seen nothing real
            }
        }
        val step = times.values.first().getValue(1)
        val profile = linkedMapOf(
            "schema_version" to PROFILE_SCHEMA, "machine" to machine.facts(native, engine.library), "bundle" to named(),
            "name" to engine.bundle.path.absoluteFile.name, "facts" to part["facts"], "format" to target.format,
            "head_format" to target.headFormat, "weight_bytes" to weights, "kv_bytes" to kv, "operators" to engine.operators.kind,
            "device" to "cpu", "threads" to engine.threads, "attention" to engine.attention.name, "strict" to engine.strict,
            "context" to engine.context, "passes" to times, "drafts" to drafted[0], "first_drafts" to drafted[1],
            "trials" to trials(step), "prefill" to read, "bandwidth" to 1000 * weights / step, "spread" to spread, "rows_exact" to exact,
            "process_bytes" to process, "seconds" to (System.nanoTime() - begun) / 1e9, "notes" to notes,
            "created" to Instant.now().truncatedTo(ChronoUnit.SECONDS).toString(),
        )
        return GsonBuilder().setPrettyPrinting().create().toJson(profile)
    }

    /** Names the bundle by its manifest, without the line breaks of the file (`manifest_hash`). */
    private fun named(): String {
        val kept = File(engine.bundle.path, MANIFEST).readText().replace(OUTSIDE) { it.groupValues[1] }
        return hex(MessageDigest.getInstance("SHA-256").digest(kept.toByteArray()))
    }

    /** Tokens before the timed passes: up to the context, as far as memory allows. */
    private fun depths(kv: Long): List<Int> {
        val free = engine.freeMemory?.let { (KV_SHARE * it / kv).toInt() } ?: Int.MAX_VALUE
        val room = engine.context - ROWS.max() - 1
        if (free < room) notes.add("no passes beyond depth $free: their keys and values would fill the memory")
        val most = minOf(room, free).coerceAtLeast(1)
        val found = DEPTHS.filter { it < most }
        return if (found.isEmpty() || most > 1.5 * found.last()) found + most else found
    }

    /** Milliseconds by depth and rows, as greedy rounds make them. */
    private fun passes(lane: Lane, depths: List<Int>): Map<Int, Map<Int, Double>> {
        val slot = lane.target
        val sizes = ROWS.filter { it <= engine.context - 1 }
        val found = each("passes", depths, 2) { depth, seconds ->
            slot.standIn(depth)
            steadiest(sizes.associateWith { over(slot, it) }, seconds)
        }
        if (found.size < depths.size) notes.add("no passes beyond depth ${found.keys.max()}: the time was up")
        return found
    }

    /** A pass over [rows] rows of different tokens, which go to different experts. */
    private fun over(slot: Slot, rows: Int): () -> Any = IntArray(rows) { it % slot.vocabSize }.let { tokens -> { slot.forwardBest(tokens) } }

    private fun prefill(lane: Lane, depths: List<Int>): Map<Int, Double> {
        val wanted = depths.filter { it <= engine.context - PREFILL }.ifEmpty { listOf(0) }
        val size = minOf(PREFILL, engine.context - 1 - wanted[0])
        return each("prefill", wanted, 1) { depth, seconds ->
            val times = timeTurns(mapOf(depth to { lane.target.prefill(IntArray(size)) }), seconds, least = 1) { lane.standIn(depth) }
            1000 * size / median(times.getValue(depth))
        }
    }

    /** One draft step of every method that has one, and a round's [first] where it takes another time, at the least and the most depth. */
    private fun drafts(lane: Lane, depths: List<Int>, found: List<MutableMap<String, MutableMap<Int, Double>>>) {
        val steps = LinkedHashMap<Pair<String, Boolean>, () -> Any>()
        for (name in engine.methods) try {
            val bare = Settings(name, adaptive = false)
            val drafter = lane.drafter(engine.chooseFor(bare), bare)
            for (first in listOf(false, true)) drafter.dryStep(first)?.let { run ->
                run()
                steps[name to first] = run
            }
        } catch (error: Exception) { // as in a request: it costs the method, not the rest
            notes.add("$name was not measured: ${firstLine(error)}")
        }
        val wanted = listOf(depths.first(), depths.last()).distinct()
        each("drafts", wanted, wanted.size) { depth, seconds ->
            lane.standIn(depth)
            for ((step, times) in timeTurns(steps, seconds)) {
                found[if (step.second) 1 else 0].getOrPut(step.first) { LinkedHashMap() }[depth] = median(times)
            }
        }
    }

    /** Every method on the bundle's prompts, interleaved with plain decoding; control only learns from the first texts. */
    private fun trials(step: Double): Map<String, Map<String, Any>> {
        val prompts = engine.bundle.manifest.golden.map { it.prompt }.filter { it.size in 1..engine.context - 2 }
        if (prompts.isEmpty()) {
            notes.add("no method was tried: there are no prompts that fit")
            return emptyMap()
        }
        val names = (listOf(BASELINE) + engine.methods).distinct()
        val time = share("trials")
        val fitting = (1000 * time / ((LEARN + 2) * names.size * maxOf(step, 1e-3))).toInt()
        val length = minOf(NEW, maxOf(FEWEST_NEW, fitting), engine.context - prompts.maxOf { it.size } - 1).coerceAtLeast(1)
        val results = names.associateWithTo(LinkedHashMap<String, ArrayList<Result>>()) { ArrayList() }
        val start = System.nanoTime()
        val texts = LEARN + maxOf(1, 2 * prompts.size - LEARN)
        for (number in 0 until texts) {
            if (number > LEARN && (System.nanoTime() - start) / 1e9 > time) break
            progress("trials", number, texts)
            for (at in names.indices) {
                val name = names[(at + number) % names.size]
                if (name !in results) continue
                val settings = Settings(name, length, ignoreEos = engine.encoding == null)
                val result = engine.generate(prompts[number % prompts.size], settings)
                val dropped = result.stats.droppedReason
                if (dropped != null) {
                    notes.add("$name failed: $dropped")
                    results.remove(name)
                } else if (number >= LEARN) {
                    results.getValue(name).add(result)
                }
            }
        }
        // passes of equal rows take the same time for every method, except early exits, whose first layers have run before
        val shared = passTimes(results.filterKeys { it != "paradecode" }.values.flatten())
        val plain = results.getValue(BASELINE)
        val token = round(plain, shared).sum() * plain.sumOf { it.stats.rounds } / plain.sumOf { it.stats.tokens }
        return results.mapValues { (name, made) -> trial(made, if (name == "paradecode") passTimes(made) else shared, token) }
    }

    private fun recent(results: List<Result>) = results.flatMap { it.stats.recent }
    private fun passTimes(results: List<Result>) = recent(results).groupBy({ 1 + it.drafted }, { it.verifyMs }).mapValues { median(it.value) }

    /** Drafts, pass and rest of a mean round, in milliseconds; of rounds with as many rows the median counts for all. */
    private fun round(results: List<Result>, passes: Map<Int, Double>): List<Double> {
        val rounds = results.sumOf { it.stats.rounds }
        val drafts = recent(results).groupBy({ 1 + it.drafted }, { it.draftMs })
        return listOf(
            drafts.values.sumOf { it.size * median(it) } / rounds, drafts.entries.sumOf { (rows, taken) -> taken.size * passes.getValue(rows) } / rounds,
            median(results.map { it.stats.otherMs / it.stats.rounds }),
        )
    }

    private fun trial(results: List<Result>, passes: Map<Int, Double>, plain: Double): Map<String, Any> {
        fun added(of: (Stats) -> List<Int>) = results.map { of(it.stats) }.let { all ->
            List(all.maxOf { it.size }) { at -> all.sumOf { it.getOrElse(at) { 0 } } }
        }
        val rounds = results.sumOf { it.stats.rounds }
        val tokens = results.sumOf { it.stats.tokens }
        val (draft, verify, other) = round(results, passes)
        val deep = results.sumOf { result ->
            result.stats.recent.runningFold(result.stats.promptTokens) { depth, round -> depth + round.tokens }.dropLast(1).sum()
        }
        return linkedMapOf(
            "rounds" to rounds, "tokens" to tokens, "drafted" to results.sumOf { it.stats.drafted },
            "accepted" to results.sumOf { it.stats.accepted }, "rows" to recent(results).groupingBy { 1 + it.drafted }.eachCount().toSortedMap(),
            "draft_ms" to draft, "verify_ms" to verify, "other_ms" to other, "speedup" to plain * tokens / rounds / (draft + verify + other),
            "depth" to deep.toDouble() / rounds, "offered" to added { it.offered }, "accepted_at" to added { it.acceptedAt },
        )
    }

    /** Time of a part: its share of what is left, so that those after it make up for one that took longer. */
    private fun share(part: String): Double {
        val left = maxOf(0.0, seconds - (System.nanoTime() - begun) / 1e9)
        return left * SHARES.getValue(part) / SHARES.entries.dropWhile { it.key != part }.sumOf { it.value }
    }

    /** Go through depths until a part's time is over, at least [fewest] of them. */
    private fun <T> each(part: String, depths: List<Int>, fewest: Int, run: (Int, Double) -> T): Map<Int, T> {
        val (time, start) = share(part) to System.nanoTime()
        val found = LinkedHashMap<Int, T>()
        for ((number, depth) in depths.withIndex()) {
            if (number >= fewest && (System.nanoTime() - start) / 1e9 > time) break
            progress(part, number, depths.size)
            found[depth] = run(depth, time / depths.size)
        }
        return found
    }

    /** Median time of each run, of the steadiest of several tries: something else may run on the device. */
    private fun <K> steadiest(runs: Map<K, () -> Any>, seconds: Double): Map<K, Double> {
        var best = emptyMap<K, List<Double>>()
        var least = Double.POSITIVE_INFINITY
        for (number in 1..TRIES) {
            val times = timeTurns(runs, seconds)
            val found = median(times.values.map(::unsteady))
            if (found < least) best = times.also { least = found }
            if (least < BUSY) break
        }
        spread = maxOf(spread, least)
        return best.mapValues { median(it.value) }
    }

    private fun unsteady(times: List<Double>): Double {
        val sorted = times.sorted()
        fun at(share: Double): Double {
            val place = share * (sorted.size - 1)
            val low = place.toInt()
            return sorted[low] + (place - low) * (sorted[minOf(low + 1, sorted.size - 1)] - sorted[low])
        }
        return if (at(0.25) > 0) at(0.75) / at(0.25) else 1.0
    }
}
