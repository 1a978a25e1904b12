package dev.edgespec.app

import com.google.gson.*
import dev.edgespec.InvalidRequest
import dev.edgespec.audio.*
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.Trim
import java.io.File
import java.io.InputStream
import java.nio.file.Path
import java.util.concurrent.LinkedBlockingQueue
import java.util.concurrent.TimeUnit
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.condition.EnabledIfSystemProperty
import org.junit.jupiter.api.io.TempDir

/** The app without its views, on real bundles (tests/android/test_kotlin.py). */
@EnabledIfSystemProperty(named = "edgespec.golden", matches = ".+")
class AppStateTest {
    @TempDir
    lateinit var folder: Path
    private val golden: JsonObject = JsonParser.parseString(File(System.getProperty("edgespec.golden")).readText()).asJsonObject
    private val bundles = golden["bundles"].asJsonArray.map { it.asJsonObject }
    private val plain = bundles.first { it["operators"].asString == "native" }["path"].asString
    private val talking = golden["conversation"].asJsonObject["path"].asString
    private val queue = LinkedBlockingQueue<() -> Unit>() // the main thread of a phone

    private fun state(bundle: File) = AppState(
        Surroundings(bundle, File(folder.toFile(), "chat.json"), null, File(golden["library"].asString), mapOf("model" to "test")),
        queue::add,
    )

    /** Be the main thread until the app has nothing to do, or [until] is so. */
    private fun AppState.run(until: () -> Boolean = { false }) {
        while (busy && !until()) (queue.poll(300, TimeUnit.SECONDS) ?: error("still at: $status"))()
    }

    private class Copied(private val from: File) : BundleSource {
        override val files = from.walkTopDown().filter { it.isFile }.map { it.relativeTo(from).path }.toList()

        override fun open(name: String): InputStream = File(from, name).inputStream()
    }

    @Test
    fun `a bundle is imported, and one that is damaged leaves it in place`() {
        val target = File(folder.toFile(), "bundle")
        val state = state(target)
        state.load()
        assertTrue("edgespec export" in state.status, state.status)
        state.take { Copied(File(talking)) }
        state.run()
        assertNotNull(state.engine, state.status)
        val damaged = object : BundleSource {
            private val whole = Copied(File(talking))
            override val files get() = whole.files

            override fun open(name: String): InputStream = whole.open(name).apply { if (!name.endsWith(".json")) skip(1) }
        }
        state.take { damaged }
        state.run()
        assertTrue("truncated" in state.status, state.status)
        assertEquals(state.proofOfAll(), "equal")
        state.close()
    }

    private fun AppState.proofOfAll(): String {
        prove()
        run()
        assertTrue(proved.isNotEmpty())
        assertEquals("${proved.size} of ${proved.size} golden vectors equal on this phone", status)
        assertTrue("\"equal\": true" in report("proof"))
        return if (proved.all { it.equal }) "equal" else "differs"
    }

    @Test
    fun `a conversation outlives the screen and the process, stopped answers too`() {
        val first = state(File(talking))
        first.load()
        first.run()
        first.chat.method = "ngram"
        first.ask("What say you, my lord?")
        first.run()
        assertTrue("tokens/s" in first.status && "asked for" in first.status, first.status)
        first.ask("And then?")
        first.run { first.chat.transcript.text.substringAfterLast("And then?").isNotBlank() }
        first.stop()
        first.run()
        assertEquals("Stopped", first.status)
        first.chat.typed = "Speak"
        first.save()
        first.trim(Trim.ALL)
        val second = state(File(talking))
        assertEquals(first.chat.transcript.pieces(true), second.chat.transcript.pieces(true))
        assertEquals("Speak" to "ngram", second.chat.typed to second.chat.method)
        second.load()
        second.run()
        second.ask("Speak again.")
        second.run()
        assertTrue(second.chat.transcript.text.startsWith(first.chat.transcript.text))
        assertTrue("asked for" in second.status, second.status)
        first.close()
        second.close()
    }

    @Test
    fun `methods are measured in turns, planned, and an error is a line`() {
        val state = state(File(plain))
        state.load()
        state.run()
        state.measure(listOf("My lord,"), Settings(maxNewTokens = 4, ignoreEos = true), repeats = 1)
        state.run()
        val table = state.benchTable()
        assertEquals(listOf("method", "tokens/s", "speed-up", "tok/round", "accepted", "same text"), table[0])
        assertEquals(state.engine!!.methods.toSet(), table.drop(1).map { it[0] }.toSet())
        assertTrue(table.drop(1).all { it.last() == "1/1" }, table.toString())
        assertTrue("\"tokens_per_second\"" in state.report("bench"))
        val all = state.planTable(Long.MAX_VALUE).drop(1)
        assertTrue(all.all { it[1] == "${state.engine!!.context}" }, all.toString())
        assertTrue(state.planTable(1).drop(1).all { it[1] == "too large" })
        assertTrue(all.first { it[0] == "speculative" }[4].contains("draft kv"), all.toString())
        state.chat.method = "none of these"
        state.ask("My lord,")
        assertTrue("is not in this bundle" in state.status, state.status)
        assertNull(state.engine!!.let { if (state.busy) "busy" else null })
        state.close()
    }

    @Test
    fun `a text is translated line by line, in the languages that a model has`() {
        val restore = state(bundles.first { "restore" in it["path"].asString }["path"].asString.let(::File))
        restore.load()
        restore.run()
        assertEquals(emptyList<String>(), restore.engine!!.sources!!.origins)
        restore.source = "art thou his father\n\nwhat say you my lord"
        restore.chat.method = "ngram"
        restore.translate()
        restore.run()
        val lines = listOf(0, 2).map { restore.engine!!.generate(restore.source.lines()[it]).text }
        assertEquals("${lines[0]}\n\n${lines[1]}", restore.translated.text)
        assertTrue("ngram: " in restore.status, restore.status)
        restore.to = "ko"
        restore.translate()
        restore.run()
        assertTrue("cannot be told to write ko" in restore.status, restore.status)
        restore.close()
        val nllb = state(bundles.first { "m2m_100" in it["path"].asString }["path"].asString.let(::File))
        nllb.load()
        nllb.run()
        val reads = nllb.engine!!.sources!!
        assertEquals(listOf("ko", "en") to listOf("en", "ko"), reads.origins to reads.targets)
        nllb.close()
    }

    /** Records until it is told to stop. */
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
        val state = state(File(golden["heard"].asJsonObject["path"].asString))
        state.load()
        state.run()
        state.asked = state.asked.copy(timestamps = false)
        state.listen(Endless(File(case["file"].asString)) { queue.add(state::stop) })
        assertTrue(state.recording)
        state.run()
        val said = case["segments"].asJsonArray.joinToString("") { it.asJsonObject["text"].asString.trim() + "\n" }
        assertEquals(said, state.transcript)
        assertTrue("tokens/s" in state.status, state.status)
        state.listen { throw InvalidRequest("no microphone") }
        state.run()
        assertEquals("no microphone" to "", state.status to state.transcript)
        state.close()
    }
}
