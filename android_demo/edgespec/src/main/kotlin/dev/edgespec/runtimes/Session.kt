package dev.edgespec.runtimes

import ai.onnxruntime.*
import com.sun.jna.NativeLibrary
import dev.edgespec.BundleError
import dev.edgespec.EdgespecError
import dev.edgespec.firstLine
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

        /** A tensor over the beginning of [memory]. */
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
            throw EdgespecError("a pass failed in ONNX Runtime: ${firstLine(error)}", "the bundle may be damaged: check it with `edgespec verify`", error)
        }
    }
}

/** More than these machines have cores; ONNX Runtime would start as many as it is told. */
const val MOST_THREADS = 512

/** Threads a session gets when none are asked for: as many as there are, from two to four: the large cores of a phone. */
fun defaultThreads(): Int = Runtime.getRuntime().availableProcessors().coerceIn(1, 4)

/**
 * Open a graph for the CPU; external weights are memory-mapped by ONNX Runtime.  Thread pools never spin.  [library]: of
 * native operators, where the graph uses them.
 */
internal fun makeSession(path: File, threads: Int, library: File?): OrtSession {
    val environment = ENVIRONMENT // before anything else of ONNX Runtime, which reads once whether it may report its use
    try {
        OrtSession.SessionOptions().use { options ->
            options.setIntraOpNumThreads(threads)
            options.setInterOpNumThreads(1)
            options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL) // errors come back as exceptions
            options.addConfigEntry("session.intra_op.allow_spinning", "0")
            if (library != null) options.registerCustomOpLibrary(library.absolutePath)
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
            android.getMethod("setenv", String::class.java, String::class.java, Boolean::class.javaPrimitiveType).invoke(null, ONNX_RUNTIME, "1", true)
        } else {
            check(NativeLibrary.getProcess().getFunction("setenv").invokeInt(arrayOf<Any>(ONNX_RUNTIME, "1", 1)) == 0) { "setenv failed" }
        }
    } catch (problem: Throwable) { // an error of linking where JNA was left out
        throw EdgespecError("ONNX Runtime's telemetry cannot be switched off here: ${firstLine(problem)}", "start with $ONNX_RUNTIME=1 in the environment", problem)
    }
}
