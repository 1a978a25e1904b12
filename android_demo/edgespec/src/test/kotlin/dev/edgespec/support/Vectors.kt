package dev.edgespec.support

import com.google.gson.*
import dev.edgespec.Edgespec
import dev.edgespec.decoding.*
import dev.edgespec.engine.Engine
import dev.edgespec.planning.MemoryFacts
import java.io.File
import java.nio.file.Files
import kotlin.math.*
import org.junit.jupiter.api.Assertions.assertTrue

/** A file of tests/vectors; tools/make_vectors.py defines its rows and fields. */
fun vectors(name: String): List<JsonObject> =
    JsonParser.parseString(File("../../tests/vectors/$name.json").readText()).asJsonArray.map { it.asJsonObject }

fun JsonObject.int(name: String): Int = this[name].asInt

fun JsonObject.text(name: String): String = this[name].asString

fun JsonObject.flag(name: String): Boolean = this[name].asBoolean

fun JsonObject.ints(name: String): IntArray = this[name].ints()

fun JsonElement.ints(): IntArray = IntArray(asJsonArray.size()) { asJsonArray[it].asInt }

fun JsonObject.intsOrNull(name: String): IntArray? = this[name]?.takeIf { !it.isJsonNull }?.ints()

fun JsonObject.doubles(name: String): DoubleArray = getAsJsonArray(name).doubles()

fun JsonArray.doubles(): DoubleArray = DoubleArray(size()) { this[it].asDouble }

/** [vocab]: the logits of a vector: a hash of (seed, token) as a fraction, times the scale. */
fun row(seed: Int, vocab: Int, scale: Double = 6.0): FloatArray = FloatArray(vocab) { token ->
    val mask = (1L shl 32) - 1
    val first = (token * 2654435761L + seed * 40503L + 12345) and mask
    val hashed = (first * 2246822519L + seed) and mask
    ((hashed / 4294967296.0 * 2 - 1) * scale).toFloat()
}

fun softmax(logits: FloatArray): DoubleArray {
    val top = logits.max().toDouble()
    val weights = DoubleArray(logits.size) { exp(logits[it] - top) }
    val total = weights.sum()
    return DoubleArray(weights.size) { weights[it] / total }
}

/** Rows of logits as a pass gives them. */
fun matrix(rows: List<FloatArray>): Matrix =
    Matrix.of(FloatArray(rows.size * rows[0].size) { rows[it / rows[0].size][it % rows[0].size] }, rows.size, rows[0].size)

/** Sampling parameters under the names that the Python side has for them. */
fun paramsOf(given: JsonObject, seed: Long? = null) = SamplingParams(
    temperature = given["temperature"]?.asDouble ?: 0.0, topK = given["top_k"]?.asInt ?: 0,
    topP = given["top_p"]?.asDouble ?: 1.0, minP = given["min_p"]?.asDouble ?: 0.0,
    repetitionPenalty = given["repetition_penalty"]?.asDouble ?: 1.0,
    logitBias = given["logit_bias"]?.asJsonObject?.entrySet()?.associate { it.key.toInt() to it.value.asString.toDouble() } ?: emptyMap(),
    seed = seed, acceptance = given["acceptance"]?.asString ?: "rejection", verification = given["verification"]?.asString ?: "token",
    presencePenalty = given["presence_penalty"]?.asDouble ?: 0.0, frequencyPenalty = given["frequency_penalty"]?.asDouble ?: 0.0,
    prompt = given["prompt"]?.asInt ?: 0,
)

/** Equal up to the last bits, which the logarithms of two libraries may give otherwise. */
fun assertClose(expected: DoubleArray, got: DoubleArray, what: String) {
    assertTrue(expected.size == got.size, "$what: ${expected.size} numbers, got ${got.size}")
    for (at in expected.indices) {
        assertTrue(abs(expected[at] - got[at]) <= 1e-12 * maxOf(1.0, abs(expected[at])), "$what [$at]: ${expected[at]}, got ${got[at]}")
    }
}

/** What Python wrote on fresh exports: the file that is named (tests/android/test_kotlin.py), or one that is made here, once. */
val GOLDEN: JsonObject by lazy {
    val file = System.getProperty("edgespec.golden")?.let(::File) ?: File("../target/golden/golden.json")
    if (!file.isFile) make(file.absoluteFile.normalize().parentFile)
    JsonParser.parseString(file.readText()).asJsonObject
}

private fun make(folder: File) {
    folder.deleteRecursively()
    val command = listOf("python3", "-m", "tests.android.writes", folder.path)
    val run = ProcessBuilder(command).directory(File("../..")).redirectErrorStream(true).start()
    val said = run.inputStream.bufferedReader().readText()
    check(run.waitFor() == 0) { "bundles are made by Python: pip install -e '.[dev]' in an environment that is active\n${said.takeLast(3000)}" }
}

/** The smallest bundle for native operators. */
val BUNDLE: File by lazy {
    val all = GOLDEN["bundles"].asJsonArray.map { it.asJsonObject }
    File(all.first { it.text("operators") == "native" && it.text("format") == "int4" }.text("path"))
}

fun loadNative(bundle: File = BUNDLE, memory: MemoryFacts? = null, check: Boolean = true): Engine =
    Edgespec.load(bundle, threads = 1, library = File(GOLDEN.text("library")), memory = memory, check = check)

/** A copy of a folder, or an empty one, that goes with the test. */
fun <T> withCopy(from: File? = BUNDLE, use: (File) -> T): T {
    val folder = Files.createTempDirectory("edgespec").toFile()
    try {
        from?.copyRecursively(folder, overwrite = true)
        return use(folder)
    } finally {
        folder.deleteRecursively()
    }
}
