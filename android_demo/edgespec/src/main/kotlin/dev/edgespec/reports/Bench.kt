package dev.edgespec.reports

import dev.edgespec.decoding.Settings
import dev.edgespec.engine.*
import java.util.Locale
import java.util.Random
import kotlin.math.roundToInt

/* Every method of a bundle against plain decoding, in one interleaved run. */

const val BASELINE = "ar"
private const val RESAMPLES = 2000

/** Measurements of one method; [ratios]: plain decoding's time over this method's, pair by pair. */
class MethodFigures(val method: String) {
    val msPerToken = ArrayList<Double>() // a figure per run, without prefill
    val ratios = ArrayList<Double>()
    val results = ArrayList<Result>()
    val speed: Double get() = median(ratios) // over plain decoding
    var sameText = 0 // runs whose tokens equal plain decoding's

    fun asMap(): Map<String, Any?> {
        val (low, high) = bootstrap(ratios)
        val rounds = results.sumOf { it.stats.rounds }
        val drafted = results.sumOf { it.stats.drafted }
        return linkedMapOf(
            "method" to method, "tokens_per_second" to 1000 / median(msPerToken), "speedup" to median(ratios),
            "speedup_low" to low, "speedup_high" to high, "pairs" to ratios.size,
            "tokens_per_round" to if (rounds > 0) results.sumOf { it.stats.tokens }.toDouble() / rounds else 0.0,
            "acceptance_rate" to if (drafted > 0) results.sumOf { it.stats.accepted }.toDouble() / drafted else 0.0,
            "lossless" to ofAll(results.map { it.lossless }), "exact" to ofAll(results.map { it.exact }),
            "same_text" to sameText, "runs" to results.size, "reason" to results.last().reason,
        )
    }
}

private fun median(values: Collection<Double>): Double {
    val sorted = values.sorted()
    val half = sorted.size / 2
    return if (sorted.size % 2 == 1) sorted[half] else (sorted[half - 1] + sorted[half]) / 2
}

/** 95 % percentile interval of the median by resampling. */
private fun bootstrap(values: List<Double>): Pair<Double, Double> {
    val random = Random(0)
    val medians = List(RESAMPLES) { median(List(values.size) { values[random.nextInt(values.size)] }) }.sorted()
    val edge = (0.025 * RESAMPLES).roundToInt()
    return medians[edge] to medians[medians.size - 1 - edge]
}

/** Measure [methods] against plain decoding, interleaved on every prompt; the first round is not timed; [progress]: (done, of, method). */
fun bench(
    engine: Engine, prompts: List<String>, settings: Settings = Settings(), repeats: Int = 3,
    methods: List<String> = engine.methods, progress: (Int, Int, String) -> Unit = { _, _, _ -> },
): List<MethodFigures> {
    val found = (listOf(BASELINE) + methods.filter { it != BASELINE }).map(::MethodFigures)
    val of = found.size * prompts.size * (repeats + 1)
    var done = 0
    for (repeat in 0..repeats) for (prompt in prompts) {
        val runs = found.indices.map { found[(it + repeat) % found.size] }.associateWith { figures ->
            engine.generate(prompt, settings.copy(method = figures.method)).also { progress(++done, of, figures.method) }
        }
        if (repeat == 0) continue
        val plain = runs.getValue(found[0])
        for ((figures, result) in runs) {
            figures.results.add(result)
            figures.msPerToken.add(result.stats.decodeMs / result.stats.tokens)
            figures.ratios.add(plain.stats.decodeMs / plain.stats.tokens / figures.msPerToken.last())
            if (result.tokens.contentEquals(plain.tokens)) figures.sameText++
        }
    }
    return found
}

val BENCH_HEADINGS = listOf("tokens/s", "speed-up", "tok/round", "accepted", "same text")

fun benchRow(one: MethodFigures): List<String> {
    val row = one.asMap()
    fun show(form: String, vararg names: String) = form.format(Locale.ROOT, *names.map { row[it] }.toTypedArray())
    return listOf(
        show("%.1f", "tokens_per_second"), show("%.2fx (%.2f-%.2f)", "speedup", "speedup_low", "speedup_high"), show("%.2f", "tokens_per_round"),
        if (one.method == BASELINE) "-" else "%.0f %%".format(Locale.ROOT, 100 * row["acceptance_rate"] as Double),
        "${one.sameText}/${one.results.size}",
    )
}

/** A golden vector of a bundle, written again: [equal] = every token is the one that the exporting machine wrote. */
class Proved(val method: String, val expected: IntArray, val got: IntArray) {
    val equal: Boolean get() = expected.contentEquals(got)

    fun asMap(): Map<String, Any?> =
        linkedMapOf("method" to method, "equal" to equal, "expected" to expected.toList(), "got" to got.toList())
}

/** The bundle's golden vectors, generated again by every method that promises the same text; [progress] is called with (done, of). */
fun proof(engine: Engine, progress: (Int, Int) -> Unit = { _, _ -> }): List<Proved> {
    val golden = engine.bundle.manifest.golden
    val found = ArrayList<Proved>()
    var done = 0
    for (method in engine.methods) for (vector in golden) {
        val result = engine.generate(vector.prompt, Settings(method, vector.tokens.size))
        if (method == vector.method || result.exact == true) found.add(Proved(method, vector.tokens, result.tokens))
        progress(++done, golden.size * engine.methods.size)
    }
    return found
}
