package dev.edgespec.planning

import com.google.gson.JsonObject
import dev.edgespec.Edgespec
import dev.edgespec.runtimes.*
import java.io.File

/* Description of a device, and the bytes that a pass over a bundle reads there, with the names and counts of the Python side. */

private val FLAGS = listOf("avx2", "avx_vnni", "avx512f", "avx512_vnni", "asimddp", "i8mm", "sve") // what kernels differ by

/** A device, named by [model], where its system does not say more; [memory]: bytes, 0 = as the system says. */
class Machine(private val model: String = "", private val memory: Long = 0) {
    /** With [native] operators of a [library], or stock ones. */
    internal fun facts(native: Boolean, library: File?): Map<String, Any> = linkedMapOf(
        "processor" to processor(), "cores" to Runtime.getRuntime().availableProcessors(),
        "memory" to if (memory > 0) memory else kilobytes("/proc/meminfo", "MemTotal"),
        "onnxruntime" to if (native) "" else onnxRuntimeVersion(), "edgespec" to Edgespec.VERSION,
        "isa" to if (native) nativeIsa() else "", "library" to (library?.takeIf { native && it.isFile }?.let { sha256(it).take(16) } ?: ""),
    )

    private fun processor(): String {
        val machine = System.getProperty("os.arch").let { if (it == "amd64") "x86_64" else it }
        val lines = linesOf("/proc/cpuinfo").map { line -> line.split(":", limit = 2).map { it.trim() } }.filter { it.size == 2 }
        fun told(vararg names: String) = lines.firstOrNull { it[0] in names }?.get(1) ?: ""
        val flags = told("flags", "Features").split(" ")
        return (listOf(machine, model.ifEmpty { told("model name", "Hardware") }) + FLAGS.filter { it in flags }).filter { it.isNotEmpty() }.joinToString(" ")
    }

    companion object {
        /** Resident bytes of this process now; 0 = the system does not say. */
        fun resident(): Long = kilobytes("/proc/self/status", "VmRSS")

        private fun kilobytes(file: String, name: String): Long =
            linesOf(file).firstOrNull { it.startsWith("$name:") }?.filter { it.isDigit() }?.toLongOrNull()?.times(1024) ?: 0
    }
}

/** Bytes of keys and values of one token; stock operators keep float32. */
internal fun kvTokenBytes(part: ModelPart, attention: AttentionChoice): Long = part.facts.let { facts ->
    attention.kv?.let { it.blockBytes(facts) / KV_BLOCK } ?: (8L * facts.kvHeads * facts.dims.sum())
}

/** Bytes of weights that a one-row pass reads: only the chosen experts, and only rows of an untied embedding; [part]: of a manifest. */
internal fun readBytes(part: JsonObject, native: Boolean): Long {
    val facts = part["facts"].asJsonObject
    fun fact(name: String) = facts[name]?.asLong ?: 0
    val (hidden, vocab, layers) = listOf("hidden", "vocab", "layers").map(::fact)
    fun size(form: String) = SPECS.getValue(form).let { if (native) it.read else it.level + it.scale + if (it.family == "channels") 4.0 / LARGE else 0.0 }
    val form = part["format"].asString
    val fine = part["int8_fraction"]?.asDouble ?: 0.0
    val kept = part["bytes_per_weight"]?.asJsonObject
    val layer = kept?.get("layers")?.asDouble ?: ((1 - fine) * size(form) + fine * if (fine > 0) size("int8") else 0.0)
    val outside = vocab * (hidden * (if (facts["tied"]?.asBoolean == true) 1 else 2) + layers * fact("layer_embedding"))
    val attention = hidden * fact("head_dim") * (2 * fact("heads") + 2 * fact("kv_heads"))
    val all = fact("parameters").let { if (it > outside) it - outside else layers * (attention + 3 * hidden * fact("intermediate")) }
    val idle = facts["experts"]?.asJsonObject?.let {
        3 * hidden * it["inner"].asLong * it["layers"].asJsonArray.size() * (it["count"].asLong - it["chosen"].asLong)
    } ?: 0
    val head = part["head_vocab"]?.asJsonObject?.takeIf { part["cut"]?.asBoolean == true }?.get("size")?.asLong ?: vocab
    val last = kept?.get("head")?.asDouble ?: size(part["head_format"]?.asString ?: form)
    return Math.rint((all - idle) * layer + head * hidden * last).toLong()
}

private const val LARGE = 4096 // columns of a matrix whose scales of a row do not count
