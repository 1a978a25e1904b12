package dev.edgespec.support

import dev.edgespec.Edgespec
import dev.edgespec.decoding.Settings
import java.io.File

/** Keeps texts until it is killed; arguments: a bundle, a library of native operators, a cache; on stdin: tokens. */
fun main(arguments: Array<String>) {
    val (bundle, library, cache) = arguments.map(::File)
    val prompt = readln().split(" ").map { it.toInt() }.toIntArray()
    val engine = Edgespec.load(bundle, threads = 1, library = library, cache = cache)
    engine.saved!!.worth = 0.0
    println("loaded")
    for (at in prompt.indices) engine.generate(prompt.drop(at).toIntArray() + prompt.take(at), Settings("ar", 8, ignoreEos = true))
}
