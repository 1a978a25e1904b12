package dev.edgespec.app

import com.google.gson.*
import dev.edgespec.InvalidRequest
import dev.edgespec.audio.*
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.Trim
import dev.edgespec.engine.proofPicture
import dev.edgespec.runtimes.Message
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
    private val plain = bundles.first { it["operators"].asString == "native" }["path"].asString
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
    fun `methods are measured in turns, planned, and an error is a line`() {
        val state = opened(plain)
        state.finish { measure(listOf("My lord,"), Settings(maxNewTokens = 4, ignoreEos = true), repeats = 1) }
        val cards = state.benchCards()
        assertEquals(state.engine!!.methods.toSet(), cards.map { it.title }.toSet())
        assertEquals(1.0, cards.first().share) // the fastest is the first
        assertTrue(cards.all { it.details.last() == ("same text" to "1/1") }, "${cards.map { it.details }}")
        assertTrue("\"tokens_per_second\"" in state.report("bench"))
        val all = state.planCards(Long.MAX_VALUE)
        assertTrue(all.all { it.value == "${state.engine!!.context} tokens" })
        assertTrue(state.planCards(1).all { it.value == "too large" })
        assertTrue("draft kv" in all.first { it.title == "speculative" }.details.map { it.first })
        state.chat.method = "none of these"
        state.finish { ask("My lord,") } // of another bundle, which the chat was set to: auto then
        assertTrue(state.chat.transcript.text.length > "My lord,".length, state.status)
        state.close()
    }

    @Test
    fun `a text is translated line by line, in the languages that a model has`() {
        val restore = opened(bundles.first { "restore" in it["path"].asString }["path"].asString)
        restore.screen = TRANSLATE
        assertEquals(emptyList<String>(), restore.engine!!.sources!!.origins)
        restore.source = "art thou his father\n\nwhat say you my lord"
        restore.chat.method = "ngram"
        restore.finish { translate() }
        val lines = listOf(0, 2).map { restore.engine!!.generate(restore.source.lines()[it]).text }
        assertEquals("${lines[0]}\n\n${lines[1]}", restore.translated.text)
        assertTrue("ngram: " in restore.status, restore.status)
        restore.to = "ko"
        restore.finish { translate() }
        assertTrue("cannot be told to write ko" in restore.status, restore.status)
        restore.close()
        val nllb = opened(bundles.first { "m2m_100" in it["path"].asString }["path"].asString)
        val reads = nllb.engine!!.sources!!
        assertEquals(listOf("ko", "en") to listOf("en", "ko"), reads.origins to reads.targets)
        nllb.close()
    }

    @Test
    fun `a picture goes with a question, is shown, and is still seen by a new process`() {
        val case = golden["seen"].asJsonArray[0].asJsonObject
        val bundle = case["path"].asString
        val first = opened(bundle)
        assertNotNull(first.engine, first.status)
        first.finish { attach { throw InvalidRequest("no picture") } }
        assertEquals("no picture" to null, first.status to first.chat.attached)
        val picture = proofPicture(16, 200)
        first.finish { attach { picture } }
        assertEquals(picture.digest, first.chat.attached)
        first.chat.method = "ngram"
        first.finish { ask("read") }
        assertTrue("tokens/s" in first.status, first.status)
        val piece = first.chat.transcript.pieces(false).first { it.picture != null }
        val name = piece.picture!!
        assertArrayEquals(picture.rgb, first.chat.pictures[name]!!.rgb)
        assertNull(first.chat.attached)
        val answer = first.chat.transcript.text.substringAfter("read\n\n")
        val settings = Settings("ngram", 1024)
        assertEquals(first.engine!!.chat(listOf(Message("user", "read", picture)), settings).text, answer)
        kotlinx.coroutines.runBlocking { first.save().join() }
        val second = opened(bundle)
        assertEquals(first.chat.transcript.pieces(true), second.chat.transcript.pieces(true))
        second.finish { ask("more") }
        val asked = listOf(Message("user", "read", picture), Message("assistant", answer), Message("user", "more"))
        assertEquals(first.engine!!.chat(asked, settings).text, second.chat.transcript.text.substringAfter("more\n\n"))
        second.chat.clear()
        assertNull(second.chat.pictures[name])
        val plain = opened(talking)
        assertFalse(plain.chat.sees(plain.engine!!))
        listOf(first, second, plain).forEach { it.close() }
    }

    private class Endless(private val file: File, private val begun: () -> Unit) : SoundSource {
        override fun read(stopped: () -> Boolean): FloatArray {
            begun()
            while (!stopped()) Thread.sleep(1)
            return WavFile(file).read(stopped)
        }
    }

    @Test
    fun `what a microphone hears until it is stopped is written down`() {
        val case = golden["heard"].asJsonObject["cases"].asJsonArray.map { it.asJsonObject }.first { it["method"].asString == "speculative" }
        val state = opened(golden["heard"].asJsonObject["path"].asString)
        state.screen = LISTEN
        state.asked = state.asked.copy(timestamps = false)
        state.finish {
            listen(Endless(File(case["file"].asString)) { queue.add(state::stop) })
            assertTrue(recording)
        }
        val said = case["segments"].asJsonArray.joinToString("") { it.asJsonObject["text"].asString.trim() + "\n" }
        assertEquals(said, state.transcript)
        assertTrue("tokens/s" in state.status, state.status)
        state.finish { listen { throw InvalidRequest("no microphone") } }
        assertEquals("no microphone" to "", state.status to state.transcript)
        state.close()
    }
}
