package dev.edgespec.runtimes

import dev.edgespec.*
import dev.edgespec.decoding.Matrix
import java.io.File
import java.nio.*

/* Graphs that run, memory that they read and write in place, and the choice of operators. */

/** Type of an array's numbers; [size]: bytes of one. */
enum class Dtype(val size: Int) { FLOAT(4), INT64(8), INT32(4), UINT8(1), BOOL(1) }

/** Memory outside of the Java heap as an array (zero copy): a graph reads the written numbers in place. */
internal class Bound private constructor(val memory: ByteBuffer, val type: Dtype, val shape: IntArray) : AutoCloseable {
    val bytes: ByteBuffer = memory.duplicate().also { it.position(0).limit(size(type, shape).toInt()) }.slice().order(ByteOrder.nativeOrder())
    val longs: LongBuffer by lazy { bytes.asLongBuffer() }
    val ints: IntBuffer by lazy { bytes.asIntBuffer() }
    val floats: FloatBuffer by lazy { bytes.asFloatBuffer() }
    private var seen: AutoCloseable? = null

    /** Another library's view of it, made at the first request, and closed with it. */
    fun seen(make: () -> AutoCloseable): AutoCloseable = seen ?: make().also { seen = it }

    override fun close() {
        seen?.close()
        seen = null
    }

    companion object {
        fun memory(size: Long): ByteBuffer {
            if (size > Int.MAX_VALUE - 64) throw EdgespecError("a buffer of $size bytes: expected less than 2 GiB", "use a smaller context")
            return ByteBuffer.allocateDirect(size.toInt()).order(ByteOrder.nativeOrder())
        }

        fun size(type: Dtype, shape: IntArray): Long = shape.fold(type.size.toLong()) { all, one -> all * one }
        fun over(memory: ByteBuffer, type: Dtype, vararg shape: Int) = Bound(memory, type, shape)
        fun of(type: Dtype, vararg shape: Int) = Bound(memory(size(type, shape)), type, shape)
    }
}

/** A graph that is ready to run: by ONNX Runtime, or one of native operators by only their library. */
internal interface Runner : AutoCloseable {
    /** Columns of what a pass may begin with. */
    val givenSize: Int

    /** Limit the threads of later passes, if that can be changed after opening. */
    fun limit(threads: Int) = Unit

    fun binding(): Binding
}

/** Inputs and outputs of a graph by name, kept from pass to pass; outputs are written where they are bound. */
internal interface Binding {
    fun input(name: String, bound: Bound)

    fun output(name: String, bound: Bound?)

    fun run()
}

private const val LARGE = 0.5 // of the largest core's capacity: a pass ends with its slowest thread

/** More than these machines have cores; ONNX Runtime would start any number. */
const val MOST_THREADS = 512

/**
 * Default threads of a session: the large cores of a phone, at most four, by the capacity that Linux has measured of each (`cpu_capacity`,
 * 1024 = the largest), else by its highest frequency; all cores if neither is known.
 */
fun defaultThreads(cores: File = File("/sys/devices/system/cpu"), processors: Int = Runtime.getRuntime().availableProcessors()): Int {
    fun told(name: String) = (0 until processors).mapNotNull { at ->
        runCatching { File(cores, "cpu$at/$name").readText().trim().toDouble() }.getOrNull()
    }
    val known = listOf("cpu_capacity", "cpufreq/cpuinfo_max_freq").map(::told).firstOrNull { it.size == processors } ?: emptyList()
    val large = known.count { it >= LARGE * known.max() }
    return (if (large > 1) large else processors).coerceIn(1, 4)
}

/** Whether the system finds the library, by its name: apps need not have theirs unpacked, and then there is no such file. */
internal fun byName(library: File): Boolean = library.parent == null && !library.isFile

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

/** Lines of a file of the system's; none where it is not Linux, or forbidden. */
internal fun linesOf(file: String): List<String> = runCatching { File(file).readLines() }.getOrDefault(emptyList())

/** Identifies this build of a library by its hash; for one inside an app's archive, by the archive and its time. */
internal fun identityOf(library: File): String {
    if (!byName(library)) return sha256(library)
    val mapped = linesOf("/proc/self/maps").filter { '/' in it }.map { File(it.substring(it.indexOf('/'))) }.distinct()
    mapped.firstOrNull { it.name == library.name && it.isFile }?.let { return sha256(it) }
    return mapped.filter { it.extension == "apk" }.joinToString { "$it ${it.length()} ${it.lastModified()}" }
}

class OperatorChoice(val kind: String) {
    /** The graph that can run every method, strict if asked for; native rows always have the same bits. */
    fun graph(part: ModelPart, strict: Boolean): String {
        if (kind == "native" && "native" in part.graphs) return "native"
        return if (strict || part.main == "gated") part.main else "plain"
    }
}

/** Native operators where their [library] is there and the bundle's weights are theirs, else stock ones. */
fun chooseOperators(wanted: String, part: ModelPart, library: File?): OperatorChoice {
    if (part.origin != "edgespec") throw BundleError(
        "this model's graph was exported by ${part.origin}, which this runtime does not decode",
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
    return OperatorChoice(kind)
}

/** Finds the row of a picture that a token names, [hidden] numbers of an array from a place on. */
internal fun interface RowsOfPictures {
    fun find(token: Int): Pair<FloatArray, Int>
}

/**
 * A loaded graph, and the buffers that all KV slots over it share.  One pass at a time. [onOnnxRuntime]: native operators run in ONNX
 * Runtime, and not only in their library.
 */
class Model(
    val folder: File, val part: ModelPart, graph: String, val threads: Int, library: File?, kv: KvFormat? = null,
    onOnnxRuntime: Boolean = false,
) : AutoCloseable {
    val facts: ModelFacts = part.facts
    val graph: Graph = part.graphs[graph] ?: throw BundleError("$folder: has no graph '$graph'", "export the bundle again")
    val native: Boolean = this.graph.operators == "native"
    val kv: KvFormat = kv ?: ATTENTION.getValue(exactAttention(part))
    internal val runner: Runner = File(folder, this.graph.file).let { path ->
        if (native && library != null && !onOnnxRuntime) LibraryGraph(path, threads, library) else makeSession(path, threads, library.takeIf { native })
    }
    internal val keyTables: Bound
    internal var inserted: RowsOfPictures? = null // where rows of pictures are found; null = it sees [instead] in their place
    internal var instead = 0
    internal var pairs: Boolean? = null // of stock graphs in strict mode: whether a lone row goes as a pair; null = not known yet
    /** Columns of what a pass may begin with. */
    val givenSize: Int get() = runner.givenSize
    private val held = HashMap<String, Bound>()
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
        keyTables = Bound.of(Dtype.FLOAT, tables.size)
        keyTables.floats.put(tables)
    }

    /** A view of the growing buffer [name]; all shapes share its memory.  New memory is zero. */
    internal fun buffer(name: String, type: Dtype, vararg shape: Int): Bound {
        val last = held[name]
        if (last != null && last.shape.contentEquals(shape)) return last
        val memory = last?.memory?.takeIf { it.capacity() >= Bound.size(type, shape) } ?: return Bound.of(type, *shape).also { replace(name, it) }
        return Bound.over(memory, type, *shape).also { replace(name, it) }
    }

    /** The same of two dimensions, without garbage where the shape is that of the last time: so it is from token to token. */
    internal fun buffer(name: String, type: Dtype, rows: Int, columns: Int): Bound =
        held[name]?.takeIf { it.shape.size == 2 && it.shape[0] == rows && it.shape[1] == columns } ?: buffer(name, type, *intArrayOf(rows, columns))

    /** Let an input be whole numbers, in order. */
    internal inline fun give(io: Binding, name: String, vararg shape: Int, number: (Int) -> Int) {
        val bound = buffer(name, Dtype.INT64, *shape)
        for (at in 0 until bound.longs.capacity()) bound.longs.put(at, number(at).toLong())
        io.input(name, bound)
    }

    private fun replace(name: String, bound: Bound) = held.put(name, bound)?.close()

    /** Rows of [columns] numbers from [first] on, with stride [stride]. */
    internal fun matrix(bound: Bound, rows: Int, columns: Int, stride: Int = columns, first: Int = 0): Matrix {
        val data = if (first == 0) bound.floats else bound.floats.duplicate().also { it.position(first) }.slice()
        return Matrix(rows, columns, data, this.rows.getOrPut(columns) { FloatArray(columns) }, stride)
    }

    override fun close() {
        held.values.forEach { it.close() }
        held.clear()
        runner.close()
    }
}
