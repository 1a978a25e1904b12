package dev.edgespec.example

import dev.edgespec.Edgespec
import dev.edgespec.EdgespecError
import java.io.File
import kotlin.system.exitProcess
import kotlinx.coroutines.runBlocking

/**
 * Answers the lines of standard input with a bundle that has a chat template, on a desktop JVM:
 *
 *     java dev.edgespec.example.ChatKt BUNDLE libedgespec.so
 *
 * An app does the same from a coroutine, as MainActivity.kt does.
 */
fun main(arguments: Array<String>) {
    if (arguments.size < 2) {
        System.err.println("usage: ChatKt BUNDLE libedgespec.so [TOKENS]")
        exitProcess(2)
    }
    try {
        Edgespec.load(File(arguments[0]), library = File(arguments[1])).use { engine ->
            val settings = engine.defaults.copy(maxNewTokens = arguments.getOrNull(2)?.toInt() ?: 128)
            val talk = engine.conversation(settings = settings)
            for (line in generateSequence(::readlnOrNull)) runBlocking {
                talk.stream(line).collect { chunk ->
                    print(chunk.text)
                    System.out.flush()
                    chunk.result?.let { System.err.println("%.1f tokens/s".format(it.stats.tokensPerSecond)) }
                }
                println()
            }
        }
    } catch (error: EdgespecError) {
        System.err.println(error.message)
        exitProcess(1)
    }
    exitProcess(0) // not waiting for threads of a library
}
