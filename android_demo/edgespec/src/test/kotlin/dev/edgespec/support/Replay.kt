package dev.edgespec.support

import com.google.gson.*
import dev.edgespec.Edgespec
import dev.edgespec.decoding.*
import dev.edgespec.drafters.Proposer
import dev.edgespec.engine.Engine
import dev.edgespec.reports.proof
import java.io.File
import kotlin.system.exitProcess

/* Requests that Python has served, served again here: see tests/support/agreement.py, which writes the file and starts this. */

/** Proposes the last token again. */
private class LastToken : Proposer {
    override fun propose(tokens: IntArray, budget: Int) = Proposal(IntArray(minOf(budget, 3)) { tokens.last() })
}

/** Result of a bundle's requests: tokens compared, and every request that differs or lost its drafter. */
class Replayed(val compared: Int, val golden: Int, val wrong: List<String>)

internal fun settings(case: JsonObject): Settings {
    val given = case["settings"].asJsonObject
    val method = given.text("method")
    return Settings(
        method = method.takeIf { it != "proposer" },
        maxNewTokens = case.int("max_new_tokens"),
        sampling = paramsOf(given, given["seed"]?.asLong),
        drafts = DraftOptions(
            branch = given["branch"]?.ints()?.asList(),
            proposers = given["proposers"]?.asJsonArray?.map { it.asString } ?: emptyList(), nodes = given["nodes"]?.asInt,
            cycles = given["cycles"]?.asInt, threshold = given["threshold"]?.asDouble,
            search = given["search"]?.asDouble ?: DraftOptions().search,
        ),
        adaptive = given["adaptive"]?.asBoolean ?: true,
        fallback = given["fallback"]?.asBoolean ?: true,
        proposer = if (method == "proposer") LastToken() else null,
        ignoreEos = true, prediction = given["prediction"]?.asString,
    )
}

private fun Engine.serve(case: JsonObject): String? {
    val result = generate(case.ints("prompt"), settings(case))
    val dropped = result.stats.droppedReason
    return when {
        dropped != null -> "drafter dropped: $dropped"
        !case.ints("tokens").contentEquals(result.tokens) -> "expected ${case["tokens"]}, got ${result.tokens.asList()}"
        case.text("text") != result.text -> "expected ${case["text"]}, got ${result.text}"
        // the clock chooses what auto begins with, and so whether a drafter must be shown what is known already
        result.methodRequested != "auto" && case.int("reused") != result.stats.reusedTokens ->
            "expected ${case["reused"]} reused tokens, got ${result.stats.reusedTokens}"
        // a drafter that drafts differently gives the same text: only its draft tokens show it
        case.has("drafted") && case.int("drafted") != result.stats.drafted ->
            "expected ${case["drafted"]} guesses, got ${result.stats.drafted}"
        case.has("histogram") && case.ints("histogram").asList() != result.stats.histogram ->
            "expected rounds ${case["histogram"]} by guesses accepted, got ${result.stats.histogram}"
        case.flag("exact") && result.exact != true -> "expected an exact result"
        else -> null
    }
}

/** Serve every request of a bundle again, and its golden vectors; [onOnnxRuntime]: native operators too. */
fun replay(bundle: JsonObject, library: File, onOnnxRuntime: Boolean = false): Replayed {
    val engine = Edgespec.load(
        File(bundle.text("path")), threads = 2, operators = bundle.text("operators"), library = library,
        precision = bundle.text("precision"), onOnnxRuntime = onOnnxRuntime,
    )
    return engine.use {
        val cases = bundle["cases"].asJsonArray.map { it.asJsonObject }
        val wrong = cases.mapNotNull { case -> engine.serve(case)?.let { "${bundle.text("format")} ${case["settings"]}: $it" } }
        val proof = proof(engine).map { it.equal }
        val unproved = proof.indices.filter { !proof[it] }.map { "golden vector $it differs" }
        Replayed(cases.sumOf { it.ints("tokens").size }, proof.size, wrong + unproved)
    }
}

/** Arguments: the file of requests, a library of native operators, and perhaps "onnxruntime", which then runs those.  A line for every bundle; exit code 1 if one differs. */
fun main(arguments: Array<String>) {
    val golden = JsonParser.parseString(File(arguments[0]).readText()).asJsonObject
    val machine = System.getProperty("os.arch")
    var differ = 0
    for (bundle in golden["bundles"].asJsonArray.map { it.asJsonObject }) {
        val done = replay(bundle, File(arguments[1]), arguments.size > 2)
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
