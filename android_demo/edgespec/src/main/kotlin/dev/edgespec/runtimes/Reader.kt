package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.BundleError
import java.io.File
import java.math.BigDecimal

internal const val EXPORT_AGAIN = "export the bundle again"
private const val MOST_TOKEN = Int.MAX_VALUE.toLong()

/** Reads typed values from JSON; errors name the place of a wrong one. */
internal class Reader(private val file: File, private val data: JsonObject, private val where: String = "") {
    private val read = HashSet<String>()

    private fun at(name: String) = if (where.isEmpty()) name else "$where.$name"
    fun wrong(name: String, what: String, hint: String? = EXPORT_AGAIN): BundleError = BundleError("$file: ${at(name)}: $what", hint)

    private fun <T> find(name: String, value: (String, JsonElement) -> T): T? {
        read.add(name)
        return data[name]?.takeIf { !it.isJsonNull }?.let { value(name, it) }
    }

    private fun <T> need(name: String, found: T?): T = found ?: throw wrong(name, "Field required")

    private inline fun primitive(name: String, it: JsonElement, what: String, fits: (JsonPrimitive) -> Boolean): JsonPrimitive =
        (it as? JsonPrimitive)?.takeIf(fits) ?: throw wrong(name, "Input should be a valid $what")

    private fun string(name: String, it: JsonElement): String = primitive(name, it, "string") { found -> found.isString }.asString
    private fun number(name: String, it: JsonElement): Double = primitive(name, it, "number") { found -> found.isNumber }.asDouble
    private fun json(name: String, it: JsonElement): JsonObject = it as? JsonObject ?: throw wrong(name, "Input should be an object")

    private fun array(name: String, it: JsonElement): List<JsonElement> =
        (it as? JsonArray ?: throw wrong(name, "Input should be a valid list")).toList()

    private fun whole(name: String, it: JsonElement, least: Long, most: Long): Long {
        val number = try {
            BigDecimal(primitive(name, it, "integer") { found -> found.isNumber }.asString).longValueExact()
        } catch (_: ArithmeticException) {
            throw wrong(name, "Input should be a valid integer")
        }
        if (number < least) throw wrong(name, "Input should be greater than ${least - 1}")
        if (number > most) throw wrong(name, "Input should be at most $most")
        return number
    }

    private fun <T> part(name: String, it: JsonElement, make: Reader.() -> T): T =
        Reader(file, json(name, it), at(name)).let { reader -> reader.make().also { reader.done() } }

    private fun <T> each(name: String, value: (String, JsonElement) -> T): List<T> =
        (find(name, ::array) ?: emptyList()).map { value(name, it) }

    fun textOrNull(name: String, allowed: List<String>? = null): String? = find(name, ::string)?.also {
        if (allowed != null && it !in allowed) throw wrong(name, "Input should be ${allowed.joinToString(", ") { one -> "'$one'" }}")
    }

    fun text(name: String, allowed: List<String>? = null): String = need(name, textOrNull(name, allowed))
    fun pathOrNull(name: String): String? = textOrNull(name)?.also { checkInside(name, it) }
    fun path(name: String): String = need(name, pathOrNull(name))

    fun checkInside(name: String, path: String) {
        if (path.isEmpty() || path.startsWith("/") || path.split("/").any { it == ".." } || "\\" in path || ":" in path) {
            throw wrong(name, "Value error, path '$path' leaves the bundle: only relative paths inside the folder are allowed")
        }
    }

    fun long(name: String): Long = need(name, find(name) { _, it -> whole(name, it, Long.MIN_VALUE, Long.MAX_VALUE) })
    fun int(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): Int = need(name, intOrNull(name, least, most))

    fun intOrNull(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): Int? =
        find(name) { _, it -> whole(name, it, least.toLong(), most.toLong()).toInt() }

    fun numberOrNull(name: String): Double? = find(name, ::number)

    fun flag(name: String): Boolean = flagOr(name, false)
    fun flagOr(name: String, otherwise: Boolean): Boolean =
        find(name) { _, it -> primitive(name, it, "boolean") { found -> found.isBoolean }.asBoolean } ?: otherwise

    fun wordOrFlag(name: String): String? = find(name) { _, it -> primitive(name, it, "boolean or string") { found -> !found.isNumber }.asString }

    fun jsonOrNull(name: String): JsonObject? = find(name, ::json)
    fun <T> partOrNull(name: String, make: Reader.() -> T): T? = find(name) { _, it -> part(name, it, make) }
    fun <T> part(name: String, make: Reader.() -> T): T = need(name, partOrNull(name, make))

    private fun <T> named(name: String, value: (String, JsonElement) -> T): Map<String, T> =
        jsonOrNull(name)?.entrySet()?.associate { (key, it) -> key to value("$name.$key", it) } ?: emptyMap()

    fun <T> members(name: String, make: Reader.(String) -> T): Map<String, T> =
        named(name) { at, it -> part(at, it) { make(at.removePrefix("$name.")) } }

    fun namedInts(name: String): Map<String, Int> = named(name) { at, it -> whole(at, it, 0, MOST_TOKEN).toInt() }
    fun namedTexts(name: String): Map<String, String> = named(name, ::string)

    fun <T> parts(name: String, make: Reader.() -> T): List<T> =
        (find(name, ::array) ?: emptyList()).mapIndexed { at, value -> part("$name.$at", value, make) }

    fun intsOrNull(name: String): List<Int>? = if (data[name] == null) null else ints(name)
    fun ints(name: String, least: Int = Int.MIN_VALUE, most: Int = Int.MAX_VALUE): List<Int> =
        each(name) { _, it -> whole(name, it, least.toLong(), most.toLong()).toInt() }

    /** Tokens, and names in [places] as -1 - their index. */
    fun tokensOr(name: String, places: List<String>): List<Int> = each(name) { _, it ->
        val at = places.indexOf((it as? JsonPrimitive)?.takeIf { word -> word.isString }?.asString)
        if (at < 0) whole(name, it, 0, MOST_TOKEN).toInt() else -1 - at
    }

    fun texts(name: String): List<String> = each(name, ::string)
    fun numbers(name: String): List<Double> = each(name, ::number)
    fun lists(name: String): List<List<Double>> = each(name) { _, row -> array(name, row).map { number(name, it) } }
    fun tokenLists(name: String): List<List<Int>> = each(name) { _, row -> array(name, row).map { whole(name, it, 0, MOST_TOKEN).toInt() } }
    fun ignore(vararg names: String) = read.addAll(names) // accept keys that this runtime does not use

    /** Unknown keys are errors, so that a typo in a manifest cannot pass silently. */
    fun done() {
        data.keySet().firstOrNull { it !in read }?.let { throw wrong(it, "Extra inputs are not permitted") }
    }
}
