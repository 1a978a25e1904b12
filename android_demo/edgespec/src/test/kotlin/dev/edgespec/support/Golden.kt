package dev.edgespec.support

import com.google.gson.JsonObject
import com.google.gson.JsonParser
import dev.edgespec.Edgespec
import dev.edgespec.engine.Engine
import dev.edgespec.planning.MemoryFacts
import java.io.File
import java.nio.file.Files

/** What Python wrote on fresh exports; tests/android/test_kotlin.py makes the file and names it. */
val GOLDEN: JsonObject by lazy { JsonParser.parseString(File(System.getProperty("edgespec.golden")).readText()).asJsonObject }

/** The smallest bundle for native operators. */
val BUNDLE: File by lazy {
    val all = GOLDEN["bundles"].asJsonArray.map { it.asJsonObject }
    File(all.first { it.text("operators") == "native" && it.text("format") == "int4" }.text("path"))
}

fun loadNative(bundle: File = BUNDLE, memory: MemoryFacts? = null, check: Boolean = true): Engine =
    Edgespec.load(bundle, threads = 1, library = File(GOLDEN.text("library")), memory = memory, check = check)

/** A copy of a bundle in a folder that goes with the test. */
fun <T> withCopy(bundle: File = BUNDLE, use: (File) -> T): T {
    val folder = Files.createTempDirectory("edgespec").toFile()
    try {
        for (file in bundle.walkTopDown().filter { it.isFile }) {
            val copy = File(folder, file.relativeTo(bundle).path)
            copy.parentFile.mkdirs()
            file.copyTo(copy)
        }
        return use(folder)
    } finally {
        folder.deleteRecursively()
    }
}
