package dev.edgespec.engine

import dev.edgespec.EdgespecError
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.Settings
import dev.edgespec.decoding.Tokens
import dev.edgespec.drafters.NGramStore
import dev.edgespec.planning.Allowance
import dev.edgespec.planning.MemoryFacts
import dev.edgespec.runtimes.*
import java.io.File
import java.util.concurrent.Callable
import java.util.concurrent.ExecutionException
import java.util.concurrent.Executors
import java.util.concurrent.atomic.AtomicBoolean
import kotlinx.coroutines.*
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn

private const val ONE_THREAD_BYTES = 4L shl 20 // of a draft's weights: it is done before a second thread has woken up

/** How much memory to give back; see [Engine.trim]. */
enum class Trim { SOME, ALL }

/** How to load a bundle; see [dev.edgespec.Edgespec.load]. */
class LoadOptions(
    val threads: Int? = null,
    val context: Int? = null,
    val strict: Boolean = true,
    val check: Boolean = true,
    val operators: String = "auto",
    val library: File? = null,
    val attention: String? = null,
    val draftAttention: String? = null,
    val ngramStore: File? = null,
    val cache: File? = null,
    val memory: MemoryFacts? = null,
)

/**
 * A loaded bundle.  Requests may come from any thread; all decoding happens on one thread of the engine's own, a round of
 * one request at a time, and every request keeps its own KV slot while it runs.
 */
class Engine internal constructor(folder: File, options: LoadOptions) : AutoCloseable {
    val bundle: Bundle = Bundle.open(folder, options.check)
    private val manifest = bundle.manifest
    private val library = options.library
    private val wantedOperators = options.operators
    val strict: Boolean = options.strict

    /** Why nothing is certain of what runs, a sentence each; empty = all files were compared with their SHA-256. */
    val unproven: List<String> =
        if (options.check) emptyList() else listOf("the files were not compared with their SHA-256 (no check)")
    val context: Int = options.context ?: manifest.target.facts.context
    val operators: OperatorChoice = chooseOperators(options.operators, manifest.target, options.library)
    val attention: AttentionChoice
    internal val codec: TextCodec
    private val store: NGramStore?
    private val cache = options.cache

    /** What a request gets that says nothing: the model's own sampling where the bundle has it, else greedy. */
    val defaults = Settings(sampling = manifest.sampling)
    internal val eos: Set<Int> = manifest.eos.toSet()
    val allowance: Allowance
    private val model: Model
    private val draftModels = HashMap<String, Model>()
    internal val paces = mapOf(false to Pace(), true to Pace()) // of the target, and of drafts
    private val times = HashMap<String, Map<Int, Double>>()
    internal val lanes: LanePool
    private var rowsExact: Boolean? = null
    private val closed = AtomicBoolean()
    private val template by lazy { ChatTemplate.read(bundle.path) }

    init {
        val most = manifest.target.facts.context
        if (context !in 2..most) throw InvalidRequest("context $context: expected 2 to $most, what the bundle was exported for")
        options.threads?.let { if (it !in 1..MOST_THREADS) throw InvalidRequest("threads $it: expected 1 to $MOST_THREADS") }
        attention = chooseAttention(manifest.target, operators.kind, options.attention, options.draftAttention)
        if (attention.draft != null && listOf("self-spec", "swift").none { it in manifest.methods }) {
            throw InvalidRequest(
                "draft attention ${attention.draft} is for self-speculation, which this bundle was not made for",
                "export it with `--method self-spec`",
            )
        }
        allowance = Allowance(manifest, RunOptions(operators = operators.kind, kv = attention.kv), options.memory?.available)
        allowance.admitBundle()
        codec = TextCodec(bundle.path)
        try {
            store = options.ngramStore?.let { NGramStore(it, options.check) }
            store?.require(codec.vocabularySha256(), codec.vocabSize)
            val graph = operators.graph(manifest.target, strict)
            model = Model(bundle.path, manifest.target, graph, options.threads ?: defaultThreads(), library, attention.kv)
        } catch (error: Throwable) {
            codec.close()
            throw error
        }
        lanes = LanePool { Lane(bundle, model, ::draft, context, times, store, cache) }
    }

    @Volatile
    private var decodeThread: Thread? = null
    private val executor = Executors.newSingleThreadExecutor { run ->
        Thread(run, "edgespec-decode").apply {
            isDaemon = true
            decodeThread = this
        }
    }
    private val dispatcher = executor.asCoroutineDispatcher()

    // -- requests

    /**
     * Complete [prompt] as a stream of text.  Nothing runs before it is collected, decoding is at most a round ahead of the
     * collector, and cancelling the collection ends the request after the round, or the piece of the prompt, at hand; its KV
     * stays for the next one.
     */
    fun stream(prompt: String, settings: Settings = defaults): Flow<Chunk> {
        if (prompt.isBlank()) throw InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
        return stream(codec.encode(prompt), settings)
    }

    /** The same for token ids. */
    fun stream(prompt: IntArray, settings: Settings = defaults): Flow<Chunk> {
        chooseFor(settings) // what cannot be served is refused here and now
        return flow {
            begin(prompt, settings).use { request ->
                while (true) {
                    currentCoroutineContext().ensureActive()
                    checkOpen()
                    if (request.read()) { // somebody else's turn, or the end of this request
                        yield()
                        continue
                    }
                    val chunk = request.next()
                    emit(chunk)
                    if (chunk.result != null) break
                }
            }
        }.buffer(Channel.RENDEZVOUS).flowOn(dispatcher)
    }

    private fun begin(prompt: IntArray, settings: Settings): Request {
        checkOpen()
        return Request(this, prompt, settings)
    }

    /** Complete a prompt; not for the main thread of an app. */
    fun generate(prompt: String, settings: Settings = defaults): Result = collect(stream(prompt, settings))

    fun generate(prompt: IntArray, settings: Settings = defaults): Result = collect(stream(prompt, settings))

    internal fun collect(stream: Flow<Chunk>): Result = runBlocking {
        var result: Result? = null
        stream.collect { result = it.result }
        result ?: throw EdgespecError("a request ended without a result")
    }

    /** Answer a conversation, written by the model's own template.  Earlier turns still in a slot are reused. */
    fun chat(messages: List<Message>, settings: Settings = defaults): Result = generate(encodeChat(messages), settings)

    /** A conversation of several turns, which keeps the messages. */
    fun conversation(messages: List<Message> = emptyList(), settings: Settings = defaults) = Conversation(this, messages, settings)

    internal fun encodeChat(messages: List<Message>): IntArray = codec.encode(template.write(messages), withSpecial = false)

    /** Token ids of a text, and the text of token ids. */
    fun encode(text: String): IntArray = codec.encode(text)

    fun decode(tokens: IntArray): String = codec.decode(tokens)

    // -- what this bundle is

    /** Methods this bundle can run. */
    val methods: List<String> get() = manifest.methods.keys.toList()

    /** What differs from the source model whatever the method. */
    val approximations: List<String>
        get() {
            val form = manifest.target.format
            val found = if (form == "fp32") emptyList() else listOf("$form weights", "8-bit activations")
            val source = manifest.provenance["approximations"]?.asJsonArray?.map { it.asString }
            return found + (source ?: emptyList()) + (attention.kv?.approximations ?: emptyList())
        }

    /** The method for a request, with the reason. */
    fun chooseFor(settings: Settings): MethodChoice {
        val own = settings.proposer ?: return chooseMethod(manifest, settings.method, settings.drafts)
        if (settings.method != null || settings.drafts.proposers.isNotEmpty()) {
            throw InvalidRequest("got a proposer of your own and a method: expected one of them", "leave out the method")
        }
        return ownChoice(own.name)
    }

    /** Whether verified rows have the bits of plain decoding's on this machine; probed once, then known. */
    internal fun rowsExact(): Boolean = rowsExact ?: run {
        val lane = lanes.any() // its text stays
        try {
            (strict && probeRows(lane.target)).also { rowsExact = it }
        } finally {
            lanes.giveBack(lane)
        }
    }

    /** Bytes of KV allocated by all slots. */
    fun kvBytes(): Long = onDecodeThread { lanes.kvBytes }

    /**
     * Give memory back, without losing any text: [Trim.SOME] keeps the latest conversation's keys and values, [Trim.ALL]
     * none, and not the draft model either; what is needed again is computed again.  Running requests go on.
     */
    fun trim(level: Trim) = onDecodeThread {
        lanes.clear(if (level == Trim.SOME) 1 else 0)
        if (level == Trim.ALL && lanes.inUse == 0) {
            draftModels.values.forEach { it.close() }
            draftModels.clear()
        }
    }

    /** Forget all slots and close the sessions; requests that are still running fail with a clear error. */
    override fun close() {
        if (!closed.compareAndSet(false, true)) return
        onDecodeThread {
            lanes.clear()
            if (lanes.inUse == 0) {
                draftModels.values.forEach { it.close() }
                model.close()
                codec.close()
            } // else a request is suspended in between rounds: its memory goes with the garbage
        }
        executor.shutdown()
    }

    // -- parts

    private fun checkOpen() {
        if (closed.get()) throw InvalidRequest("this engine is closed", "load the bundle again")
    }

    private fun <T> onDecodeThread(run: () -> T): T {
        if (Thread.currentThread() === decodeThread) return run()
        try {
            return executor.submit(Callable(run)).get()
        } catch (error: ExecutionException) {
            throw error.cause ?: error
        } catch (error: java.util.concurrent.RejectedExecutionException) {
            throw InvalidRequest("this engine is closed", "load the bundle again", error)
        }
    }

    private fun draft(name: String): Model = draftModels.getOrPut(name) {
        val part = bundle.part(name)
        val choice = chooseOperators(wantedOperators, part, library)
        val small = (manifest.files[part.weights]?.size ?: 0) < ONE_THREAD_BYTES
        Model(bundle.path, part, choice.graph(part, false), if (small) 1 else model.threads, library)
    }
}
