package dev.edgespec.runtimes

import com.sun.jna.NativeLibrary
import dev.edgespec.EdgespecError
import dev.edgespec.firstLine

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
