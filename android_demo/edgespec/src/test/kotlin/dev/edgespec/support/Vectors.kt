package dev.edgespec.support

import com.google.gson.*
import dev.edgespec.Edgespec
import dev.edgespec.engine.Engine
import dev.edgespec.planning.MemoryFacts
import java.io.File
import java.nio.file.Files

fun JsonObject.int(name: String): Int = this[name].asInt

fun JsonObject.text(name: String): String = this[name].asString

fun JsonObject.flag(name: String): Boolean = this[name].asBoolean

fun JsonObject.ints(name: String): IntArray = this[name].ints()

fun JsonElement.ints(): IntArray = IntArray(asJsonArray.size()) { asJsonArray[it].asInt }

fun JsonObject.doubles(name: String): DoubleArray = getAsJsonArray(name).doubles()

fun JsonArray.doubles(): DoubleArray = DoubleArray(size()) { this[it].asDouble }

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
    File(all.first { it.text("format") == "int4" }.text("path"))
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
