package dev.edgespec.runtimes

import dev.edgespec.*
import dev.edgespec.decoding.*
import java.io.File
import java.nio.ByteBuffer
import java.util.concurrent.locks.ReentrantReadWriteLock
import kotlin.concurrent.read
import kotlin.concurrent.write

/* The library's sessions: edgespec.h through edgespec/runtimes/native/jni.cpp.  Texts are UTF-8, handles 0 where a call failed. */

internal object Native {
    external fun version(): Int
    external fun isa(): ByteArray
    external fun status(): Int
    external fun error(): ByteArray
    external fun open(folder: ByteArray, threads: Int): Long
    external fun openHosted(folder: ByteArray): Long
    external fun close(bundle: Long)
    external fun addAdapter(bundle: Long, folder: ByteArray): Int
    external fun limit(bundle: Long, threads: Int)
    external fun describe(bundle: Long): IntArray?
    external fun loadCodec(bundle: Long, path: ByteArray?): Boolean
    external fun setCodec(bundle: Long, codec: AppCodec): Boolean
    external fun encode(bundle: Long, text: ByteArray, special: Boolean): IntArray?
    external fun decode(bundle: Long, tokens: IntArray): ByteArray?
    external fun encodeChat(bundle: Long, messages: Array<ByteArray>, more: ByteArray?): IntArray?
    external fun sessionOpen(
        bundle: Long, attention: Int, context: Long, bytes: Long, store: ByteArray?, target: HostModel?, draft: HostModel?,
    ): Long

    external fun sessionClose(session: Long)
    external fun sessionBytes(session: Long): Long
    external fun save(session: Long, path: ByteArray): Boolean
    external fun restore(session: Long, path: ByteArray): Boolean

    /**
     * Begins a text.  [numbers]: new tokens, seed, and whether there is one, guesses, whether tokens that end a text do not, top k, coupled,
     * block, log-probabilities, top log-probabilities, a fixed number of guesses, nodes, cycles, adapter; [reals]: temperature, top p, min p, and the
     * repetition, presence and frequency penalties.
     */
    external fun begin(
        session: Long, prompt: IntArray, method: ByteArray?, numbers: LongArray, reals: DoubleArray, biased: IntArray?, biases: DoubleArray?,
        branch: IntArray?, prediction: IntArray?, stop: Array<ByteArray>?, watch: Watch, masks: Boolean,
    ): Boolean

    external fun next(session: Long): Array<Any?>?
    external fun cancel(session: Long)
    external fun counts(session: Long): LongArray?
    external fun dropped(session: Long): ByteArray?

    private const val VERSION = 6 // of the C interface
    private var loaded: File? = null

    /** Load the library, once: the first one stays.  A bare name, `libedgespec.so`, is one that the system finds. */
    @Synchronized
    fun load(library: File) {
        if (loaded != null) return
        try {
            if (byName(library)) System.loadLibrary(library.name.removePrefix("lib").substringBeforeLast('.')) else System.load(library.absolutePath)
        } catch (error: UnsatisfiedLinkError) {
            throw BundleError("no native operators: ${firstLine(error)}", "put libedgespec.so into the app", error)
        }
        if (version() < VERSION) throw BundleError("$library is older than this program", "build it again")
        loaded = library
    }
}

/** Whether the system finds the library, by its name: apps need not have theirs unpacked, and then there is no such file. */
private fun byName(library: File): Boolean = library.parent == null && !library.isFile

/** Functions of the app that the library calls; native code knows their names and types. */
internal interface AppCodec {
    fun encode(text: ByteArray, special: Boolean): IntArray
    fun decode(tokens: IntArray): ByteArray

    /** The bundle and its sessions are closed. */
    fun close()
}

/** Receives the progress of a prompt, and says which tokens may follow a text; native code knows its functions. */
internal interface Watch {
    /** Whether to continue after [tokens] of [total]. */
    fun read(tokens: Long, total: Long): Boolean

    fun allowed(text: IntArray, logits: FloatArray): BooleanArray?
}

/** A model whose passes the app runs, with its cache; native code knows its function, and edgespec.h says what it means (edgespec_host_pass). */
internal interface HostModel : AutoCloseable {
    /** Run a pass; logits [scored, vocab] go into [logits] -> null, or why it failed. */
    fun run(tokens: IntArray, positions: IntArray, parents: IntArray?, kept: Int, moves: IntArray?, scored: Int, logits: ByteBuffer?): ByteArray?

    /** Bytes of keys and values. */
    val bytes: Long
}

private const val NO_MEMORY = 2
private const val CANCELLED = 3
internal const val FULL = 4
private const val NO_FILE = 5
private const val BROKEN = 6
private const val HOST_FAILED = 7

/** A call was cancelled. */
internal class Cancelled : RuntimeException("cancelled")

/** The prompt leaves no room in the context. */
internal class Full(what: String) : RuntimeException(what)

/** The error of the last call of this thread. */
private fun failure(opening: Boolean = false): Throwable {
    val said = String(Native.error(), Charsets.UTF_8).removePrefix("edgespec: ")
    return when (Native.status()) {
        CANCELLED -> Cancelled()
        FULL -> Full(said)
        NO_MEMORY -> BudgetError(said, "choose a shorter text, a smaller context or a smaller bundle")
        NO_FILE -> BundleError(said, "export it for native operators, or copy the whole folder")
        BROKEN, HOST_FAILED -> EdgespecError(said, "the bundle may be damaged: check it with `edgespec verify`")
        else -> if (opening) BundleError(said, "export the bundle again") else InvalidRequest(said)
    }
}

private fun bytes(text: String) = text.toByteArray(Charsets.UTF_8)

/** An opened bundle; calls may come from any thread. */
internal class NativeBundle private constructor(private var handle: Long) : AutoCloseable {
    constructor(folder: File, threads: Int) : this(opened(Native.open(bytes(folder.absolutePath), threads)))

    private val lock = ReentrantReadWriteLock()

    private fun <T> use(opening: Boolean = false, run: (Long) -> T?): T = lock.read {
        if (handle == 0L) throw closedError()
        run(handle) ?: throw failure(opening)
    }

    private val facts = use { Native.describe(it) }
    val context: Int = facts[0]
    val vocab: Int = facts[1]
    val eos: Set<Int> = facts.drop(2).toSet()

    /** Add a LoRA adapter, before there are sessions -> the number by which texts name it. */
    fun addAdapter(folder: File): Int = use(opening = true) { Native.addAdapter(it, bytes(folder.path)).takeIf { number -> number != 0 } }

    /** Limit the threads of later passes, the caller's included; no bit changes. */
    fun limit(threads: Int) = use { Native.limit(it, threads) }

    fun loadCodec(path: File?) = use(opening = true) { Native.loadCodec(it, path?.let { file -> bytes(file.path) }).takeIf { done -> done } }
    fun setCodec(codec: AppCodec) = use(opening = true) { Native.setCodec(it, codec).takeIf { done -> done } }
    fun encode(text: String, special: Boolean): IntArray = use { Native.encode(it, bytes(text), special) }
    fun decode(tokens: IntArray): String = String(use { Native.decode(it, tokens) }, Charsets.UTF_8)

    /** Token ids of a conversation, of messages in JSON; [more]: a JSON object with more than messages, such as `continue_final`. */
    fun encodeChat(messages: List<String>, more: String? = null): IntArray =
        use { Native.encodeChat(it, messages.map(::bytes).toTypedArray(), more?.let(::bytes)) }

    /** [target], [draft]: of a hosted bundle; they are the session's. */
    fun session(attention: Int, context: Int, bytes: Long, store: File?, target: HostModel? = null, draft: HostModel? = null): NativeSession {
        val path = store?.let { bytes(it.path) }
        val made = use { Native.sessionOpen(it, attention, context.toLong(), bytes, path, target, draft).takeIf { handle -> handle != 0L } }
        return NativeSession(made, listOfNotNull(target, draft))
    }

    /** Its sessions may still be used, and closed later. */
    override fun close() = lock.write {
        if (handle != 0L) Native.close(handle)
        handle = 0
    }

    companion object {
        private fun opened(handle: Long) = handle.also { if (it == 0L) throw failure(opening = true) }

        /** The same without models, whose passes are those of [HostModel]s. */
        fun hosted(folder: File) = NativeBundle(opened(Native.openHosted(bytes(folder.absolutePath))))
    }
}

internal fun closedError() = InvalidRequest("this engine is closed", "load the bundle again")

private val FINISH = listOf(null, "eos", "length", "context", "stop")

/** A text and the memory of its caches; one thread at a time. */
internal class NativeSession(private var handle: Long, private val hosts: List<HostModel> = emptyList()) : AutoCloseable {
    private fun <T> result(found: T?): T = found ?: throw failure()

    val bytes: Long get() = if (handle == 0L) 0 else Native.sessionBytes(handle) + hosts.sumOf { it.bytes }

    fun begin(prompt: IntArray, settings: Settings, method: String?, prediction: IntArray?, adapter: Int, watch: Watch) {
        val (how, drafts) = settings.sampling to settings.drafts
        fun flag(on: Boolean) = if (on) 1L else 0L
        val numbers = longArrayOf(
            settings.maxNewTokens?.toLong() ?: 0, how.seed ?: 0, flag(how.seed != null), settings.gamma?.toLong() ?: 0, flag(settings.ignoreEos),
            how.topK.toLong(), flag(how.acceptance == "coupled"), flag(how.verification == "block"), flag(settings.logprobs),
            settings.topLogprobs.toLong(), flag(!settings.adaptive), drafts.nodes?.toLong() ?: 0, drafts.cycles?.toLong() ?: 0, adapter.toLong(),
        )
        val reals = doubleArrayOf(how.temperature, how.topP, how.minP, how.repetitionPenalty, how.presencePenalty, how.frequencyPenalty)
        val begun = Native.begin(
            handle, prompt, method?.let(::bytes), numbers, reals, how.logitBias.keys.toIntArray(), how.logitBias.values.toDoubleArray(),
            drafts.branch?.toIntArray(), prediction, settings.stop.filter { it.isNotEmpty() }.map(::bytes).toTypedArray(), watch, how.constraint != null,
        )
        if (!begun) throw failure()
    }

    /** Run a round. */
    fun next(): Round {
        val found = result(Native.next(handle))
        val numbers = found[0] as IntArray
        var at = 6
        fun take(count: Int) = numbers.copyOfRange(at, at + count).also { at += count }
        val (tokens, drafted, rejected) = Triple(take(numbers[2]), take(numbers[3]), take(numbers[4]))
        val likely = (found[4] as DoubleArray?)?.let { values ->
            val ids = take(values.size)
            List(tokens.size) { row -> (row * numbers[5] until (row + 1) * numbers[5]).filter { ids[it] >= 0 }.associate { ids[it] to values[it] } }
        }
        return Round(
            tokens, drafted, numbers[1], rejected, found[3] as DoubleArray?, FINISH[numbers[0]], (found[1] as ByteArray?)?.toString(Charsets.UTF_8) ?: "",
            (found[2] as ByteArray).toString(Charsets.UTF_8), likely,
        )
    }

    /** Prompt tokens, reused tokens, and nanoseconds: of the prompt, of rounds, of passes in rounds. */
    fun counts(): LongArray = result(Native.counts(handle))

    /** Drafters that failed, and why; null = none did. */
    fun dropped(): String? = result(Native.dropped(handle)).toString(Charsets.UTF_8).trim().ifEmpty { null }

    fun save(file: File) {
        if (!Native.save(handle, bytes(file.path))) throw failure()
    }

    fun restore(file: File) {
        if (!Native.restore(handle, bytes(file.path))) throw failure()
    }

    override fun close() {
        if (handle == 0L) return
        Native.sessionClose(handle)
        handle = 0
        hosts.forEach { it.close() }
    }
}

/**
 * Our own library of tokenizers (edgespec/runtimes/tokenizer), which takes the place of DJL's where the system finds it under its name:
 * packed in the app, or on a JVM's `java.library.path`.
 */
internal object OwnTokenizer {
    private const val NAME = "edgespec_tokenizer"

    val found: Boolean by lazy { runCatching { System.loadLibrary(NAME) }.isSuccess }

    /** Its file; null = the system finds it by its name, as in an app. */
    val path: File?
        get() = System.getProperty("java.library.path").orEmpty().split(File.pathSeparator).map { File(it, System.mapLibraryName(NAME)) }.firstOrNull { it.isFile }
}
