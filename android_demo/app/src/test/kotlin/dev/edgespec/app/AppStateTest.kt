package dev.edgespec.app

import com.google.gson.*
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.Trim
import java.io.File
import java.io.InputStream
import java.nio.file.Path
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

/** The app without its views, on real bundles (tests/android/test_kotlin.py). */
class AppStateTest {
    @TempDir
    lateinit var folder: Path
    private val golden: JsonObject = JsonParser.parseString(File(System.getProperty("edgespec.golden") ?: "../target/golden/golden.json").readText()).asJsonObject // edgespec's tests make it
    private val bundles = golden["bundles"].asJsonArray.map { it.asJsonObject }
    private val plain = bundles.first()["path"].asString
    private val talking = golden["conversation"].asJsonObject["path"].asString
    private val queue = LinkedBlockingQueue<() -> Unit>() // the main thread of a phone

    private fun state(bundle: File) = AppState(
        Surroundings(
            bundle, File(folder.toFile(), "chat.json"), File(folder.toFile(), "cache"), File("libedgespec.so"), mapOf("model" to "test"),
            brought = { brought },
        ),
        queue::add,
    )

    private var brought: BundleSource? = null

    /** Begin something, and be the main thread until the app has nothing to do, or [until] is so. */
    private fun AppState.finish(until: () -> Boolean = { false }, begin: AppState.() -> Unit) {
        begin()
        while (busy && !until()) (queue.poll(300, TimeUnit.SECONDS) ?: error("still at: $status"))()
    }

    private fun opened(bundle: String) = state(File(bundle)).apply { finish { load() } }

    /** A bundle whose files are changed on the way. */
    private fun changed(how: (String, InputStream) -> InputStream) = object : BundleSource {
        private val whole = Copied(File(talking))
        override val files get() = whole.files

        override fun open(name: String): InputStream = how(name, whole.open(name))
    }

    @Test
    fun `a bundle is imported, and one that is damaged or does not open leaves it in place`() {
        val target = File(folder.toFile(), "bundle")
        val state = state(target)
        state.finish { start() }
        assertTrue("edgespec export" in state.status, state.status)
        state.finish { take { Copied(File(talking)) } }
        assertNotNull(state.engine, state.status)
        state.finish { take { changed { name, file -> file.apply { if (!name.endsWith(".json")) skip(1) } } } }
        assertTrue("truncated" in state.status, state.status)
        assertEquals(state.proofOfAll(), "equal")
        // all hashes are right, and yet it does not open
        val graph = "not a graph".toByteArray()
        val sum = java.security.MessageDigest.getInstance("SHA-256").digest(graph).joinToString("") { "%02x".format(it) }
        state.finish { take { changed { name, file ->
            if (name.endsWith(".onnx")) graph.inputStream() else if (name != "edgespec.json") file else {
                val data = JsonParser.parseString(file.reader().readText()).asJsonObject
                for ((of, entry) in data["files"].asJsonObject.entrySet()) if (of.endsWith(".onnx")) entry.asJsonObject.apply {
                    addProperty("size", graph.size)
                    addProperty("sha256", sum)
                }
                data.toString().byteInputStream()
            }
        } } }
        assertTrue("graph" in state.status, state.status)
        assertEquals(state.proofOfAll(), "equal")
        // any exception of a document provider is shown as a line
        for (error in listOf(SecurityException("revoked"), NoSuchElementException("gone"), UnsatisfiedLinkError("no library"))) {
            state.finish { take { throw error } }
            assertTrue(error.message!! in state.status, state.status)
        }
        assertEquals(state.proofOfAll(), "equal")
        state.close()
    }

    @Test
    fun `the first start shows what the bundle that came with the app does`() {
        brought = Copied(File(talking))
        val state = state(File(folder.toFile(), "new"))
        val work = ArrayList<Boolean>()
        state.worked = work::add
        state.finish { start() }
        assertTrue(state.chat.transcript.text.startsWith(state.examples.first()) && "tokens/s" in state.status, state.status)
        assertEquals(listOf(true, false, true, false), work)
        kotlinx.coroutines.runBlocking { state.save().join() }
        state.close()
    }

    private fun AppState.proofOfAll(): String {
        screen = PROOF
        finish { prove() }
        assertTrue(proved.isNotEmpty())
        assertEquals("${proved.size} of ${proved.size} texts equal on this device", status)
        assertTrue("\"equal\": true" in report("proof"))
        return if (proved.all { it.equal }) "equal" else "differs"
    }

    @Test
    fun `a conversation outlives the screen and the process, stopped answers too`() {
        val first = opened(talking)
        first.chat.method = "ngram"
        first.finish { ask("What say you, my lord?") }
        assertTrue("tokens/s" in first.status && "asked for" in first.status, first.status)
        repeat(2) { // the context is full, and the chat continues
            first.finish { ask("Go on.") }
            assertTrue("tokens/s" in first.status, first.status)
        }
        first.finish({ first.chat.transcript.text.substringAfterLast("And then?").isNotBlank() }) { ask("And then?") }
        first.finish { stop() }
        assertEquals("Stopped", first.status)
        first.chat.typed = "Speak"
        kotlinx.coroutines.runBlocking { first.save().join() }
        first.trim(Trim.ALL)
        val second = opened(talking)
        assertEquals(first.chat.transcript.pieces(true), second.chat.transcript.pieces(true))
        assertEquals("Speak" to "ngram", second.chat.typed to second.chat.method)
        second.finish { ask("Speak again.") }
        assertTrue(second.chat.transcript.text.startsWith(first.chat.transcript.text))
        assertTrue("asked for" in second.status, second.status)
        second.finish { ask("word ".repeat(4000)) } // too long even without a history
        assertTrue("context" in second.status && second.chat.typed.startsWith("word word"), second.status)
        first.close()
        second.close()
    }

    @Test
    fun `methods are measured in turns, and an error is a line`() {
        val state = opened(plain)
        state.finish { measure(listOf("My lord,"), Settings(maxNewTokens = 4, ignoreEos = true), repeats = 1) }
        val cards = state.benchCards()
        assertEquals(state.engine!!.methods.toSet(), cards.map { it.title }.toSet())
        assertEquals(1.0, cards.first().share) // the fastest is the first
        assertTrue(cards.all { it.details.last() == ("same text" to "1/1") }, "${cards.map { it.details }}")
        assertTrue("\"tokens_per_second\"" in state.report("bench"))
        state.chat.method = "none of these"
        state.finish { ask("My lord,") } // of another bundle, which the chat was set to: auto then
        assertTrue(state.chat.transcript.text.length > "My lord,".length, state.status)
        state.close()
    }
}
