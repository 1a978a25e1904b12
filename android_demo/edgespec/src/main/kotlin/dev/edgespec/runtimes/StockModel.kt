package dev.edgespec.runtimes

import ai.onnxruntime.*
import com.google.gson.JsonObject
import com.sun.jna.NativeLibrary
import dev.edgespec.*
import java.io.File
import java.nio.*
import java.util.Random

/* Passes of stock operators by ONNX Runtime, for the library's loop.  No class of another file names what ONNX Runtime has. */

private val ENVIRONMENT: OrtEnvironment by lazy {
    silenceOnnxRuntime()
    OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL).apply { setTelemetry(false) }
}
private const val HIDE = -1e30f // finite, so that a row that hides everything cannot become NaN
private const val ROUND = 64 // tokens by which caches grow
private const val PAIRS = "EDGESPEC_STOCK_PAIRS" // 1: lone rows go as pairs, 0: never
private val MAIN_GRAPHS = listOf("gated", "strict", "plain") // the first of them can run every method

private fun longs(values: LongArray, vararg shape: Long) = OnnxTensor.createTensor(ENVIRONMENT, LongBuffer.wrap(values), shape)
private fun number(value: Int, vararg shape: Long) = OnnxTensor.createTensor(ENVIRONMENT, IntBuffer.wrap(intArrayOf(value)), shape)

private fun open(count: Int): ByteBuffer = ByteBuffer.allocateDirect(count).apply { for (at in 0 until count) put(at, 1) }
private fun gate(on: Boolean, shape: LongArray): OnnxTensor =
    OnnxTensor.createTensor(ENVIRONMENT, if (on) open(shape.fold(1) { all, one -> all * one.toInt() }) else ByteBuffer.allocateDirect(shape.fold(1) { all, one -> all * one.toInt() }), shape, OnnxJavaType.BOOL)

/** A model's stock graph over its mapped weights; [part]: the model's, of the manifest. */
internal class StockGraph(folder: File, part: JsonObject, threads: Int) : AutoCloseable {
    private val graph = part["graphs"].asJsonObject.let { all ->
        all[MAIN_GRAPHS.firstOrNull(all::has) ?: throw BundleError("$folder: has no graph of stock operators", "export it with `--operators stock`")].asJsonObject
    }
    private fun flag(name: String) = graph[name]?.asBoolean == true
    private fun count(of: JsonObject, name: String, before: String) = (of[name] ?: of[before])?.takeUnless { it.isJsonNull }?.asInt ?: 0
    private val padded = flag("padded")
    val minRows = count(part, "min_rows", "least_rows")
    val most = part["facts"].asJsonObject["context"].asInt + count(part, "extra_rows", "headroom") // tokens of a cache
    val least = minOf(count(graph, "min_length", "least_length"), most) // tokens of attention
    val extra = if (padded) 1 else 0 // dummy rows of a pass in which attention may be left out
    val session: OrtSession
    val caches: Map<String, LongArray> // "LAYER.key" and "LAYER.value": [1, kv_heads, capacity, head_dim]
    val constants = LinkedHashMap<String, OnnxTensor>() // inputs that are the same in every pass
    var pairs = false
        private set

    init {
        if (part["origin"]?.asString.let { it != null && it != "edgespec" }) throw BundleError(
            "this model's graph was exported by ${part["origin"].asString}, which this runtime does not decode",
            "export a model of an architecture that edgespec emits itself",
        )
        val path = File(folder, graph["file"].asString)
        session = try {
            OrtSession.SessionOptions().use { options ->
                options.setIntraOpNumThreads(threads)
                options.setInterOpNumThreads(1)
                options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL) // errors come back as exceptions
                options.addConfigEntry("session.intra_op.allow_spinning", "0")
                ENVIRONMENT.createSession(path.absolutePath, options)
            }
        } catch (error: OrtException) {
            throw BundleError("$path: ONNX Runtime ${ENVIRONMENT.version} cannot load this graph: ${firstLine(error)}", cause = error)
        }
        val shapes = session.inputInfo.mapValues { (it.value.info as TensorInfo).shape }
        caches = shapes.filterKeys { it.startsWith("past_key_values.") }.mapKeys { it.key.removePrefix("past_key_values.") }
        for (name in listOf("gate_attn", "gate_mlp", "gate_embed", "gate_lm")) shapes[name]?.let { constants[name] = gate(true, it) }
        shapes["gate_heads"]?.let { constants["gate_heads"] = gate(false, it) }
        shapes["hidden_in"]?.let { constants["hidden_in"] = OnnxTensor.createTensor(ENVIRONMENT, FloatBuffer.allocate(it.last().toInt()), longArrayOf(1, 1, it.last())) }
        val forced = System.getenv(PAIRS)
        if (padded && forced != "0") pairs = forced == "1" || loneRowDiffers(part["facts"].asJsonObject["vocab"].asInt)
    }

    /**
     * Whether a lone row has other bits than one among others: ONNX Runtime multiplies one row by a 4-bit matrix with another kernel, which on
     * some processors (x86 without AVX-512) rounds otherwise.  There a lone row goes as two equal ones.
     */
    private fun loneRowDiffers(vocab: Int): Boolean {
        val random = Random(7)
        val text = IntArray(2) { random.nextInt(vocab) }
        return StockModel(this).use { model ->
            fun rows(tokens: IntArray): ByteBuffer {
                val columns = (session.outputInfo.getValue("logits").info as TensorInfo).shape.last().takeIf { it > 0 }?.toInt() ?: vocab
                val logits = ByteBuffer.allocateDirect(4 * columns * tokens.size)
                model.pass(tokens, tokens.indices.toList().toIntArray(), null, 0, null, tokens.size, logits)
                return logits.duplicate().apply { limit(4 * columns) }
            }
            listOf(text, text.reversedArray()).any { rows(intArrayOf(it[0])) != rows(it) }
        }
    }

    /** Rows of a pass or an LM head for [n]. */
    fun fed(n: Int) = if (n == 1 && pairs) 2 else n

    override fun close() {
        constants.values.forEach { it.close() }
        session.close()
    }
}

/** A cache over a stock graph: keys and values are written in place, where attention's past and present are the same memory. */
internal class StockModel(private val graph: StockGraph) : HostModel {
    private class Kv(val memory: ByteBuffer, val tensor: OnnxTensor, val heads: Int, val row: Int) // row: bytes of a token's head

    private var cache = emptyMap<String, Kv>()
    private var capacity = 0

    override val bytes: Long get() = cache.values.sumOf { it.memory.capacity().toLong() }

    override fun run(
        tokens: IntArray, positions: IntArray, parents: IntArray?, kept: Int, moves: IntArray?, scored: Int, logits: ByteBuffer?,
    ): ByteArray? = try {
        pass(tokens, positions, parents, kept, moves, scored, logits)
        null
    } catch (error: Throwable) { // an error of ONNX Runtime, or of the memory
        firstLine(error).toByteArray(Charsets.UTF_8)
    }

    internal fun pass(tokens: IntArray, positions: IntArray, parents: IntArray?, kept: Int, moves: IntArray?, scored: Int, logits: ByteBuffer?) {
        if (moves != null) for (at in moves.indices step 2) move(moves[at], moves[at + 1])
        val (n, width) = tokens.size to graph.fed(tokens.size)
        val count = maxOf(width + graph.extra, graph.least - kept) // rows of attention, some of which are dummies
        reserve(kept + count)
        val seen = if (parents == null && scored > 0) capacity else kept + count
        val first = if (scored == 0) 0 else n - scored
        val wanted = if (scored == 0) graph.minRows else scored
        val reached = graph.fed(wanted)
        val tail = if (parents == null) 1 else 0 // dummy rows of a chain follow it, those of a tree are alone
        val inputs = linkedMapOf<String, OnnxTensor>(
            "input_ids" to longs(LongArray(width) { tokens[minOf(it, n - 1)].toLong() }, 1, width.toLong()),
            "position_ids" to longs(
                LongArray(count) { if (it < n) positions[it].toLong() else kept + tail * it.toLong() }, 1, count.toLong(),
            ),
            "seqlens_k" to number(kept + count - 1, 1), "total" to number(seen),
            "rows" to longs(LongArray(reached) { first + minOf(it, wanted - 1).toLong() }, reached.toLong()),
            "bias" to OnnxTensor.createTensor(ENVIRONMENT, bias(parents, kept, count, seen), longArrayOf(1, 1, count.toLong(), seen.toLong())),
        )
        val columns = if (scored > 0) logits!!.capacity() / 4 / scored else columns()
        val direct = scored > 0 && reached == scored
        val room = (if (direct) logits!! else ByteBuffer.allocateDirect(4 * reached * columns)).order(ByteOrder.nativeOrder())
        val output = OnnxTensor.createTensor(ENVIRONMENT, room.asFloatBuffer(), longArrayOf(1, reached.toLong(), columns.toLong()))
        try {
            val known = graph.session.inputNames
            val given: Map<String, OnnxTensorLike> = inputs.filterKeys { it in known } + graph.constants + cache.mapKeys { "past_key_values.${it.key}" }.mapValues { it.value.tensor }
            val written: Map<String, OnnxValue> = mapOf("logits" to output) + cache.mapKeys { "present.${it.key}" }.mapValues { it.value.tensor }
            graph.session.run(given, emptySet(), written, null).close() // what is bound is not the result's to close
        } finally {
            inputs.values.forEach { it.close() }
            output.close()
        }
        if (scored > 0 && !direct) logits!!.duplicate().put(room.duplicate().limit(logits.capacity()))
    }

    private fun columns() = (graph.session.outputInfo.getValue("logits").info as TensorInfo).shape.last().toInt()

    /** [count, seen]: what rows attend to; the operator hides what comes after a row itself. */
    private fun bias(parents: IntArray?, kept: Int, count: Int, seen: Int): FloatBuffer {
        val found = FloatArray(count * seen)
        if (parents == null) return FloatBuffer.wrap(found)
        found.fill(HIDE)
        for (row in 0 until count) {
            val parent = parents.getOrElse(row) { -1 }
            if (parent >= 0) found.copyInto(found, row * seen, parent * seen, (parent + 1) * seen) else found.fill(0f, row * seen, row * seen + kept)
            found[row * seen + kept + row] = 0f
        }
        return FloatBuffer.wrap(found)
    }

    private fun move(from: Int, to: Int) { // keys carry positions by depth, so they move without a new rotation
        for (kv in cache.values) for (head in 0 until kv.heads) copy(kv, kv, head, from, to, 1, capacity)
    }

    private fun copy(source: Kv, target: Kv, head: Int, from: Int, to: Int, count: Int, before: Int) {
        val part = source.memory.duplicate().apply { limit((head * before + from + count) * source.row).position((head * before + from) * source.row) }
        target.memory.duplicate().apply { position((head * capacity + to) * target.row) }.put(part)
    }

    private fun reserve(tokens: Int) {
        if (tokens <= capacity) return
        if (tokens > graph.most) throw EdgespecError("a pass to place $tokens: the cache has ${graph.most}")
        val before = capacity
        capacity = minOf(graph.most, maxOf((tokens + ROUND - 1) / ROUND * ROUND, before * 3 / 2))
        val old = cache
        cache = graph.caches.mapValues { (name, shape) ->
            val (heads, width) = shape[1].toInt() to shape[3].toInt()
            val size = 4L * heads * capacity * width
            if (size > Int.MAX_VALUE - 64) throw EdgespecError("a buffer of $size bytes: expected less than 2 GiB", "use a smaller context")
            val memory = ByteBuffer.allocateDirect(size.toInt()).order(ByteOrder.nativeOrder())
            val tensor = OnnxTensor.createTensor(ENVIRONMENT, memory.asFloatBuffer(), longArrayOf(1, heads.toLong(), capacity.toLong(), width.toLong()))
            Kv(memory, tensor, heads, 4 * width).also { fresh -> old[name]?.let { for (head in 0 until heads) copy(it, fresh, head, 0, 0, before, before) } }
        }
        old.values.forEach { it.tensor.close() }
    }

    override fun close() {
        cache.values.forEach { it.tensor.close() }
        cache = emptyMap()
        capacity = 0
    }
}

/* Nothing leaves the device. */

private const val ONNX_RUNTIME = "ORT_DISABLE_TELEMETRY"

/**
 * Keep ONNX Runtime from reporting its use. 1.29 and later begin when the environment is made, unless this variable is set before; later
 * calls stop only some of it. Java cannot set a variable of its process, so the system does.
 */
internal fun silenceOnnxRuntime() {
    // Windows' builds hand events to the system, which OrtEnvironment.setTelemetry stops
    if (System.getenv(ONNX_RUNTIME) !in listOf(null, "", "0", "false") || System.getProperty("os.name").startsWith("Windows")) return
    try {
        val android = runCatching { Class.forName("android.system.Os") }.getOrNull()
        if (android != null) {
            val text = String::class.java
            android.getMethod("setenv", text, text, Boolean::class.javaPrimitiveType).invoke(null, ONNX_RUNTIME, "1", true)
        } else {
            check(NativeLibrary.getProcess().getFunction("setenv").invokeInt(arrayOf<Any>(ONNX_RUNTIME, "1", 1)) == 0) { "setenv failed" }
        }
    } catch (problem: Throwable) { // an error of linking where JNA was left out
        val what = "ONNX Runtime's telemetry cannot be switched off here: ${firstLine(problem)}"
        throw EdgespecError(what, "start with $ONNX_RUNTIME=1 in the environment", problem)
    }
}
