package dev.edgespec.support

import com.google.gson.*
import dev.edgespec.Edgespec
import dev.edgespec.decoding.*
import dev.edgespec.engine.Engine
import dev.edgespec.reports.proof
import java.io.File
import kotlin.system.exitProcess

/* Requests that Python has served, served again here: see tests/support/agreement.py, which writes the file and starts this. */

/** Result of a bundle's requests: tokens compared, and every request that differs or lost its drafter. */
class Replayed(val compared: Int, val golden: Int, val wrong: List<String>)

/** Settings under the names that the Python side has for them. */
internal fun settings(case: JsonObject): Settings {
    val given = case["settings"].asJsonObject
    return Settings(
        method = given.text("method"), maxNewTokens = case.int("max_new_tokens"), gamma = given["gamma"]?.asInt,
        sampling = SamplingParams(
            temperature = given["temperature"]?.asDouble ?: 0.0, topK = given["top_k"]?.asInt ?: 0,
            topP = given["top_p"]?.asDouble ?: 1.0, minP = given["min_p"]?.asDouble ?: 0.0,
            repetitionPenalty = given["repetition_penalty"]?.asDouble ?: 1.0, seed = given["seed"]?.asLong,
            logitBias = given["logit_bias"]?.asJsonObject?.entrySet()?.associate { it.key.toInt() to it.value.asDouble } ?: emptyMap(),
            acceptance = given["acceptance"]?.asString ?: "rejection", verification = given["verification"]?.asString ?: "token",
            presencePenalty = given["presence_penalty"]?.asDouble ?: 0.0, frequencyPenalty = given["frequency_penalty"]?.asDouble ?: 0.0,
        ),
        drafts = DraftOptions(
            branch = given["branch"]?.ints()?.asList(), nodes = given["nodes"]?.asInt, cycles = given["cycles"]?.asInt,
            proposers = given["proposers"]?.asJsonArray?.map { it.asString } ?: emptyList(),
        ),
        stop = given["stop"]?.asJsonArray?.map { it.asString } ?: emptyList(), adaptive = given["adaptive"]?.asBoolean ?: true,
        ignoreEos = true, logprobs = case.has("logprobs"), prediction = given["prediction"]?.asString,
    )
}

private fun Engine.serve(case: JsonObject): String? {
    val result = generate(case.ints("prompt"), settings(case))
    val dropped = result.stats.droppedReason
    return when {
        dropped != null -> "drafter dropped: $dropped"
        !case.ints("tokens").contentEquals(result.tokens) -> "expected ${case["tokens"]}, got ${result.tokens.asList()}"
        case.text("text") != result.text -> "expected ${case["text"]}, got ${result.text}"
        case.has("finish") && case.text("finish") != result.finish -> "expected ${case["finish"]}, got ${result.finish}"
        // a drafter that drafts differently gives the same text: only its draft tokens show it
        case.has("drafted") && case.int("drafted") != result.stats.drafted ->
            "expected ${case["drafted"]} guesses, got ${result.stats.drafted}"
        case.has("histogram") && case.ints("histogram").asList() != result.stats.histogram ->
            "expected rounds ${case["histogram"]} by guesses accepted, got ${result.stats.histogram}"
        case.has("logprobs") && case.doubles("logprobs").zip(result.logprobs?.asList().orEmpty()).any { (one, other) -> Math.abs(one - other) > 1e-4 } ->
            "expected ${case["logprobs"]}, got ${result.logprobs?.asList()}"
        case.flag("exact") && result.exact != true -> "expected an exact result"
        else -> null
    }
}

/** Serve every request of a bundle again, and its golden vectors. */
fun replay(bundle: JsonObject, library: File): Replayed = Edgespec.load(File(bundle.text("path")), threads = 2, library = library).use { engine ->
    val cases = bundle["cases"].asJsonArray.map { it.asJsonObject }
    val wrong = cases.mapNotNull { case -> engine.serve(case)?.let { "${bundle.text("format")} ${case["settings"]}: $it" } }
    val proof = proof(engine).map { it.equal }
    val unproved = proof.indices.filter { !proof[it] }.map { "golden vector $it differs" }
    Replayed(cases.sumOf { it.ints("tokens").size }, proof.size, wrong + unproved)
}

/** Arguments: the file of requests, a library of native operators.  A line for every bundle; exit code 1 if one differs. */
fun main(arguments: Array<String>) {
    val golden = JsonParser.parseString(File(arguments[0]).readText()).asJsonObject
    val machine = System.getProperty("os.arch")
    var differ = 0
    for (bundle in golden["bundles"].asJsonArray.map { it.asJsonObject }) {
        val done = replay(bundle, File(arguments[1]))
        val requests = bundle["cases"].asJsonArray.size()
        println(
            "$machine ${bundle.text("operators")} ${bundle.text("format")}: ${done.compared} tokens of $requests requests and " +
                "${done.golden} golden vectors compared, ${done.wrong.size} differ",
        )
        done.wrong.forEach { println("  $it") }
        differ += done.wrong.size
    }
    exitProcess(if (differ == 0) 0 else 1) // not waiting for threads of a library
}
