package dev.edgespec.engine

import dev.edgespec.Edgespec
import dev.edgespec.decoding.Settings
import dev.edgespec.runtimes.*
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Files
import java.nio.file.attribute.PosixFilePermissions
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Texts on the disk, which later processes begin with. */
class SavedTextsTest {
    private val prompt = IntArray(300) { 5 + it * 7 % 90 }
    private val settings = Settings("speculative", 24, adaptive = false, ignoreEos = true)

    private fun load(cache: File?, bundle: File = BUNDLE, most: Long = 1L shl 30, check: Boolean = true): Engine = Edgespec.load(
        bundle, threads = 1, library = File(GOLDEN.text("library")), cache = cache, promptCache = most, check = check,
    ).also { it.saved?.worth = 0.0 }

    private val expected by lazy { load(null).use { it.generate(prompt, settings).tokens } }

    /** A fresh engine completes the prompt, and closes -> how many tokens were reused. */
    private fun told(cache: File): Int = load(cache).use { engine ->
        val result = engine.generate(prompt, settings)
        assertArrayEquals(expected, result.tokens)
        assertNull(result.stats.droppedReason)
        assertTrue(result.stats.drafted > 0)
        result.stats.reusedTokens
    }

    private fun filesIn(cache: File) = File(cache, "prompts").walk().filter { it.isFile }.toList()

    @Test
    fun `a prompt is read once, and nobody else may read its file`() = withCopy(null) { cache ->
        assertEquals(listOf(0, prompt.size - 1, prompt.size - 1), List(3) { told(cache) })
        assertEquals(2, filesIn(cache).size)
        val saved = filesIn(cache).first { it.extension == "text" }
        assertEquals("rw-------", PosixFilePermissions.toString(Files.getPosixFilePermissions(saved.toPath())))
    }

    @Test
    fun `every method goes on from it with plain decoding's text`() = withCopy(null) { cache ->
        told(cache)
        for (method in load(null).use { it.methods }) load(cache).use { engine ->
            val result = engine.generate(prompt, Settings(method, 24, ignoreEos = true))
            assertArrayEquals(expected, result.tokens, method)
        }
    }

    @Test
    fun `a file that was changed, cut or is of another kind is not used, and the prompt is read again`() = withCopy(null) { cache ->
        told(cache)
        fun flip(at: Int): (ByteArray) -> ByteArray = { bytes -> bytes.copyOf().also { it[at] = (it[at].toInt() xor 1).toByte() } }
        for (kind in listOf("text", "tokens")) {
            val good = filesIn(cache).first { it.extension == kind }.readBytes()
            val changes = listOf(flip(0), flip(8), flip(40), flip(good.size / 2), flip(good.size - 1)) +
                listOf(0, 3, 64, good.size - 1).map { size -> { bytes: ByteArray -> bytes.copyOf(size) } } + { _ -> good + 0 } + { _ -> ByteArray(9) }
            for (change in changes) {
                filesIn(cache).first { it.extension == kind }.writeBytes(change(good))
                told(cache)
                assertEquals(prompt.size - 1, told(cache))
            }
        }
    }

    @Test
    fun `a process that is killed leaves whole files or none`() = withCopy(null) { cache ->
        val java = File(System.getProperty("java.home"), "bin/java").path
        val child = ProcessBuilder(java, "-Xmx256m", "dev.edgespec.support.KeepKt", BUNDLE.path, GOLDEN.text("library"), cache.path)
        child.environment()["CLASSPATH"] = System.getProperty("surefire.test.class.path") ?: System.getProperty("java.class.path")
        for (at in 0 until 2) {
            val process = child.redirectErrorStream(true).start()
            process.outputStream.writer().use { it.write(prompt.joinToString(" ")) }
            assertEquals("loaded", process.inputStream.bufferedReader().readLine())
            Thread.sleep(100L + 400 * at)
            process.destroyForcibly().waitFor()
            told(cache)
        }
        assertEquals(prompt.size - 1, told(cache))
        for (file in filesIn(cache).filter { it.extension == "text" }) assertTrue(File(file.path.removeSuffix("text") + "tokens").isFile, "$file was left")
    }

    @Test
    fun `nothing is kept where it is off, nothing was checked, there is no room, or it is read again quickly`() = withCopy(null) { cache ->
        load(cache, most = 0).use { it.generate(prompt, settings) }
        load(cache, check = false).use { it.generate(prompt, settings) }
        load(cache, most = 1 shl 10).use { it.generate(prompt, settings) }
        load(cache).use { engine ->
            engine.saved!!.worth = 1e9
            engine.generate(prompt, settings)
        }
        assertEquals(emptyList<File>(), filesIn(cache))
        val file = File(cache, "none").also { it.writeText("") }
        assertEquals(0, told(file))
    }

    @Test
    fun `what was used longest ago goes first`() = withCopy(null) { cache ->
        fun kept() = filesIn(cache).filter { it.extension == "tokens" }.size
        val size = load(cache).use { engine ->
            engine.generate(prompt, settings)
            filesIn(cache).sumOf { it.length() }
        }
        load(cache, most = 2 * size + size / 2).use { engine ->
            for (at in 1..4) engine.generate(IntArray(300) { (5 + it * 7 + at) % 90 + 3 }, settings)
            assertTrue(kept() in 1..2, "${kept()} texts are kept")
        }
        assertEquals(0, told(cache))
    }

    @Test
    fun `a conversation goes on after a restart`() = withCopy(null) { cache ->
        val talking = File(GOLDEN["conversation"].asJsonObject.text("path"))
        val settings = Settings("ar", 24, ignoreEos = true)
        val question = "Tell me of the sea, and of the ships that came. ".repeat(20).trim()
        fun turn(cache: File?, messages: List<Message>, says: String) = load(cache, talking).use { engine ->
            engine.conversation(messages, settings).run { ask(says) to this.messages }
        }
        val (first, messages) = turn(cache, emptyList(), question)
        val (second, _) = turn(cache, messages, "And then?")
        val (plain, _) = turn(null, messages, "And then?")
        assertEquals(0, first.stats.reusedTokens)
        assertEquals(0, plain.stats.reusedTokens)
        assertArrayEquals(plain.tokens, second.tokens)
        assertTrue(second.stats.reusedTokens >= first.stats.promptTokens - 8, "${second.stats.reusedTokens} of ${first.stats.promptTokens}")
    }
}
