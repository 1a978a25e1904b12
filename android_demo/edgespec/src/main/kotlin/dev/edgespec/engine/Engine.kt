package dev.edgespec.engine

import dev.edgespec.*
import dev.edgespec.decoding.*
import dev.edgespec.drafters.NGramStore
import dev.edgespec.images.Picture
import dev.edgespec.planning.*
import dev.edgespec.runtimes.*
import java.io.File
import java.util.concurrent.Callable
import java.util.concurrent.ExecutionException
import java.util.concurrent.Executors
import java.util.concurrent.atomic.AtomicBoolean
import kotlinx.coroutines.*
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.flow.*

private const val SECOND = 1_000_000_000L // nanoseconds
private const val ONE_THREAD_BYTES = 4L shl 20 // of a draft's weights: it is done before a second thread has woken up

enum class Trim { SOME, ALL }

/**
 * A loaded bundle.  Requests may come from any thread; all decoding happens on one thread of the engine, a round of
 * one request at a time, and every request keeps its own KV slot while it runs.
 */
class Engine internal constructor(
    folder: File, threads: Int?, context: Int?, val strict: Boolean, check: Boolean, private val wantedOperators: String,
    internal val library: File?, wantedAttention: String?, draftAttention: String?, ngramStore: File?, cache: File?, promptCache: Long,
    private val memory: MemoryFacts?, precision: String, private val onOnnxRuntime: Boolean, private val heat: Heat? = null,
) : AutoCloseable {
    private val whole = Bundle.open(folder, check)
    val operators: OperatorChoice = chooseOperators(wantedOperators, whole.manifest.target, library)
    val bundle: Bundle = whole.runAs(operators.kind == "native", precision == "high")
    private val manifest = bundle.manifest

    /** Whether prompts may have pictures. */
    val readsPictures: Boolean = manifest.target.image != null && operators.kind == "native"

    /** Reasons why files are unproven, a sentence each; empty = all files were compared with their SHA-256. */
    val unproven: List<String> =
        if (check) emptyList() else listOf("the files were not compared with their SHA-256 (no check)")
    val context: Int = context ?: manifest.target.facts.context
    val attention: AttentionChoice
    internal val codec: TextCodec
    internal val encoding: Encoding? // of an encoder-decoder
    val sources: SourceTexts? // and how the encoder's texts become tokens; null = it reads features
    internal val pictures: Pictures?
    private val store: NGramStore?

    /** Defaults of a request: the model's sampling if the bundle has it, else greedy. */
    val defaults = Settings(sampling = manifest.sampling)
    internal val eos: Set<Int> = manifest.eos.toSet()
    val allowance: Allowance
    private val model: Model
    private val draftModels = HashMap<String, Model>()
    internal val paces = mapOf(false to Pace(), true to Pace()) // of the target, and of drafts
    private val times = HashMap<String, Map<Int, Double>>()
    internal val lanes: LanePool
    internal val prompts: PromptCache?
    private val closed = AtomicBoolean()
    private var sparing = Sparing(0, null)
    internal var felt = 0L // when heat was asked for, in nanoseconds; 0 = it was not
    private val template by lazy { ChatTemplate.read(bundle.path) }

    init {
        if (precision !in listOf("full", "high")) throw InvalidRequest("precision '$precision': expected full or high")
        val most = manifest.target.facts.context
        if (this.context !in 2..most) throw InvalidRequest("context ${this.context}: expected 2 to $most, what the bundle was exported for")
        threads?.let { if (it !in 1..MOST_THREADS) throw InvalidRequest("threads $it: expected 1 to $MOST_THREADS") }
        attention = chooseAttention(manifest.target, operators.kind, wantedAttention, draftAttention)
        if (attention.draft != null && listOf("self-spec", "swift").none { it in manifest.methods }) throw InvalidRequest(
            "draft attention ${attention.draft} is for self-speculation, which this bundle was not made for",
            "export it with `--method self-spec`",
        )
        allowance = Allowance(manifest, RunOptions(operators = operators.kind, kv = attention.kv), memory?.available)
        allowance.admitBundle()
        codec = TextCodec(bundle.path)
        try {
            store = ngramStore?.let { NGramStore(it, check) }
            store?.require(codec.vocabularySha256(), codec.vocabSize)
            val graph = operators.graph(manifest.target, strict)
            model = Model(bundle.path, manifest.target, graph, threads ?: defaultThreads(), library, attention.kv, onOnnxRuntime)
            if (!strict) model.pairs = false // the graph with gates is also the strict one
            val source = manifest.target.source
            val open: Opener = { part, kv -> Model(bundle.path, part, "native", model.threads, library, kv, onOnnxRuntime) }
            encoding = source?.let { Encoding(bundle, open) }
            pictures = if (readsPictures) Pictures(bundle, codec, open) else null
            model.inserted = pictures?.rows
            sources = manifest.text?.takeIf { source?.kind == "text" }?.let { SourceTexts(bundle.path, it, codec) }
        } catch (error: Throwable) {
            codec.close()
            throw error
        }
        lanes = LanePool { Lane(bundle, model, ::draft, this.context, times, store, cache, encoding) }
        // keys and values of unchecked files could belong to any bundle; with another source they are useless
        val kept = cache?.takeIf { promptCache > 0 && check && encoding == null }
        prompts = kept?.let { PromptCache(bundle, library, it, promptCache, paces) { copy -> onDecodeThread(copy) } }
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

    /**
     * Complete [prompt] as a stream of text.  Nothing runs before it is collected, decoding is at most a round ahead of the
     * collector, and cancelling the collection ends the request after the round, or the current piece of the prompt; its KV
     * stays for the next one.  For an encoder-decoder the prompt is the encoder's input, as text or as token ids.
     */
    fun stream(prompt: String, settings: Settings = defaults): Flow<Chunk> {
        if (prompt.isBlank()) throw InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
        if (encoding == null) return stream(codec.encode(prompt), settings)
        val texts = sources ?: throw InvalidRequest("got a text, but this model reads rows of features", "use transcribe")
        return stream(texts.encode(prompt, settings.sourceLanguage, settings.targetLanguage), settings)
    }

    /** Cut the encoder's input at ends of sentences into parts of its length, without the spaces around them. */
    fun cut(text: String, settings: Settings = defaults): List<String> {
        val texts = sources ?: return listOf(text)
        val most = manifest.target.source!!.most
        return pieces(text) { texts.encode(it, settings.sourceLanguage, settings.targetLanguage).size <= most }.map { part -> part.trim().ifEmpty { part } }
    }

    fun stream(prompt: IntArray, settings: Settings = defaults): Flow<Chunk> {
        if (encoding != null) return stream(Source.of(prompt, begin(settings)), settings)
        if (settings.sourceLanguage != null || settings.targetLanguage != null) {
            throw InvalidRequest("languages are for encoder-decoders, and this model is a decoder alone")
        }
        return stream(prompt, null, settings)
    }

    /** The same for an existing source. */
    fun stream(source: Source, settings: Settings = defaults): Flow<Chunk> {
        val reads = encoding ?: throw InvalidRequest("got a source, but this model is a decoder alone: expected a prompt")
        reads.check(source)
        return stream(source.begin, source, settings)
    }

    private fun begin(settings: Settings): IntArray =
        sources?.begin(settings.sourceLanguage, settings.targetLanguage) ?: manifest.speech?.begin() ?: IntArray(0)

    private fun stream(prompt: IntArray, source: Source?, settings: Settings): Flow<Chunk> {
        if (settings.beams != null) {
            if (source == null) throw InvalidRequest("beams are searched for encoder-decoders, and this model is a decoder alone")
            return flow { emit(searchBeams(source, settings).let { Chunk(it.text, null, result = it) }) } // complete at the end
        }
        chooseFor(settings) // reject what cannot be served at once
        return flow {
            begin(prompt, source, settings).use { request ->
                while (true) {
                    currentCoroutineContext().ensureActive()
                    checkOpen()
                    if (request.read()) { // another request's turn, or the end of this one
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

    private fun begin(prompt: IntArray, source: Source?, settings: Settings): Request {
        checkOpen()
        return Request(this, prompt, source, if (source == null && manifest.rules == null) settings else ruled(settings, prompt.size))
    }

    /** A request with the rules of writing that its model has, and of an encoder-decoder with its length. */
    internal fun ruled(settings: Settings, begin: Int): Settings {
        val rules = manifest.text?.rules ?: manifest.rules
        val most = if (manifest.text == null) begin + settings.length else minOf(rules?.most ?: context, context)
        val length = settings.maxNewTokens ?: maxOf(1, most - begin)
        if (rules?.needed != true || settings.sampling.constraint != null) return settings.copy(maxNewTokens = length)
        val (kept, ends) = if (settings.ignoreEos) rules.copy(forcedEnd = null) to emptySet() else rules to eos
        val bound = RuledText(kept, manifest.target.facts.vocab, ends, begin, minOf(context, begin + length))
        return settings.copy(maxNewTokens = length, sampling = settings.sampling.copy(constraint = bound))
    }

    /** Complete a prompt; not for the main thread of an app. */
    fun generate(prompt: String, settings: Settings = defaults): Result = collect(stream(prompt, settings))
    fun generate(prompt: IntArray, settings: Settings = defaults): Result = collect(stream(prompt, settings))
    fun generate(source: Source, settings: Settings = defaults): Result = collect(stream(source, settings))

    /** The same without a thread that waits. */
    suspend fun complete(prompt: String, settings: Settings = defaults): Result = last(stream(prompt, settings))
    suspend fun complete(prompt: IntArray, settings: Settings = defaults): Result = last(stream(prompt, settings))

    internal fun collect(stream: Flow<Chunk>): Result = runBlocking { last(stream) }

    private suspend fun last(stream: Flow<Chunk>): Result =
        stream.last().result ?: throw EdgespecError("a request ended without a result")

    /** Answer a conversation, formatted by the model's template.  Earlier turns still in a slot are reused. */
    fun chat(messages: List<Message>, settings: Settings = defaults): Result = generate(encodeChat(messages), settings)
    fun conversation(messages: List<Message> = emptyList(), settings: Settings = defaults) = Conversation(this, messages, settings)
    internal fun encodeChat(messages: List<Message>): IntArray = tokens(template.write(messages), messages.mapNotNull { it.picture }, false)
    fun encode(text: String): IntArray = codec.encode(text)

    /** Token ids of [pictures] and the text after them, for `generate` or `stream`; the vision encoder runs for new pictures. */
    fun encode(text: String, pictures: List<Picture>): IntArray = tokens(reader.written(text, pictures.size), pictures, true)

    private fun tokens(text: String, shown: List<Picture>, withSpecial: Boolean): IntArray =
        if (shown.isEmpty()) codec.encode(text, withSpecial) else reader.encode(text, shown, withSpecial)

    internal val reader: Pictures
        get() = pictures ?: throw InvalidRequest(
            if (manifest.target.image == null) "got a picture, and this model reads text alone" else "pictures are read by native operators alone",
            "use a bundle that reads pictures, as of SmolVLM2, and the native library",
        )
    fun decode(tokens: IntArray): String = codec.decode(tokens)

    val methods: List<String> get() = manifest.methods.keys.toList()

    /** Differences from the source model, independent of the method. */
    val approximations: List<String>
        get() {
            val form = if (manifest.target.highAlone) "the high 4 bits of int8" else manifest.target.format
            val found = if (form == "fp32") emptyList() else listOf("$form weights", "8-bit activations")
            val source = manifest.provenance["approximations"]?.asJsonArray?.map { it.asString }
            return found + (source ?: emptyList()) + (attention.kv?.approximations ?: emptyList())
        }

    fun chooseFor(settings: Settings): MethodChoice {
        val own = settings.proposer ?: return chooseMethod(manifest, settings.method, settings.drafts)
        if (settings.method != null || settings.drafts.proposers.isNotEmpty()) {
            throw InvalidRequest("got a custom proposer and a method: expected one of them", "leave out the method")
        }
        return ownChoice(own.name)
    }

    /** Whether verified rows have the bits of plain decoding's on this machine; probed once, then known. */
    internal val rowsExact: Boolean by lazy {
        val lane = lanes.any() // its text stays
        try {
            strict && probeRows(lane.target)
        } finally {
            lanes.giveBack(lane)
        }
    }

    fun kvBytes(): Long = onDecodeThread { textBytes }
    val threads: Int get() = model.threads
    internal val freeMemory: Long? get() = memory?.available
    private val textBytes: Long get() = lanes.kvBytes + (encoding?.nbytes ?: 0)

    /** Look at the memory before a request is let in; where the system is short of it, idle texts go first. */
    internal fun lookAtMemory() {
        val facts = memory ?: return
        if (facts.low) lanes.clear()
        allowance.renew(facts.available, textBytes)
    }

    /** Limits for a hot device from the next round on; asked for once per second. */
    internal fun spare(): Sparing {
        val asked = heat ?: return sparing
        if (felt != 0L && System.nanoTime() - felt < SECOND) return sparing
        felt = System.nanoTime()
        val found = Sparing.at(asked.level(), model.threads)
        if (found.threads != sparing.threads) (draftModels.values + model).forEach { it.runner.limit(minOf(found.threads, it.threads)) }
        return found.also { sparing = it }
    }

    /**
     * Give memory back, without losing any text: [Trim.SOME] keeps the latest conversation's keys and values, [Trim.ALL]
     * none, and not the draft model either; what is needed again is computed again.  Running requests continue.
     */
    fun trim(level: Trim) = onDecodeThread {
        lanes.clear(if (level == Trim.SOME) 1 else 0)
        if (level == Trim.ALL && lanes.inUse == 0) {
            draftModels.values.forEach { it.close() }
            draftModels.clear()
            encoding?.clear()
            pictures?.clear()
        }
    }

    /** Write pending prompts to the cache, drop all slots and close the sessions; running requests fail with a clear error. */
    override fun close() {
        if (!closed.compareAndSet(false, true)) return
        if (Thread.currentThread() !== decodeThread) prompts?.finish()
        onDecodeThread {
            trim(Trim.ALL)
            if (lanes.inUse == 0) {
                model.close()
                sources?.close()
                codec.close()
            } // else a request is suspended in between rounds: its memory goes with the garbage
        }
        executor.shutdown()
    }

    val isOpen: Boolean get() = !closed.get()

    private fun checkOpen() {
        if (closed.get()) throw InvalidRequest("this engine is closed", "load the bundle again")
    }

    internal fun <T> onDecodeThread(run: () -> T): T {
        if (Thread.currentThread() === decodeThread) return run()
        try {
            return executor.submit(Callable(run)).get()
        } catch (error: ExecutionException) {
            throw error.cause ?: error
        } catch (error: java.util.concurrent.RejectedExecutionException) {
            throw InvalidRequest("this engine is closed", "load the bundle again", error)
        }
    }

    /** A slot for the texts of a search, [longest] tokens each. */
    internal fun beamSlot(beams: Int, longest: Int) = NativeSlot(model, context, longest, beams = beams)

    private fun draft(name: String): Model = draftModels.getOrPut(name) {
        val part = bundle.part(name)
        val choice = chooseOperators(wantedOperators, part, library)
        val small = (manifest.files[part.weights]?.size ?: 0) < ONE_THREAD_BYTES
        Model(bundle.path, part, choice.graph(part, false), if (small) 1 else model.threads, library, onOnnxRuntime = onOnnxRuntime)
            .also { made ->
                if (sparing.threads > 0) made.runner.limit(minOf(sparing.threads, made.threads))
                made.inserted = pictures?.draftRows?.takeIf { part.image != null }
                made.instead = pictures?.instead?.takeIf { it < part.facts.vocab } ?: 0
            }
    }
}
