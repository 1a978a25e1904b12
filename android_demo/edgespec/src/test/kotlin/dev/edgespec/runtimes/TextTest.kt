package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Files
import kotlin.system.exitProcess
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

class TextTest {
    private fun JsonObject.each(name: String) = this[name].asJsonArray.map { it.asJsonObject }
    private fun JsonObject.messages() = each("messages").map { Message(it.text("role"), it.text("content")) }

    /** A bundle's text functions over another tokenizer, by DJL's library or, if the system finds it, by our own. */
    private fun <T> withTokenizer(folder: File, use: (NativeBundle) -> T): T = withCopy(BUNDLE) { copy ->
        File(folder, TOKENIZER_FILE).copyTo(File(copy, TOKENIZER_FILE), overwrite = true)
        Native.load(File(GOLDEN.text("library")))
        NativeBundle(copy, 1).use { bundle ->
            if (OwnTokenizer.found) bundle.loadCodec(OwnTokenizer.path) else bundle.setCodec(DjlCodec(copy))
            use(bundle)
        }
    }

    @Test
    fun `tokenizers of every kind encode and decode as in Python`() {
        for (given in GOLDEN["tokenizers"].asJsonArray.map { it.asJsonObject }) withTokenizer(File(given.text("folder"))) { bundle ->
            val name = File(given.text("folder")).name
            for (case in given["cases"].asJsonArray.map { it.asJsonObject }) {
                assertArrayEquals(case.ints("ids"), bundle.encode(case.text("text"), special = true), "$name: $case")
                assertArrayEquals(case.ints("bare"), bundle.encode(case.text("text"), special = false), "$name: $case")
            }
            for (case in given["decoded"].asJsonArray.map { it.asJsonObject }) {
                assertEquals(case.text("text"), bundle.decode(case.ints("ids")), "$name: $case")
            }
        }
    }

    @Test
    fun `half of a surrogate pair is no text`() {
        loadNative().use { engine -> assertThrows(InvalidRequest::class.java) { engine.encode("x \ud83d y") } }
    }

    @Test
    fun `a tokenizer that throws ends its request and nothing else`() = withCopy { copy ->
        val djl = DjlCodec(copy)
        var wrong = false
        var closed = 0
        Native.load(File(GOLDEN.text("library")))
        NativeBundle(copy, 1).use { bundle ->
            bundle.setCodec(object : AppCodec {
                override fun encode(text: ByteArray, special: Boolean) = djl.encode(text, special)
                override fun decode(tokens: IntArray) = if (wrong) throw IllegalStateException("no words") else djl.decode(tokens)
                override fun close() = djl.close().also { closed++ }
            })
            val ids = bundle.encode("My lord,", special = true)
            wrong = true
            assertEquals("no words", assertThrows(IllegalStateException::class.java) { bundle.decode(ids) }.message)
            wrong = false
            assertEquals("My lord,", bundle.decode(ids).trim())
        }
        assertEquals(1, closed)
    }

    @Test
    fun `chat templates as data write what the templates write`() {
        var refused = 0
        for (given in GOLDEN["chats"].asJsonArray.map { it.asJsonObject }) {
            val folder = Files.createTempDirectory("chat").toFile()
            File(folder, CHAT_FILE).writeText(given["data"].toString())
            try {
                if (given["data"].asJsonObject.has("refused")) {
                    val error = assertThrows(InvalidRequest::class.java) { ChatTemplate.read(folder) }
                    assertTrue(error.what.contains("cannot be followed here"), error.what)
                    refused++
                    continue
                }
                val template = ChatTemplate.read(folder)
                for (case in given.each("cases")) assertEquals(case.text("text"), template.write(case.messages(), case.has("continued")))
            } finally {
                folder.deleteRecursively()
            }
        }
        assertTrue(refused in 1..5, "$refused templates were refused")
    }

    @Test
    fun `a conversation goes as in Python, and a second turn computes nothing again`() {
        val given = GOLDEN["conversation"].asJsonObject
        loadNative(File(given.text("path"))).use { engine ->
            assertTrue(engine.chats)
            val talk = engine.conversation()
            val settings = dev.edgespec.decoding.Settings(method = "ngram", maxNewTokens = 24, ignoreEos = true)
            for (turn in given.each("turns")) {
                val result = talk.ask(turn.text("question"), settings)
                assertArrayEquals(turn.ints("tokens"), result.tokens)
                // a beginning of few tokens is read again, in a separate session
                if (turn["reused"].asInt > 16) assertTrue(result.stats.reusedTokens >= turn["reused"].asInt - 16, "${result.stats.reusedTokens}")
            }
            assertEquals(given.messages(), talk.messages)
        }
    }

    @Test
    fun `an answer is continued as in Python, and what cannot be continued is refused`() {
        val given = GOLDEN["conversation"].asJsonObject
        val case = given["continued"].asJsonObject
        loadNative(File(given.text("path"))).use { engine ->
            val settings = dev.edgespec.decoding.Settings(method = "ngram", maxNewTokens = 24, ignoreEos = true)
            assertArrayEquals(case.ints("prompt"), engine.chatPrompt(case.messages(), continueFinal = true))
            assertArrayEquals(case.ints("tokens"), engine.chat(case.messages(), settings, continueFinal = true).tokens)
        }
        val data = JsonParser.parseString("""{"version": 1, "gaps": {"start>user": "", "user>assistant": ""}, "trimmed": [], "thoughts": false}""")
        withCopy(null) { folder ->
            File(folder, CHAT_FILE).writeText(data.toString())
            for (role in listOf("user", "assistant")) {
                val messages = listOf(Message("user", "a"), Message(role, "b"))
                val error = assertThrows(InvalidRequest::class.java) { ChatTemplate.read(folder).write(messages, continueFinal = true) }
                assertTrue("cannot be continued here" in error.what || "cannot follow" in error.what, error.what)
            }
        }
    }

    @Test
    fun `a conversation goes on as in Python when the context is full`() {
        val given = GOLDEN["conversation"].asJsonObject
        Edgespec.load(File(given.text("path")), threads = 1, context = 96, library = File(GOLDEN.text("library"))).use { engine ->
            val talk = engine.conversation(listOf(Message("system", "A play.")))
            val settings = dev.edgespec.decoding.Settings(method = "ngram", maxNewTokens = 24, ignoreEos = true)
            for (turn in given.each("full")) {
                assertArrayEquals(turn.ints("tokens"), talk.ask(turn.text("question"), settings).tokens)
                assertEquals(turn["left_out"].asInt, talk.leftOut)
            }
        }
    }
}

/** Some of these with only edgespec's library, without DJL's on the class path: tests/runtimes/native/test_tokenizer.py. */
fun main() {
    check(OwnTokenizer.found)
    val tests = TextTest()
    tests.`tokenizers of every kind encode and decode as in Python`()
    tests.`a conversation goes as in Python, and a second turn computes nothing again`()
    tests.`an answer is continued as in Python, and what cannot be continued is refused`()
    val error = withCopy { folder ->
        File(folder, TOKENIZER_FILE).writeText("""{"model": {"type": "none"}}""")
        assertThrows(BundleError::class.java) { NativeBundle(folder, 1).use { it.loadCodec(OwnTokenizer.path) } }
    }
    println("${GOLDEN["tokenizers"].asJsonArray.size()} tokenizers; ${error.what.substringAfter("tokenizer.json: ")}")
    exitProcess(0)
}
