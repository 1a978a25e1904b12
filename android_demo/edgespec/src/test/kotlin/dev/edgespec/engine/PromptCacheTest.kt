package dev.edgespec.engine

import com.google.gson.JsonObject
import dev.edgespec.Edgespec
import dev.edgespec.decoding.Settings
import dev.edgespec.runtimes.*
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Files
import java.nio.file.attribute.PosixFilePermissions
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Long prompts that Python has kept (tests/support/golden.py), which then reads what is kept here. */
class PromptCacheTest {
    private val kept = GOLDEN["prompts"].asJsonObject
    private val cases = kept["cases"].asJsonArray.map { it.asJsonObject }
    private val case = cases[0]
    private val prompt = case.ints("prompt")

    private fun load(case: JsonObject, cache: File?, most: Long = 1L shl 30, check: Boolean = true): Engine = Edgespec.load(
        File(case.text("path")), threads = 1, library = File(GOLDEN.text("library")), attention = case["attention"]?.asString,
        cache = cache, promptCache = most, check = check,
    ).also { it.prompts?.worth = 0.0 }

    /** A fresh engine completes the prompt as Python did, and closes -> how many tokens were reused. */
    private fun told(cache: File, case: JsonObject = this.case): Int = load(case, cache).use { engine ->
        val result = engine.generate(case.ints("prompt"), settings(case))
        assertArrayEquals(case.ints("tokens"), result.tokens, case.text("path"))
        assertNull(result.stats.droppedReason)
        if (case.text("method", "settings") == "speculative" && result.stats.reusedTokens > 0) {
            assertTrue(result.stats.drafted > 0)
            assertEquals(0.0, engine.paces.getValue(true).seconds, "the draft reads again")
        }
        result.stats.reusedTokens
    }

    private fun JsonObject.text(name: String, inside: String) = this[inside].asJsonObject.text(name)
    private fun filesIn(cache: File) = File(cache, "prompts").walk().filter { it.isFile && it.extension in listOf("keys", "end") }.toList()
    private fun sums(cache: File) = filesIn(cache).associate { it.relativeTo(cache).path to sha256(it) }

    private val python get() = File(kept.text("python"))
    private val native = cases.filter { it.text("operators") == "native" }
    private val stock = cases - native

    @Test
    fun `prompts that Python kept are found, bit for bit`() = withCopy(python) { cache ->
        val before = sums(cache)
        for (case in native) assertEquals(case.ints("prompt").size - 1, told(cache, case), case.toString().take(200))
        val after = sums(cache)
        assertEquals(before, after.filterKeys { it in before })
        assertTrue((after.keys - before.keys).all { it.endsWith(".end") }) // one that Python's slot had left before it was written
        assertEquals(listOf(0), stock.map { told(cache, it) }) // of this version of ONNX Runtime
    }

    @Test
    fun `what is kept here has Python's names and bytes, and is found again`() {
        val cache = File(kept.text("kotlin"))
        File(cache, "prompts").deleteRecursively() // of an earlier run of these tests
        assertEquals(cases.map { 0 }, cases.map { told(cache, it) })
        assertEquals(cases.map { it.ints("prompt").size - 1 }, cases.map { told(cache, it) })
        fun folders(of: File) = sums(of).entries.groupBy({ File(it.key).parent }, { File(it.key).name to it.value })
        val (here, there) = folders(cache) to folders(python)
        val common = here.keys intersect there.keys
        assertEquals(stock.size, there.size - common.size)
        assertEquals(stock.size, here.size - common.size)
        for (folder in common) {
            val (mine, pythons) = here.getValue(folder).toMap() to there.getValue(folder).toMap()
            // both write in the background: an end that a slot has left by then is missing
            assertEquals(emptyList<String>(), (pythons.keys - mine.keys + (mine.keys - pythons.keys)).filter { !it.endsWith(".end") })
            // an incomplete block has rows that are never read, of draft tokens or none
            for (name in mine.keys.filter { it.endsWith(".keys") }) assertEquals(pythons[name], mine[name], name)
        }
    }

    @Test
    fun `every method goes on from it with plain decoding's text`() = withCopy(python) { cache ->
        load(case, null).use { it.methods }.forEach { method ->
            load(case, cache).use { engine ->
                val result = engine.generate(prompt, Settings(method, 24, ignoreEos = true))
                assertArrayEquals(case.ints("tokens"), result.tokens, method)
                if (method != "eagle") assertEquals(prompt.size - 1, result.stats.reusedTokens, method)
            }
        }
    }

    @Test
    fun `a file that was changed, cut or is of another kind is not used, and the prompt is read again`() = withCopy(python) { cache ->
        File(cache, "prompts").deleteRecursively()
        told(cache)
        val files = filesIn(cache).associateWith { it.readBytes() }
        assertEquals(4, files.size) // two blocks, and the ends of prompt and answer
        fun flip(at: Int): (ByteArray) -> ByteArray = { bytes -> bytes.copyOf().also { it[at] = (it[at].toInt() xor 1).toByte() } }
        for ((kind, file) in files.keys.associateBy { it.extension }) {
            val good = files.getValue(file)
            val other = files.keys.first { it != file && it.extension == kind }.readBytes()
            val changes = listOf(flip(0), flip(8), flip(40), flip(good.size / 2), flip(good.size - 1)) +
                listOf(0, 30, 64, good.size - 1).map { size -> { bytes: ByteArray -> bytes.copyOf(size) } } +
                { _ -> other } + { _ -> good + 0 } + { _ -> good.copyOf(64).also { it.fill(-1, 16, 32) } }
            for ((number, change) in changes.withIndex()) {
                val bad = change(good)
                file.writeBytes(bad)
                val used = told(cache) == prompt.size - 1 // the prompt does not include the end of the answer
                assertTrue(used || !file.readBytes().contentEquals(bad), "$file, change $number")
                file.writeBytes(good)
            }
            file.delete()
            file.mkdir()
            told(cache)
            file.deleteRecursively()
            file.writeBytes(good)
        }
        assertEquals(prompt.size - 1, told(cache))
    }

    @Test
    fun `a process that is killed leaves whole files or none`() = withCopy(null) { cache ->
        val java = File(System.getProperty("java.home"), "bin/java").path
        for (at in 0 until 3) {
            val child = ProcessBuilder(java, "-Xmx256m", "dev.edgespec.support.KeepKt", case.text("path"), GOLDEN.text("library"), cache.path)
            child.environment()["CLASSPATH"] = System.getProperty("surefire.test.class.path") ?: System.getProperty("java.class.path")
            val process = child.redirectErrorStream(true).start()
            process.outputStream.writer().use { it.write(prompt.joinToString(" ")) }
            assertEquals("loaded", process.inputStream.bufferedReader().readLine())
            Thread.sleep(50L + 300 * at)
            process.destroyForcibly().waitFor()
            val before = sums(cache)
            told(cache)
            assertEquals(before, sums(cache).filterKeys { it in before }, "a file was wrong")
        }
        assertTrue(filesIn(cache).isNotEmpty())
        assertEquals(prompt.size - 1, told(cache))
    }

    @Test
    fun `nothing is kept where it is off, nothing was checked, there is no key, or it is read again quickly`() = withCopy(null) { cache ->
        load(case, cache, most = 0).use { it.generate(prompt, Settings("ar", 2)) }
        load(case, cache, check = false).use { it.generate(prompt, Settings("ar", 2)) }
        load(case, cache, most = 1 shl 16).use { it.generate(prompt, Settings("ar", 2)) }
        load(case, cache).use { engine ->
            engine.prompts!!.worth = 1e9
            engine.generate(prompt, Settings("ar", 2))
        }
        assertEquals(emptyList<File>(), filesIn(cache))
        File(cache, "key").delete()
        File(cache, "key").mkdir()
        assertEquals(0, told(cache))
        assertFalse(File(cache, "prompts").exists())
        val file = File(cache, "none").also { it.writeText("") }
        assertEquals(0, told(file))
    }

    @Test
    fun `only its owner may read it, and the key is made once`() = withCopy(null) { cache ->
        told(cache)
        val key = File(cache, "key").readBytes()
        assertEquals(prompt.size - 1, told(cache))
        assertArrayEquals(key, File(cache, "key").readBytes())
        for (file in File(cache, "prompts").walk().toList() + File(cache, "key")) {
            val may = PosixFilePermissions.toString(Files.getPosixFilePermissions(file.toPath()))
            assertEquals(if (file.isDirectory) "rwx------" else "rw-------", may, "$file")
        }
    }

    @Test
    fun `what was used longest ago goes first, and of one text its end`() = withCopy(null) { cache ->
        val folder = File(cache, "prompts/a").also { it.mkdirs() }
        val names = listOf("x-256.keys", "x-512.keys", "x-600-y.end", "old-256.keys")
        val hour = 3_600_000L
        for (name in names + ".x-256.keys.part-1") {
            File(folder, name).writeBytes(ByteArray(100))
            File(folder, name).setLastModified(hour * if (name == "old-256.keys") 1 else 2)
        }
        fun left() = folder.list().orEmpty().sorted()
        trim(cache, 1000, 0)
        assertEquals(names.sorted(), left()) // and the abandoned part is gone
        trim(cache, 400, 0)
        assertEquals(names.sorted(), left())
        trim(cache, 400, 100)
        assertEquals(listOf("x-256.keys", "x-512.keys"), left()) // to nine tenths
        trim(cache, 150, 0)
        assertEquals(listOf("x-256.keys"), left())
        trim(cache, 50, 0)
        assertFalse(folder.exists())
        assertTrue(roomFor(cache, 100) <= 100)
    }

    @Test
    fun `a conversation goes on after a restart`() = withCopy(null) { cache ->
        val talking = JsonObject().apply { addProperty("path", GOLDEN["conversation"].asJsonObject.text("path")) }
        val settings = Settings("ar", 24, ignoreEos = true)
        val question = "Tell me of the sea, and of the ships that came. ".repeat(20).trim()
        fun turn(cache: File?, messages: List<Message>, says: String) = load(talking, cache).use { engine ->
            engine.conversation(messages, settings).run { ask(says) to this.messages }
        }
        val (first, messages) = turn(cache, emptyList(), question)
        val (second, _) = turn(cache, messages, "And then?")
        val (plain, _) = turn(null, messages, "And then?")
        assertEquals(0, first.stats.reusedTokens)
        assertEquals(0, plain.stats.reusedTokens)
        assertArrayEquals(plain.tokens, second.tokens)
        assertEquals(PROMPT_BLOCK, second.stats.reusedTokens) // this template asks for an answer otherwise than it writes one
    }
}
