package dev.edgespec.runtimes

import com.google.gson.JsonObject
import dev.edgespec.*
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Files
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

class TextTest {
    private fun JsonObject.each(name: String) = this[name].asJsonArray.map { it.asJsonObject }
    private fun JsonObject.messages() = each("messages").map { Message(it.text("role"), it.text("content")) }

    @Test
    fun `tokenizers of every kind encode, decode and stream as in Python`() {
        for (given in GOLDEN["tokenizers"].asJsonArray.map { it.asJsonObject }) TextCodec(File(given.text("folder"))).use { codec ->
            val name = File(given.text("folder")).name
            assertEquals(given.text("sha256"), codec.vocabularySha256(), name)
            for (case in given["cases"].asJsonArray.map { it.asJsonObject }) {
                assertArrayEquals(case.ints("ids"), codec.encode(case.text("text")), "$name: $case")
                assertArrayEquals(case.ints("bare"), codec.encode(case.text("text"), withSpecial = false), "$name: $case")
            }
            for (case in given["decoded"].asJsonArray.map { it.asJsonObject }) {
                val ids = case.ints("ids")
                assertEquals(case.text("text"), codec.decode(ids), "$name: $case")
                val stream = StreamDecoder(codec::decode, ids.copyOf(minOf(2, ids.size)), listOf("\n\n"))
                val pieces = ids.drop(2).map { stream.push(it) } + stream.finish()
                assertEquals(case["pieces"].asJsonArray.map { it.asString }, pieces, "$name: $case")
            }
        }
    }

    @Test
    fun `half of a surrogate pair is no text`() {
        val folder = File(GOLDEN["tokenizers"].asJsonArray[0].asJsonObject.text("folder"))
        TextCodec(folder).use { codec -> assertThrows(InvalidRequest::class.java) { codec.encode("x \ud83d y") } }
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
                for (case in given.each("cases")) assertEquals(case.text("text"), template.write(case.messages()))
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
            val talk = engine.conversation()
            val settings = dev.edgespec.decoding.Settings(method = "ngram", maxNewTokens = 24, ignoreEos = true)
            for ((at, turn) in given["turns"].asJsonArray.map { it.asJsonObject }.withIndex()) {
                val result = talk.ask(turn.text("question"), settings)
                assertArrayEquals(turn.ints("tokens"), result.tokens)
                assertEquals(turn["reused"].asInt, result.stats.reusedTokens)
                if (at > 0) assertTrue(result.stats.reusedTokens > 0)
            }
            assertEquals(given.messages(), talk.messages)
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
    check(NativeTokenizer.found)
    val tests = TextTest()
    tests.`tokenizers of every kind encode, decode and stream as in Python`()
    tests.`half of a surrogate pair is no text`()
    val folder = Files.createTempDirectory("damaged").toFile()
    File(folder, "tokenizer.json").writeText("""{"model": {"type": "none"}}""")
    val error = assertThrows(BundleError::class.java) { TextCodec(folder) }
    folder.deleteRecursively()
    println("${GOLDEN["tokenizers"].asJsonArray.size()} tokenizers; ${error.what.substringAfter("tokenizer.json: ")}")
}
