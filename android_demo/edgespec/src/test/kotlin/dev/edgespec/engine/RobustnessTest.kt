package dev.edgespec.engine

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.drafters.Proposer
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
        refused("surprise: Extra inputs are not permitted", manifest { it.addProperty("surprise", 1) })
        refused("target.facts.layers: Input should be greater than 0", target { it["facts"].asJsonObject.addProperty("layers", 0) })
        refused("target.extra_rows: Field required", target { it.remove("extra_rows") })
        refused("target.format: Input should be", target { it.addProperty("format", "int3") })
        refused("leaves the bundle", target { it.addProperty("weights", "../weights.bin") })
        refused("leaves the bundle", manifest { it["files"].asJsonObject.add("/etc/passwd", JsonObject()) })
        refused("does not list it under files", manifest { it["files"].asJsonObject.remove(weights()) })
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
        fails<BundleError>("cannot load this graph") { loadNative(folder, check = false) }
    }

    @Test
    fun `nonsense settings are refused`() = loadNative().use { engine ->
        fun refused(says: String, run: () -> Any) = fails<InvalidRequest>(says, run)
        refused("temperature is -1.0; allowed: a number >= 0") { SamplingParams(temperature = -1.0) }
        refused("gamma 0: expected at least 1") { Settings(gamma = 0) }
        refused("makes a tree of") { DraftOptions(branch = listOf(9, 9)) }
        refused("acceptance rule 'maybe'") { Accept("maybe") }
        refused("the prompt is empty") { engine.generate("  ") }
        refused("at least one token") { engine.generate(IntArray(0)) }
        refused("outside the vocabulary") { engine.generate(intArrayOf(-1)) }
        refused("no room for a new one") { engine.generate(IntArray(engine.context) { 3 }) }
        refused("method 'magic' is not in this bundle") { engine.stream(prompt, Settings(method = "magic")) }
        refused("expected max_new_tokens >= 1") { engine.generate(prompt, Settings(maxNewTokens = 0)) }
        val beyond = SamplingParams(logitBias = mapOf(1_000_000 to 1.0))
        refused("logit_bias names token") { engine.generate(prompt, Settings(sampling = beyond)) }
        refused("this model has no chat template") { engine.conversation().ask("hello") }
        assertEquals(8, engine.generate(prompt, Settings(maxNewTokens = 8, ignoreEos = true)).tokens.size)
    }

    @Test
    fun `a drafter that throws or lies costs the request its drafter, never its text`() = loadNative().use { engine ->
        val plain = engine.generate(prompt, Settings("ar", 40, ignoreEos = true)).tokens
        val bad = listOf<(IntArray, Int) -> Proposal?>(
            { _, _ -> throw IllegalStateException("no idea") }, { _, _ -> throw StackOverflowError() },
            { _, _ -> Proposal(intArrayOf(-4)) }, { _, _ -> Proposal(intArrayOf(1, 2), intArrayOf(1, 0)) },
            { _, _ -> Proposal(intArrayOf(1), null, arrayOf(DoubleArray(3))) },
        )
        for (one in bad) for (adaptive in listOf(true, false)) {
            var calls = 0
            val proposer = Proposer { tokens, budget -> if (calls++ < 3) null else one(tokens, budget) }
            val result = engine.generate(prompt, Settings(maxNewTokens = 40, ignoreEos = true, adaptive = adaptive, proposer = proposer))
            assertArrayEquals(plain, result.tokens)
            assertTrue(result.stats.droppedReason!!.contains("failed in propose"), result.reason)
        }
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
    fun `requests of several sources take turns, and each keeps its own`() {
        val bundle = GOLDEN["bundles"].asJsonArray.map { it.asJsonObject.text("path") }.first { "restore-int8" in it }
        loadNative(File(bundle)).use { engine ->
            val sources = List(4) { IntArray(5 + 40 * it) { at -> 3 + (at * 7 + it) % 900 } } // of memories that are not of one size
            val settings = Settings("speculative", 20, adaptive = false, ignoreEos = true)
            val alone = sources.map { engine.generate(it, settings).tokens.asList() }
            val together = runBlocking {
                List(12) { number ->
                    async(Dispatchers.Default) {
                        val stream = engine.stream(sources[number % 4], settings)
                        if (number % 5 == 4) stream.take(3).toList() else stream.toList()
                    }
                }.awaitAll()
            }
            for ((number, chunks) in together.withIndex()) {
                if (number % 5 != 4) assertEquals(alone[number % 4], chunks.last().result!!.tokens.asList())
            }
            engine.trim(Trim.ALL)
            assertEquals(0L, engine.kvBytes())
            assertEquals(alone[3], engine.generate(sources[3], settings).tokens.asList())
            assertEquals(sources[3].size, engine.generate(sources[3], settings).stats.sourceRows)
            fails<InvalidRequest>("cut it into parts") { engine.generate(IntArray(100_000) { 3 }) }
            fails<InvalidRequest>("reads a text") { engine.generate(Source.of(FloatArray(8), 4, intArrayOf(0))) }
        }
        fails<InvalidRequest>("languages are for encoder-decoders") { loadNative().use { it.generate("x", Settings(targetLanguage = "ko")) } }
    }

    @Test
    fun `a stream that is never collected costs nothing, and one that is left in the middle stops nobody`() = loadNative().use { engine ->
        repeat(1000) { engine.stream(prompt, Settings("ar", 100)) }
        assertEquals(0L, engine.kvBytes())
        runBlocking {
            withTimeout(60_000) {
                val left = engine.stream(prompt, Settings("ar", 100, ignoreEos = true)).first()
                assertEquals(1, left.round!!.tokens.size)
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
    fun `what does not fit the memory gets a cheaper method, or is refused with what would fit`() {
        assertThrows(BudgetError::class.java) { loadNative(memory = Free(1000)) }
        fun bytes(engine: Engine, tokens: Int) =
            memoryOf(engine.bundle.manifest, RunOptions("ar", context = tokens, chunk = 16, checkpoints = 0)).sumOf { it.bytes }
        val free = Free(1L shl 32)
        loadNative(memory = free).use { engine ->
            fun used(method: String) = engine.generate(prompt, Settings(method, 100, ignoreEos = true))
            val (ar, speculative) = listOf("ar", "speculative").map(::used)
            assertEquals("speculative", speculative.methodUsed)
            assertTrue(speculative.predictedBytes > ar.predictedBytes)
            // each request checks the memory that others have taken and released
            engine.trim(Trim.ALL)
            free.available = bytes(engine, 128) - bytes(engine, 64)
            val result = used("speculative")
            assertTrue(result.methodUsed in listOf("ngram", "ar"), result.methodUsed)
            assertTrue(result.reason.contains("speculative needs"), result.reason)
            fails<BudgetError>("tokens of prompt and answer need") { engine.generate(prompt, Settings("ar", engine.context - 10)) }
            free.available = 1L shl 32
            assertEquals("speculative", used("speculative").methodUsed)
            free.low = true
            assertEquals(0, used("ar").stats.reusedTokens) // idle texts went first
        }
        loadNative(memory = Free(bytes(loadNative().use { it }, 64))).close()
    }

    @Test
    fun `a hot device is spared threads and guesses, and writes the same text`() {
        val levels = ArrayDeque(listOf(0, 2, 3, 0))
        val settings = Settings("speculative", 40, gamma = 8, adaptive = false, ignoreEos = true)
        val cool = loadNative().use { it.generate(prompt, settings) }
        Edgespec.load(BUNDLE, threads = 2, library = File(GOLDEN.text("library")), heat = { levels.first() }).use { engine ->
            for (most in listOf(8, 4, 2, 8)) {
                engine.felt = 0
                val result = engine.generate(prompt, settings)
                assertArrayEquals(cool.tokens, result.tokens)
                assertTrue(result.stats.histogram.size <= most + 1, "${result.stats.histogram} with at most $most guesses")
                assertEquals(most < 8, "of 2 threads" in result.reason, result.reason)
                levels.removeFirst()
            }
        }
        assertEquals(listOf(4, 4, 3, 2, 2, 1), (0..4).map { Sparing.at(it, 4).threads } + Sparing.at(4, 1).threads)
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
