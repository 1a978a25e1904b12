package dev.edgespec.runtimes

import ai.onnxruntime.OnnxJavaType
import dev.edgespec.BundleError
import dev.edgespec.decoding.Matrix
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Stock or native operators, and why. */
class OperatorChoice(val kind: String, val reason: String) {
    /** The graph that can run every method, strict if asked for; native rows always have the same bits. */
    fun graph(part: ModelPart, strict: Boolean): String {
        if (kind == "native" && "native" in part.graphs) return "native"
        return if (strict || part.main == "gated") part.main else "plain"
    }
}

/** Native operators where their [library] is there and the bundle's weights are theirs, else stock ones. */
fun chooseOperators(wanted: String, part: ModelPart, library: File?): OperatorChoice {
    if (part.origin == "optimum") {
        throw BundleError(
            "this model's graph was exported by optimum, which this runtime does not decode",
            "export a model of an architecture that edgespec emits itself",
        )
    }
    if (wanted !in listOf("auto", "stock", "native")) throw BundleError("operators '$wanted': expected auto, stock or native")
    val missing = when {
        "native" !in part.graphs -> "this bundle has no graph for native operators"
        library == null -> "no native operators: no library was given"
        !library.isFile -> "no native operators: $library does not exist"
        else -> null
    }
    if (wanted == "native" && missing != null) throw BundleError(missing, "give the library, or use stock operators")
    val kind = if (wanted == "stock" || missing != null || (wanted == "auto" && part.layout != "native")) "stock" else "native"
    // the Python side converts weights into the other layout; a phone should not need the disk for both
    if (kind != part.layout) {
        throw BundleError(
            "the bundle has no weights for $kind operators${missing?.let { ", and $it" } ?: ""}",
            "export it with `--operators $kind`",
        )
    }
    val why = if (wanted != "auto") "asked for" else if (kind == "native") "native operators" else "the bundle was exported for stock operators"
    return OperatorChoice(kind, why)
}

/** A loaded graph: its session, and the buffers that all KV slots over it share.  One pass at a time. */
class Model(
    val folder: File,
    val part: ModelPart,
    graph: String,
    val threads: Int,
    library: File?,
    kv: KvFormat? = null,
) : AutoCloseable {
    val facts: ModelFacts = part.facts
    val graph: Graph = part.graphs[graph] ?: throw BundleError("$folder: has no graph '$graph'", "export the bundle again")
    val native: Boolean = this.graph.operators == "native"
    val kv: KvFormat = kv ?: ATTENTION.getValue(exactAttention(part))
    internal val session = makeSession(File(folder, this.graph.file), threads, library.takeIf { native })
    internal val keyTables: Bound
    private val held = HashMap<String, Held>()
    private val rows = HashMap<Int, FloatArray>()

    /** int32 [size]: the tokens that the columns of a cut LM head mean; null = there is none. */
    val headTokens: IntArray? = part.headVocab?.let { vocab ->
        val bytes = File(folder, vocab.file).readBytes()
        if (bytes.size != 4 * vocab.size) throw BundleError("${File(folder, vocab.file)}: expected ${4 * vocab.size} bytes, got ${bytes.size}", "export the bundle again")
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

    /** A growing buffer, and views of it by shape. */
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

    /** Bytes of the shared buffers. */
    val bufferBytes: Long get() = held.values.sumOf { it.memory.capacity().toLong() }

    override fun close() {
        held.values.forEach { it.replace(ByteBuffer.allocate(0)) }
        held.clear()
        session.close()
    }
}
