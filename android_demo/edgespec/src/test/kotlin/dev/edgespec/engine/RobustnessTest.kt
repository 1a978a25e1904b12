package dev.edgespec.engine

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.planning.*
import dev.edgespec.runtimes.*
import dev.edgespec.support.*
import java.io.File
import java.io.RandomAccessFile
import kotlinx.coroutines.*
import kotlinx.coroutines.flow.*
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

class RobustnessTest {
    private val prompt = intArrayOf(5, 9, 13, 40, 7)

    private inline fun <reified E : EdgespecError> fails(says: String, crossinline run: () -> Any?) {
        val error = assertThrows(E::class.java) { run() }
        assertTrue(says in error.message!!, "expected '$says' in: ${error.message}")
    }

    private fun refused(says: String, change: (File) -> Unit) = withCopy { folder ->
        change(folder)
        fails<BundleError>(says) { loadNative(folder).close() }
    }

    private fun manifest(change: (JsonObject) -> Unit): (File) -> Unit = { folder ->
        File(folder, MANIFEST).writeText(manifest(folder).also(change).toString())
    }

    private fun manifest(folder: File) = JsonParser.parseString(File(folder, MANIFEST).readText()).asJsonObject
    private fun target(change: (JsonObject) -> Unit) = manifest { change(it["target"].asJsonObject) }
    private fun weights() = manifest(BUNDLE)["target"].asJsonObject["weights"].asString

    @Test
    fun `altered bundles are refused, and what is wrong is said`() {
        refused("has no edgespec.json") { File(it, MANIFEST).delete() }
        refused("not readable as JSON") { File(it, MANIFEST).writeText("{\"schema_version\": 2,") }
        refused("not readable as JSON") { File(it, MANIFEST).writeBytes(byteArrayOf(0xC3.toByte(), 0x28)) }
        refused("not readable as JSON") { File(it, MANIFEST).writeText("[".repeat(200_000)) }
        refused("integer schema_version") { File(it, MANIFEST).writeText("[]") }
        refused("newer than this edgespec", manifest { it.addProperty("schema_version", 99) })
        refused("older than this edgespec", manifest { it.addProperty("schema_version", 1) })
        refused("context 0: out of range", target { it["facts"].asJsonObject.addProperty("context", 0) })
        refused("extra_rows", target { it.remove("extra_rows") })
        refused("leaves the bundle", target { it["graphs"].asJsonObject["native"].asJsonObject.addProperty("file", "../model.onnx") })
        refused("leaves the bundle", manifest { it["files"].asJsonObject.add("../weights.bin", JsonParser.parseString("{\"size\": 1, \"sha256\": \"\"}")) })
        refused("not a manifest", manifest { it["files"].asJsonObject.add("/etc/passwd", JsonObject()) })
        refused("missing from the bundle") { File(it, weights()).delete() }
        refused("truncated") { RandomAccessFile(File(it, weights()), "rw").use { file -> file.setLength(file.length() - 1) } }
        refused("altered: expected ") { File(it, weights()).appendBytes(byteArrayOf(0)) }
        refused("altered: expected SHA-256") {
            RandomAccessFile(File(it, weights()), "rw").use { file ->
                file.seek(1000)
                val old = file.read()
                file.seek(1000)
                file.write(old xor 1)
            }
        }
        refused("a link that leaves the bundle") {
            val outside = File.createTempFile("outside", null)
            val file = File(it, "tokenizer.json")
            file.copyTo(outside, overwrite = true)
            file.delete()
            java.nio.file.Files.createSymbolicLink(file.toPath(), outside.toPath())
            outside.deleteOnExit()
        }
        fails<BundleError>("is not a folder") { loadNative(File("nowhere")) }
    }

    @Test
    fun `nothing is called exact where nothing was checked`() {
        for (check in listOf(true, false)) {
            val result = loadNative(check = check).use { it.generate("ROMEO:", Settings(method = "ngram", maxNewTokens = 8)) }
            assertEquals(if (check) true else null, result.exact)
            assertEquals(if (check) true else null, result.lossless)
            assertEquals(check, result.unproven.isEmpty())
        }
    }

    @Test
    fun `a graph that is none is refused even where nothing is checked`() = withCopy { folder ->
        val graphs = manifest(folder)["target"].asJsonObject["graphs"].asJsonObject
        val file = File(folder, graphs["native"].asJsonObject["file"].asString)
        file.writeBytes(ByteArray(file.length().toInt()) { 7 })
        fails<BundleError>("export the bundle again") { loadNative(folder, check = false) }
    }

    @Test
    fun `nonsense settings are refused`() = loadNative().use { engine ->
        fun refused(says: String, run: () -> Any) = fails<InvalidRequest>(says, run)
        refused("temperature is -1.0; allowed: a number >= 0") { SamplingParams(temperature = -1.0) }
        refused("gamma 0: expected 1 to 64") { Settings(gamma = 0) }
        refused("makes a tree of") { DraftOptions(branch = listOf(9, 9)) }
        refused("acceptance is 'maybe'") { SamplingParams(acceptance = "maybe") }
        refused("the prompt is empty") { engine.generate("  ") }
        refused("at least one token") { engine.generate(IntArray(0)) }
        refused("outside the vocabulary") { engine.generate(intArrayOf(-1)) }
        refused("leaves no room in the context") { engine.generate(IntArray(engine.context) { 3 }) }
        refused("method 'magic' is not in this bundle") { engine.stream(prompt, Settings(method = "magic")) }
        refused("expected max_new_tokens >= 1") { engine.generate(prompt, Settings(maxNewTokens = 0)) }
        val beyond = SamplingParams(logitBias = mapOf(1_000_000 to 1.0))
        refused("token 1000000") { engine.generate(prompt, Settings(sampling = beyond)) }
        refused("this model has no chat template") { engine.conversation().ask("hello") }
        assertEquals(8, engine.generate(prompt, Settings(maxNewTokens = 8, ignoreEos = true)).tokens.size)
    }

    @Test
    fun `storms of cancelled streams leave an engine that writes the same text`() = loadNative().use { engine ->
        val settings = Settings("ngram", 60, ignoreEos = true)
        val before = engine.generate(prompt, settings).tokens
        runBlocking {
            withTimeout(120_000) {
                val storm = List(24) { number ->
                    launch(Dispatchers.Default) {
                        if (number % 3 == 0) {
                            engine.stream(prompt, settings).take(1 + number / 3).toList()
                        } else {
                            val job = launch { engine.stream(prompt + number, settings).collect {} }
                            job.cancelAndJoin()
                        }
                    }
                }
                storm.forEach { it.join() }
            }
        }
        assertArrayEquals(before, engine.generate(prompt, settings).tokens)
    }

    @Test
    fun `a stream that is never collected costs nothing, and one that is left in the middle stops nobody`() = loadNative().use { engine ->
        val before = engine.kvBytes()
        repeat(1000) { engine.stream(prompt, Settings("ar", 100)) }
        assertEquals(before, engine.kvBytes())
        runBlocking {
            withTimeout(60_000) {
                val left = engine.stream(prompt, Settings("ar", 100, ignoreEos = true)).first()
                assertEquals(1, left.round.tokens.size)
                val slow = launch {
                    engine.stream(prompt, Settings("ar", 100, ignoreEos = true)).collect { kotlinx.coroutines.delay(1_000_000) }
                }
                val other = engine.stream(intArrayOf(9, 8, 7), Settings("ar", 10, ignoreEos = true)).toList()
                assertEquals(10, other.last().result!!.tokens.size)
                slow.cancelAndJoin()
            }
        }
    }

    @Test
    fun `streams are whole characters, and make the text of the result`() = loadNative().use { engine ->
        val chunks = runBlocking { engine.stream("My lord,", Settings("speculative", 80, ignoreEos = true)).toList() }
        val result = chunks.last().result!!
        assertEquals(result.text, chunks.joinToString("") { it.text })
        assertTrue(Charsets.UTF_8.newEncoder().canEncode(result.text))
        assertEquals(1, chunks.count { it.result != null })
    }

    @Test
    fun `a thousand requests take no more memory than a hundred`() = loadNative().use { engine ->
        val settings = Settings(null, 4, ignoreEos = true)
        fun used(): Long {
            repeat(3) { System.gc() }
            return Runtime.getRuntime().let { it.totalMemory() - it.freeMemory() }
        }
        repeat(100) { engine.generate(prompt + it, settings) }
        val heap = used()
        val kv = engine.kvBytes()
        repeat(900) { engine.generate(prompt + it % 100, settings) }
        assertEquals(kv, engine.kvBytes())
        assertTrue(used() < heap + (4 shl 20), "$heap bytes of heap, then ${used()}")
    }

    private class Free(override var available: Long, override val total: Long = 1L shl 33, override var low: Boolean = false) : MemoryFacts

    @Test
    fun `a text ends where the memory does, and what does not fit is refused`() {
        assertThrows(BudgetError::class.java) { loadNative(memory = Free(1000)) }
        val prompt = IntArray(200) { 5 + it % 23 }
        val free = Free(1L shl 32)
        loadNative(memory = free).use { engine ->
            val settings = Settings("ar", engine.context - prompt.size, ignoreEos = true)
            val whole = engine.generate(prompt, settings)
            assertEquals(engine.context - prompt.size, whole.tokens.size)
            engine.trim(Trim.ALL)
            var least = 0L
            for (bits in 10..31) { // the least power of two that a session fits in
                free.available = 1L shl bits
                least = free.available
                try {
                    val part = engine.generate(intArrayOf(5, 9), settings)
                    assertEquals("context", part.finish)
                    assertTrue(part.tokens.size < whole.tokens.size)
                    break
                } catch (error: BudgetError) {
                    assertTrue("max_bytes" in error.what, error.what)
                }
            }
            fails<InvalidRequest>("or in the memory") { engine.generate(IntArray(engine.context - 2) { 5 }, settings) }
            free.available = 1L shl 32 // a session that was opened for less makes room for another
            assertArrayEquals(whole.tokens, engine.generate(prompt, settings).tokens)
            assertTrue(least < free.available)
            free.low = true
            assertEquals(0, engine.generate(prompt, settings).stats.reusedTokens) // idle texts went first
        }
    }

    @Test
    fun `a hot device is spared threads, and writes the same text`() {
        val levels = ArrayDeque(listOf(0, 2, 3, 0))
        val settings = Settings("speculative", 40, gamma = 8, adaptive = false, ignoreEos = true)
        val cool = loadNative().use { it.generate(prompt, settings) }
        Edgespec.load(BUNDLE, threads = 2, library = File(GOLDEN.text("library")), heat = { levels.first() }).use { engine ->
            for (warm in listOf(false, true, true, false)) {
                engine.felt = 0
                val result = engine.generate(prompt, settings)
                assertArrayEquals(cool.tokens, result.tokens)
                assertEquals(warm, "of 2 threads" in result.reason, result.reason)
                levels.removeFirst()
            }
        }
    }

    @Test
    fun `a prompt that is being read ends with the one who waits for it`() = loadNative().use { engine ->
        val long = IntArray(engine.context - 10) { 5 + it % 23 }
        val settings = Settings("ar", 2, ignoreEos = true)
        val before = engine.generate(long, settings).tokens
        engine.trim(Trim.ALL)
        runBlocking {
            repeat(20) { at ->
                val job = launch(Dispatchers.Default) { engine.stream(long, settings).collect {} }
                delay(at.toLong())
                job.cancelAndJoin()
            }
        }
        assertArrayEquals(before, engine.generate(long, settings).tokens)
    }

    @Test
    fun `trimming gives memory back and loses no text`() = loadNative().use { engine ->
        val settings = Settings("speculative", 30, ignoreEos = true)
        val before = engine.generate(prompt, settings).tokens
        assertTrue(engine.kvBytes() > 0)
        engine.trim(Trim.SOME)
        assertTrue(engine.kvBytes() > 0)
        engine.trim(Trim.ALL)
        assertEquals(0L, engine.kvBytes())
        assertArrayEquals(before, engine.generate(prompt, settings).tokens)
    }

    @Test
    fun `a closed engine says so`() {
        val engine = loadNative()
        val stream = engine.stream(prompt, Settings("ar", 20, ignoreEos = true))
        engine.close()
        engine.close()
        for (run in listOf({ engine.generate(prompt) }, { runBlocking { stream.toList() } }, { engine.kvBytes() })) {
            val error = assertThrows(Exception::class.java) { run() }
            assertTrue(error is EdgespecError || error is java.util.concurrent.CancellationException, "$error")
        }
    }
}
