package dev.edgespec.runtimes

import ai.onnxruntime.*
import com.sun.jna.NativeLibrary
import dev.edgespec.*
import dev.edgespec.decoding.Matrix
import java.io.File
import java.nio.*

/* ONNX Runtime: sessions made the same way everywhere, and memory that a session reads and writes where it lies. */

internal val ENVIRONMENT: OrtEnvironment by lazy {
    silenceOnnxRuntime()
    OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL).apply { setTelemetry(false) }
}

/** Memory outside of the Java heap and the tensor over it (zero copy): write one, the session reads the other. */
internal class Bound private constructor(val tensor: OnnxTensor, val bytes: ByteBuffer) : AutoCloseable {
    val longs: LongBuffer by lazy { bytes.asLongBuffer() }
    val ints: IntBuffer by lazy { bytes.asIntBuffer() }
    val floats: FloatBuffer by lazy { bytes.asFloatBuffer() }

    override fun close() = tensor.close()

    companion object {
        fun memory(size: Long): ByteBuffer {
            if (size > Int.MAX_VALUE - 64) throw EdgespecError("a buffer of $size bytes: expected less than 2 GiB", "use a smaller context")
            return ByteBuffer.allocateDirect(size.toInt()).order(ByteOrder.nativeOrder())
        }

        fun over(memory: ByteBuffer, type: OnnxJavaType, vararg shape: Int): Bound {
            val count = shape.fold(1L) { all, one -> all * one }
            val whole = memory.duplicate()
            whole.position(0)
            whole.limit((count * type.size).toInt())
            val bytes = whole.slice().order(ByteOrder.nativeOrder())
            val dims = LongArray(shape.size) { shape[it].toLong() }
            val tensor = when (type) {
                OnnxJavaType.FLOAT -> OnnxTensor.createTensor(ENVIRONMENT, bytes.asFloatBuffer(), dims)
                OnnxJavaType.INT64 -> OnnxTensor.createTensor(ENVIRONMENT, bytes.asLongBuffer(), dims)
                OnnxJavaType.INT32 -> OnnxTensor.createTensor(ENVIRONMENT, bytes.asIntBuffer(), dims)
                else -> OnnxTensor.createTensor(ENVIRONMENT, bytes.duplicate(), dims, type)
            }
            return Bound(tensor, bytes)
        }

        fun of(type: OnnxJavaType, vararg shape: Int): Bound =
            over(memory(shape.fold(1L) { all, one -> all * one } * type.size), type, *shape)
    }
}

/** Inputs of stock graphs by the names that they had up to schema 2 of bundles, and what they are called since. */
private val BEFORE = mapOf("ids" to "input_ids", "pos" to "position_ids")

/** Inputs and outputs of a session by name, kept from pass to pass; outputs are written where they are bound. */
internal class Binding(private val session: OrtSession) {
    private val inputs = LinkedHashMap<String, OnnxTensorLike>()
    private val outputs = LinkedHashMap<String, OnnxValue>()
    private val names = session.inputNames.associateBy { BEFORE[it] ?: it } // that of today -> the graph's

    fun input(name: String, bound: Bound) {
        inputs[names[name] ?: name] = bound.tensor
    }

    fun output(name: String, bound: Bound?) {
        if (bound == null) outputs.remove(name) else outputs[name] = bound.tensor
    }

    fun run() {
        try {
            session.run(inputs, emptySet(), outputs, null).close() // what is bound is not the result's to close
        } catch (error: OrtException) {
            val hint = "the bundle may be damaged: check it with `edgespec verify`"
            throw EdgespecError("a pass failed in ONNX Runtime: ${firstLine(error)}", hint, error)
        }
    }
}

/** More than these machines have cores; ONNX Runtime would start as many as it is told. */
const val MOST_THREADS = 512

/** Threads a session gets when none are asked for: as many as there are, from two to four: the large cores of a phone. */
fun defaultThreads(): Int = Runtime.getRuntime().availableProcessors().coerceIn(1, 4)

/** Open a graph for the CPU, its weights mapped; threads never spin; [library]: of native operators, if it uses them. */
internal fun makeSession(path: File, threads: Int, library: File?): OrtSession {
    val environment = ENVIRONMENT // before anything else of ONNX Runtime, which reads once whether it may report its use
    try {
        OrtSession.SessionOptions().use { options ->
            options.setIntraOpNumThreads(threads)
            options.setInterOpNumThreads(1)
            options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL) // errors come back as exceptions
            options.addConfigEntry("session.intra_op.allow_spinning", "0")
            if (library != null) options.registerCustomOpLibrary(if (byName(library)) library.name else library.absolutePath)
            return environment.createSession(path.absolutePath, options)
        }
    } catch (error: OrtException) {
        throw BundleError("$path: ONNX Runtime ${environment.version} cannot load this graph: ${firstLine(error)}", cause = error)
    }
}

/* Nothing leaves the device (of the tokenizers' library: TextCodec). */

private const val ONNX_RUNTIME = "ORT_DISABLE_TELEMETRY"

/**
 * Keep ONNX Runtime from reporting its use. 1.29 and later begin when the environment is made, unless this variable is
 * set before; later calls stop only some of it. Java cannot set a variable of its own process, so the system does.
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

/** Whether the system finds the library, by its name: apps need not have theirs unpacked, and then there is no such file. */
private fun byName(library: File): Boolean = library.parent == null && !library.isFile

/** Why [library] cannot be used; null: it can.  A bare name, `libedgespec.so`, is one that the system finds. */
internal fun whyNot(library: File?): String? = when {
    library == null -> "no native operators: no library was given"
    byName(library) -> {
        val name = library.name.removePrefix("lib").substringBeforeLast('.')
        runCatching { System.loadLibrary(name) }.exceptionOrNull()?.let { "no native operators: ${firstLine(it)}" }
    }
    !library.isFile -> "no native operators: $library does not exist"
    else -> null
}

class OperatorChoice(val kind: String, val reason: String) {
    /** The graph that can run every method, strict if asked for; native rows always have the same bits. */
    fun graph(part: ModelPart, strict: Boolean): String {
        if (kind == "native" && "native" in part.graphs) return "native"
        return if (strict || part.main == "gated") part.main else "plain"
    }
}

/** Native operators where their [library] is there and the bundle's weights are theirs, else stock ones. */
fun chooseOperators(wanted: String, part: ModelPart, library: File?): OperatorChoice {
    if (part.origin == "optimum") throw BundleError(
        "this model's graph was exported by optimum, which this runtime does not decode",
        "export a model of an architecture that edgespec emits itself",
    )
    if (wanted !in listOf("auto", "stock", "native")) throw BundleError("operators '$wanted': expected auto, stock or native")
    val missing = if ("native" !in part.graphs) "this bundle has no graph for native operators" else whyNot(library)
    if (wanted == "native" && missing != null) throw BundleError(missing, "give the library, or use stock operators")
    val kind = if (wanted == "stock" || missing != null || (wanted == "auto" && part.layout != "native")) "stock" else "native"
    // the Python side converts weights into the other layout; a phone should not need the disk for both
    if (kind != part.layout) throw BundleError(
        "the bundle has no weights for $kind operators${missing?.let { ", and $it" } ?: ""}", "export it with `--operators $kind`",
    )
    val found = if (kind == "native") "native operators" else "the bundle was exported for stock operators"
    return OperatorChoice(kind, if (wanted != "auto") "asked for" else found)
}

/** A loaded graph: its session, and the buffers that all KV slots over it share.  One pass at a time. */
class Model(
    val folder: File, val part: ModelPart, graph: String, val threads: Int, library: File?, kv: KvFormat? = null,
) : AutoCloseable {
    val facts: ModelFacts = part.facts
    val graph: Graph = part.graphs[graph] ?: throw BundleError("$folder: has no graph '$graph'", "export the bundle again")
    val native: Boolean = this.graph.operators == "native"
    val kv: KvFormat = kv ?: ATTENTION.getValue(exactAttention(part))
    internal val session = makeSession(File(folder, this.graph.file), threads, library.takeIf { native })
    internal val keyTables: Bound
    /** Columns of what a pass may begin with. */
    val givenSize: Int = (session.inputInfo["hidden_in"]?.info as? TensorInfo)?.shape?.last()?.toInt() ?: 0
    private val held = HashMap<String, Held>()
    private val rows = HashMap<Int, FloatArray>()

    /** int32 [size]: the tokens that the columns of a cut LM head mean; null = there is none. */
    val headTokens: IntArray? = part.headVocab?.let { vocab ->
        val (file, size) = File(folder, vocab.file) to 4 * vocab.size
        val bytes = file.readBytes()
        if (bytes.size != size) throw BundleError("$file: expected $size bytes, got ${bytes.size}", "export the bundle again")
        val ids = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer()
        IntArray(vocab.size).also { ids.get(it) }
    }

    init {
        val tables = if (native) readTables(folder, part, this.kv) else FloatArray(0)
        keyTables = Bound.of(OnnxJavaType.FLOAT, tables.size)
        keyTables.floats.put(tables)
    }

    /** A view of the growing buffer [name]; the same memory whatever the shape.  New memory is zero. */
    internal fun buffer(name: String, type: OnnxJavaType, vararg shape: Int): Bound {
        val own = held.getOrPut(name) { Held() }
        return own.views.getOrPut(shape.asList()) {
            val size = shape.fold(type.size.toLong()) { all, one -> all * one }
            if (own.memory.capacity() < size) own.replace(Bound.memory(size))
            Bound.over(own.memory, type, *shape)
        }
    }

    /** The same of two dimensions, without garbage where the shape is that of the last time: so it is from token to token. */
    internal fun buffer(name: String, type: OnnxJavaType, rows: Int, columns: Int): Bound {
        val own = held.getOrPut(name) { Held() }
        val last = own.last
        if (last != null && own.rows == rows && own.columns == columns) return last
        return buffer(name, type, *intArrayOf(rows, columns)).also {
            own.rows = rows
            own.columns = columns
            own.last = it
        }
    }

    private class Held {
        var memory: ByteBuffer = ByteBuffer.allocate(0)
        val views = HashMap<List<Int>, Bound>()
        var rows = 0
        var columns = 0
        var last: Bound? = null // the view of [rows, columns]

        fun replace(memory: ByteBuffer) {
            this.memory = memory
            views.values.forEach { it.close() }
            views.clear()
            last = null
        }
    }

    /** Rows of [columns] numbers from [first] on, which begin [stride] apart. */
    internal fun matrix(bound: Bound, rows: Int, columns: Int, stride: Int = columns, first: Int = 0): Matrix {
        val data = if (first == 0) bound.floats else bound.floats.duplicate().also { it.position(first) }.slice()
        return Matrix(rows, columns, data, this.rows.getOrPut(columns) { FloatArray(columns) }, stride)
    }

    override fun close() {
        held.values.forEach { it.replace(ByteBuffer.allocate(0)) }
        held.clear()
        session.close()
    }
}
