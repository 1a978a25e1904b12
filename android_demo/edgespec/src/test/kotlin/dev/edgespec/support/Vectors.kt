package dev.edgespec.support

import com.google.gson.JsonArray
import com.google.gson.JsonElement
import com.google.gson.JsonObject
import com.google.gson.JsonParser
import dev.edgespec.decoding.Matrix
import dev.edgespec.decoding.SamplingParams
import java.io.File
import kotlin.math.abs
import kotlin.math.exp
import org.junit.jupiter.api.Assertions.assertTrue

/** A file of tests/vectors; what its rows and fields are is said by tools/make_vectors.py. */
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
    temperature = given["temperature"]?.asDouble ?: 0.0,
    topK = given["top_k"]?.asInt ?: 0,
    topP = given["top_p"]?.asDouble ?: 1.0,
    minP = given["min_p"]?.asDouble ?: 0.0,
    repetitionPenalty = given["repetition_penalty"]?.asDouble ?: 1.0,
    logitBias = given["logit_bias"]?.asJsonObject?.entrySet()?.associate { it.key.toInt() to it.value.asString.toDouble() } ?: emptyMap(),
    seed = seed,
    acceptance = given["acceptance"]?.asString ?: "rejection",
    verification = given["verification"]?.asString ?: "token",
)

/** Equal up to the last bits, which the logarithms of two libraries may give otherwise. */
fun assertClose(expected: DoubleArray, got: DoubleArray, what: String) {
    assertTrue(expected.size == got.size, "$what: ${expected.size} numbers, got ${got.size}")
    for (at in expected.indices) {
        assertTrue(abs(expected[at] - got[at]) <= 1e-12 * maxOf(1.0, abs(expected[at])), "$what [$at]: ${expected[at]}, got ${got[at]}")
    }
}
