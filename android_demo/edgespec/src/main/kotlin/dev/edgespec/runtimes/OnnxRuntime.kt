package dev.edgespec.runtimes

import ai.onnxruntime.*
import com.sun.jna.NativeLibrary
import dev.edgespec.*
import java.io.File
import java.nio.ByteBuffer

/* ONNX Runtime: sessions made the same way everywhere.  Only stock graphs need it, and no class of another file names what it has. */

private val ENVIRONMENT: OrtEnvironment by lazy {
    silenceOnnxRuntime()
    OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL).apply { setTelemetry(false) }
}

internal fun onnxRuntimeVersion(): String = ENVIRONMENT.version

private val Bound.tensor: OnnxTensor get() = seen { tensorOf(bytes, type, shape) } as OnnxTensor

private fun tensorOf(bytes: ByteBuffer, type: Dtype, shape: IntArray): OnnxTensor {
    val dims = LongArray(shape.size) { shape[it].toLong() }
    return when (type) {
        Dtype.FLOAT -> OnnxTensor.createTensor(ENVIRONMENT, bytes.asFloatBuffer(), dims)
        Dtype.INT64 -> OnnxTensor.createTensor(ENVIRONMENT, bytes.asLongBuffer(), dims)
        Dtype.INT32 -> OnnxTensor.createTensor(ENVIRONMENT, bytes.asIntBuffer(), dims)
        Dtype.UINT8 -> OnnxTensor.createTensor(ENVIRONMENT, bytes.duplicate(), dims, OnnxJavaType.UINT8)
        Dtype.BOOL -> OnnxTensor.createTensor(ENVIRONMENT, bytes.duplicate(), dims, OnnxJavaType.BOOL)
    }
}

/** Inputs of stock graphs by the names that they had up to schema 2 of bundles, and what they are called since. */
private val BEFORE = mapOf("ids" to "input_ids", "pos" to "position_ids")

private class Session(private val session: OrtSession) : Runner {
    override val givenSize = (session.inputInfo["hidden_in"]?.info as? TensorInfo)?.shape?.last()?.toInt() ?: 0

    override fun binding() = object : Binding {
        private val inputs = LinkedHashMap<String, OnnxTensorLike>()
        private val outputs = LinkedHashMap<String, OnnxValue>()
        private val names = session.inputNames.associateBy { BEFORE[it] ?: it } // that of today -> the graph's

        override fun input(name: String, bound: Bound) {
            inputs[names[name] ?: name] = bound.tensor
        }

        override fun output(name: String, bound: Bound?) {
            if (bound == null) outputs.remove(name) else outputs[name] = bound.tensor
        }

        override fun run() {
            try {
                session.run(inputs, emptySet(), outputs, null).close() // what is bound is not the result's to close
            } catch (error: OrtException) {
                val hint = "the bundle may be damaged: check it with `edgespec verify`"
                throw EdgespecError("a pass failed in ONNX Runtime: ${firstLine(error)}", hint, error)
            }
        }
    }

    override fun close() = session.close()
}

/** Open a graph for the CPU, its weights mapped; threads never spin; [library]: of native operators, if it uses them. */
internal fun makeSession(path: File, threads: Int, library: File?): Runner {
    val environment = ENVIRONMENT // before anything else of ONNX Runtime, which reads once whether it may report its use
    try {
        OrtSession.SessionOptions().use { options ->
            options.setIntraOpNumThreads(threads)
            options.setInterOpNumThreads(1)
            options.setSessionLogLevel(OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL) // errors come back as exceptions
            options.addConfigEntry("session.intra_op.allow_spinning", "0")
            if (library != null) options.registerCustomOpLibrary(if (byName(library)) library.name else library.absolutePath)
            return Session(environment.createSession(path.absolutePath, options))
        }
    } catch (error: OrtException) {
        throw BundleError("$path: ONNX Runtime ${environment.version} cannot load this graph: ${firstLine(error)}", cause = error)
    }
}

/* Nothing leaves the device (of the tokenizers' library: TextCodec). */

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
