package dev.edgespec.app

import java.io.File
import java.io.InputStream
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit
import kotlin.system.exitProcess
import kotlinx.coroutines.runBlocking

/** A bundle in a folder, as one that an app brings or a user picks. */
internal class Copied(private val from: File) : BundleSource {
    override val files = from.walkTopDown().filter { it.isFile }.map { it.relativeTo(from).path }.toList()

    override fun open(name: String): InputStream = File(from, name).inputStream()
}

/**
 * The app without its views, started for the first time with the bundle that it brings; then golden vectors.  Arguments: that bundle,
 * the app's folder; the system must find the native operators (tests/android/test_r8.py, also over what R8 has left of the app).
 */
fun main(arguments: Array<String>) {
    val (bundle, place) = arguments.map(::File)
    val queue = LinkedBlockingQueue<() -> Unit>()
    val chat = File(place, "chat.json")
    val state = AppState(Surroundings(File(place, "bundle"), chat, File(place, "cache"), File("libedgespec.so"), brought = { Copied(bundle) }), queue::add)
    fun run() {
        while (state.busy) (queue.poll(60, TimeUnit.SECONDS) ?: error("still at: ${state.status}"))()
        println(state.status)
    }
    println(state.chat.transcript.text.length) // what was kept before
    state.start()
    run()
    state.screen = PROOF
    state.prove()
    run()
    runBlocking { state.save().join() }
    println(Chat(chat).transcript.pieces(true) == state.chat.transcript.pieces(true))
    exitProcess(0)
}
