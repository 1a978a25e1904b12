package dev.edgespec.engine

import com.google.gson.Gson
import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.planning.*
import dev.edgespec.runtimes.*
import java.io.File
import java.util.concurrent.atomic.AtomicBoolean
import kotlinx.coroutines.*
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.*

private const val SECOND = 1_000_000_000L // nanoseconds
private const val ROWS = "rows of ONNX Runtime may round otherwise among others than alone"
private val ATTENTION = mapOf("f32" to 1, "f16" to 2, "int8" to 3)
const val AUTO = "auto" // the methods of the best predictions, one at a time, by what is measured: in every bundle
const val CHAIN = "chain" // several methods in order: in every bundle

enum class Trim { SOME, ALL }

/** Operators of a bundle: native, which the library runs, or stock, which ONNX Runtime does. */
class OperatorChoice(val kind: String)

/** A loaded bundle.  Requests may come from any thread; each has its own session while it runs, and their passes take turns. */
class Engine internal constructor(
    folder: File, threads: Int?, context: Int?, check: Boolean, library: File, attention: String?, ngramStore: File?, cache: File?, promptCache: Long,
    private val memory: MemoryFacts?, private val heat: Heat?, adapters: Map<String, File>,
) : AutoCloseable {
    val bundle: Bundle = Bundle.open(folder, check)
    private val manifest = bundle.manifest
    val operators = OperatorChoice(if (manifest.native) "native" else "stock")
    val threads: Int = threads ?: defaultThreads()

    /** Reasons why files are unproven, a sentence each; empty = all files were compared with their SHA-256. */
    val unproven: List<String> = if (check) emptyList() else listOf("the files were not compared with their SHA-256 (no check)")

    /** Defaults of a request: the model's sampling if the bundle has it, else greedy. */
    val defaults = Settings(sampling = manifest.sampling)
    private val native: NativeBundle
    private val adapters: Map<String, Int> // numbers by name
    private val djl: DjlCodec? // null = our own library
    private val stock = ArrayList<StockGraph>() // graphs of the target and the draft, for ONNX Runtime
    private val sessions: SessionPool
    internal val saved: SavedTexts?
    private val closed = AtomicBoolean()
    private var limit = this.threads
    internal var felt = 0L // when heat was asked for, in nanoseconds; 0 = it was not
    val context: Int

    init {
        if (this.threads !in 1..MOST_THREADS) throw InvalidRequest("threads ${this.threads}: expected 1 to $MOST_THREADS")
        if (attention != null && attention !in ATTENTION) throw InvalidRequest("attention '$attention': expected ${ATTENTION.keys.joinToString(", ")}")
        if (!manifest.native && attention != null) throw InvalidRequest("attention '$attention': stock operators keep keys and values as float32")
        Native.load(library)
        native = if (manifest.native) NativeBundle(folder, this.threads) else NativeBundle.hosted(folder)
        try {
            if (!manifest.native) for (part in listOfNotNull(manifest.target, manifest.draft.takeIf { "speculative" in methods })) {
                stock.add(StockGraph(folder, part, this.threads))
            }
            this.adapters = adapters.mapValues { native.addAdapter(it.value) }
            djl = if (OwnTokenizer.found) null.also { native.loadCodec(OwnTokenizer.path) } else DjlCodec(folder).also(native::setCodec)
            val most = native.context
            this.context = context ?: most
            if (this.context !in 2..most) throw InvalidRequest("context ${this.context}: expected 2 to $most, what the bundle was exported for")
            val format = ATTENTION[attention] ?: 0
            sessions = SessionPool {
                val free = memory?.available ?: 0
                if (memory != null && free <= 0) throw BudgetError("no memory is free", "close other apps")
                val hosts = stock.map { StockModel(it) }
                val limit = if (hosts.isEmpty()) free else 0 // ONNX Runtime's caches grow with the text
                TextSession(native.session(format, this.context, limit, ngramStore, hosts.getOrNull(0), hosts.getOrNull(1)), limit > 0)
            }
            sessions.giveBack(sessions.fresh()) // what cannot be decoded is refused now
            // keys and values of unchecked files could belong to any bundle
            val kept = cache?.takeIf { promptCache > 0 && check && manifest.native }
            val name = listOf(sha256(File(folder, MANIFEST)), Edgespec.VERSION, attention ?: "", ngramStore?.name ?: "").joinToString(" ")
            saved = kept?.let { SavedTexts(File(it, "prompts/${hex(java.security.MessageDigest.getInstance("SHA-256").digest(name.toByteArray())).take(16)}"), promptCache) }
        } catch (error: Throwable) {
            native.close()
            stock.forEach { it.close() }
            throw error
        }
    }

    /**
     * Complete [prompt] as a stream of text.  Nothing runs before it is collected, decoding is at most a round ahead of the collector, and
     * cancelling the collection ends the request after the round, or the current piece of the prompt; its KV stays for the next one.
     */
    fun stream(prompt: String, settings: Settings = defaults): Flow<Chunk> {
        if (prompt.isBlank()) throw InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
        return stream(encode(prompt), settings)
    }

    fun stream(prompt: IntArray, settings: Settings = defaults): Flow<Chunk> {
        val method = methodOf(settings) // reject what cannot be served at once
        if (prompt.isEmpty()) throw InvalidRequest("the prompt is empty", "give at least one token to start from")
        if (prompt.size >= context) throw tooLong(prompt)
        val adapter = settings.adapter?.let {
            adapters[it] ?: throw InvalidRequest("adapter '$it': expected one of ${adapters.keys.joinToString(", ").ifEmpty { "none" }}", "give its folder to Edgespec.load")
        } ?: 0
        val prediction = settings.prediction?.takeIf { it.isNotEmpty() && method != "plain" }?.let { native.encode(it, special = false) }
        return flow {
            checkOpen()
            val job = currentCoroutineContext().job
            val answer = Answer(settings, method, prediction, adapter) { job.isActive && isOpen }
            var session = take(prompt, adapter)
            try {
                try {
                    answer.begin(session, prompt)
                } catch (error: Full) {
                    if (!session.limited) throw error
                    sessions.drop(session) // opened where less memory was free
                    session = sessions.fresh()
                    answer.begin(session, prompt)
                }
                do {
                    currentCoroutineContext().ensureActive()
                    checkOpen()
                    spare()
                    val chunk = answer.next(session)
                    emit(chunk)
                } while (chunk.result == null)
                saved?.keep(session, answer.readSeconds)
            } catch (error: Cancelled) {
                currentCoroutineContext().ensureActive()
                checkOpen()
                throw error
            } catch (error: Full) {
                session.short = session.limited
                throw tooLong(prompt)
            } finally {
                sessions.giveBack(session)
                if (!isOpen) sessions.clear()
            }
        }.buffer(Channel.RENDEZVOUS).flowOn(Dispatchers.IO)
    }

    private fun tooLong(prompt: IntArray) = InvalidRequest(
        "the prompt has ${prompt.size} tokens, which leaves no room in the context of $context tokens, or in the memory", "shorten it",
    )

    /** A session for a prompt, with what the disk has of it. */
    private fun take(prompt: IntArray, adapter: Int): TextSession {
        if (memory?.low == true) sessions.clear()
        val found = try {
            sessions.take(prompt, adapter)
        } catch (error: BudgetError) {
            if (!sessions.any) throw error
            sessions.clear()
            sessions.take(prompt, adapter)
        }
        try {
            if (adapter == 0) saved?.restore(found, prompt)
        } catch (error: Throwable) {
            sessions.drop(found)
            throw error
        }
        return found
    }

    /** Limits for a hot device from the next round on; asked for once per second. */
    private fun spare() {
        val asked = heat?.takeIf { manifest.native } ?: return // ONNX Runtime's threads cannot be limited later
        if (felt != 0L && System.nanoTime() - felt < SECOND) return
        felt = System.nanoTime()
        val found = sparing(asked.level(), threads)
        if (found != limit) native.limit(found)
        limit = found
    }

    /** The method for the library; null = auto. */
    private fun methodOf(settings: Settings): String? {
        val (wanted, proposers) = settings.method to settings.drafts.proposers
        if (proposers.isNotEmpty() && wanted != null && wanted != CHAIN) throw InvalidRequest(
            "method $wanted and proposers ${proposers.joinToString(", ")}: expected one of them", "proposers belong to method chain",
        )
        if (proposers.isEmpty() && (wanted == null || wanted == AUTO)) return null
        val chain = listOfNotNull("ngram", listOf("speculative", "self-spec").firstOrNull { it in methods })
        val names = proposers.ifEmpty { if (wanted == CHAIN) chain else listOf(wanted!!) }
        for (name in names) if (name !in methods && name != "plain") throw InvalidRequest(
            "method '$name' is not in this bundle; it has: ${methods.joinToString(", ")}",
            if (name in manifest.elsewhere) "$name runs in Python alone: choose another method" else if (name in METHODS) "export it with `--method $name`" else "check the spelling",
        )
        return names.joinToString(",") { if (it == "ar") "plain" else it }
    }

    /** A running request: its text so far. */
    private inner class Answer(
        private val settings: Settings, private val method: String?, private val prediction: IntArray?, private val adapter: Int, goesOn: () -> Boolean,
    ) {
        private val stats = Stats()
        private val text = StringBuilder()
        private var tokens = IntArray(64)
        private val logprobs = ArrayList<Double>()
        private val wins = HashMap<String, Int>() // accepted guesses by drafter
        private val watch = object : Watch {
            override fun read(tokens: Long, total: Long): Boolean = goesOn()
            override fun allowed(text: IntArray, logits: FloatArray): BooleanArray? = settings.sampling.constraint?.allowed(text, logits)
        }
        var readSeconds = 0.0 // of the prompt
            private set

        fun begin(session: TextSession, prompt: IntArray) {
            session.native.begin(prompt, settings, method, prediction, adapter, watch)
            session.begins(prompt, adapter)
            val (all, reused, prompted) = session.native.counts()
            stats.promptTokens = all.toInt()
            stats.reusedTokens = reused.toInt()
            stats.prefillMs = prompted / 1e6
            readSeconds = prompted / 1e9
        }

        fun next(session: TextSession): Chunk {
            val round = session.native.next()
            while (stats.tokens + round.tokens.size > tokens.size) tokens = tokens.copyOf(2 * tokens.size)
            round.tokens.copyInto(tokens, stats.tokens)
            stats.add(round)
            text.append(round.text)
            round.logprobs?.let { logprobs.addAll(it.asList()) }
            if (round.accepted > 0) wins.merge(round.drafter, round.accepted, Int::plus)
            return Chunk(round.text, round, round.finish?.let { result(session, it) })
        }

        private fun result(session: TextSession, finish: String): Result {
            val written = tokens.copyOf(stats.tokens)
            session.text = session.text + written.copyOf(written.size - 1) // the last token is not read yet
            session.short = session.limited && finish == "context" && session.text.size + 1 < context
            val counts = session.native.counts()
            stats.decodeMs = counts[3] / 1e6
            stats.passMs = counts[4] / 1e6
            stats.droppedReason = session.native.dropped()
            val wanted = settings.method?.takeIf { it != AUTO && it != CHAIN }
            val reason = if (method != null) "asked for" else "the fastest by what is measured"
            val sure = !settings.sampling.rejects || stats.drafted == 0
            val doubts = if (manifest.native || stats.drafted == 0) unproven else unproven + ROWS
            return Result(
                text = text.toString(), tokens = written, finish = finish, stats = stats, methodRequested = settings.method,
                methodUsed = wanted ?: wins.maxByOrNull { it.value }?.key ?: "ar",
                reason = listOfNotNull(reason, stats.droppedReason?.let { "drafter dropped: $it" }, hot()).joinToString("; "),
                lossless = said(true, unproven), exact = said(sure, doubts), approximations = approximations, operators = operators.kind,
                logprobs = if (settings.logprobs) logprobs.toDoubleArray() else null, unproven = doubts,
            )
        }

        private fun said(claim: Boolean, doubts: List<String>): Boolean? = claim.takeUnless { claim && doubts.isNotEmpty() }
        private fun hot() = if (limit < threads) "the device is warm: $limit of $threads threads" else null
    }

    /** Complete a prompt; not for the main thread of an app. */
    fun generate(prompt: String, settings: Settings = defaults): Result = collect(stream(prompt, settings))
    fun generate(prompt: IntArray, settings: Settings = defaults): Result = collect(stream(prompt, settings))

    /** The same without a thread that waits. */
    suspend fun complete(prompt: String, settings: Settings = defaults): Result = last(stream(prompt, settings))

    internal fun collect(stream: Flow<Chunk>): Result = runBlocking { last(stream) }

    private suspend fun last(stream: Flow<Chunk>): Result =
        stream.last().result ?: throw EdgespecError("a request ended without a result")

    /** Answer a conversation, formatted by the model's template, or with [continueFinal] continue its last message.  Earlier turns still in a session are reused. */
    @JvmOverloads
    fun chat(messages: List<Message>, settings: Settings = defaults, continueFinal: Boolean = false): Result =
        generate(chatPrompt(messages, continueFinal), settings)

    fun conversation(messages: List<Message> = emptyList(), settings: Settings = defaults) = Conversation(this, messages, settings)

    /** Tokens of a conversation, to the start of an answer; with [continueFinal] they end within the last message, which the answer continues. */
    @JvmOverloads
    fun chatPrompt(messages: List<Message>, continueFinal: Boolean = false): IntArray {
        if (djl != null) return native.encode(template.write(messages, continueFinal), special = false)
        val more = if (continueFinal) """{"continue_final": true}""" else null
        return native.encodeChat(messages.map { Gson().toJson(mapOf("role" to it.role, "content" to it.content)) }, more)
    }

    private val template by lazy { ChatTemplate.read(bundle.path) }

    /** Whether the model has a chat template that can be followed here. */
    val chats: Boolean by lazy { runCatching { chatPrompt(listOf(Message("user", "?"))) }.isSuccess }

    fun encode(text: String): IntArray {
        if (!Charsets.UTF_8.newEncoder().canEncode(text)) { // lone surrogates: not text
            throw InvalidRequest("the prompt cannot be encoded: it has half of a surrogate pair")
        }
        return native.encode(text, special = true)
    }

    fun decode(tokens: IntArray): String = native.decode(tokens)

    val methods: List<String> get() = manifest.methods

    /** Differences from the source model, independent of the method. */
    val approximations: List<String>
        get() = (if (manifest.format == "fp32") emptyList() else listOf("${manifest.format} weights", "8-bit activations")) + manifest.approximations

    /** Bytes of keys and values of idle texts. */
    fun kvBytes(): Long {
        checkOpen()
        return sessions.bytes
    }

    /**
     * Give memory back, without losing any text: [Trim.SOME] keeps the latest conversation's keys and values, [Trim.ALL] none; what is
     * needed again is computed again.  Running requests continue.
     */
    fun trim(level: Trim) = sessions.clear(if (level == Trim.SOME) 1 else 0)

    /** Close the bundle; running requests fail with a clear error. */
    override fun close() {
        if (!closed.compareAndSet(false, true)) return
        sessions.clear()
        native.close()
        if (!sessions.inUse) stock.forEach { it.close() } // else a request is suspended in between rounds: they go with the garbage
    }

    val isOpen: Boolean get() = !closed.get()

    private fun checkOpen() {
        if (closed.get()) throw closedError()
    }
}
