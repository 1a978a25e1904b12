package dev.edgespec.engine

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.NONE
import dev.edgespec.drafters.hex
import dev.edgespec.runtimes.*
import java.nio.ByteBuffer
import java.security.MessageDigest

/* Input of encoder-decoders: sources, and cross-attention caches. */

private const val TIMED = 64 // rows of a substitute cross-attention cache for timing passes

/**
 * The encoder's input for one request, token ids or [rows] of features [count * columns], and the tokens that its decoder's text [begin]s
 * with, at least one.
 */
class Source private constructor(
    val tokens: IntArray, val rows: FloatArray?, val count: Int, val begin: IntArray, internal val digest: String,
) {
    /** The same source, for another text. */
    fun beginning(begin: IntArray) = Source(tokens, rows, count, begin, digest)

    companion object {
        fun of(tokens: IntArray, begin: IntArray) =
            Source(tokens, null, tokens.size, begin, digest(tokens.size) { it.asIntBuffer().put(tokens) })

        fun of(rows: FloatArray, columns: Int, begin: IntArray) =
            Source(NONE, rows, rows.size / columns, begin, digest(rows.size) { it.asFloatBuffer().put(rows) })

        private fun digest(numbers: Int, put: (ByteBuffer) -> Unit): String {
            val bytes = ByteArray(4 * numbers)
            put(ByteBuffer.wrap(bytes))
            return hex(MessageDigest.getInstance("SHA-256").digest(bytes))
        }
    }
}

internal typealias Opener = (ModelPart, KvFormat) -> Model

/** An encoder, ready to run. */
internal fun encoderSlot(part: ModelPart, open: Opener) = NativeSlot(open(part, encoderKeys(part)), null, 0, encodes = true)

internal fun closeEncoders(encoders: MutableMap<*, NativeSlot>) {
    encoders.values.forEach {
        it.close()
        it.model.close()
    }
    encoders.clear()
}

/** Encoders of a bundle, opened by [open] as they are needed, and the memories of its decoders: the last of each is kept. */
internal class Encoding(private val bundle: Bundle, private val open: Opener) {
    private val encoders = HashMap<String, NativeSlot>() // by the model that attends over their output
    private val encoded = HashMap<String, Pair<String, FloatArray>>() // last output of each, by digest of its source
    private val memories = HashMap<String, Memory>()

    /** Reject input that no encoder of this bundle reads. */
    fun check(source: Source) {
        val part = bundle.manifest.target
        val wanted = part.source!!
        val features = source.rows != null
        if (features && wanted.kind == "text") throw InvalidRequest("got features, but this model reads a text or token ids")
        if (!features && wanted.kind != "text") throw InvalidRequest("got a text, but this model reads rows of features", "use transcribe")
        if (source.count !in 1..wanted.most) throw InvalidRequest(
            "a source of ${source.count} ${if (features) "rows" else "tokens"}: expected 1 to ${wanted.most}", "cut it into parts",
        )
        val vocab = (part.encoder ?: part).facts.vocab
        if (source.tokens.any { it !in 0 until vocab }) {
            throw InvalidRequest("the source has a token outside the vocabulary of $vocab", "check the tokenizer")
        }
    }

    /** Let a slot of the model [name] attend over a source; null = over nothing in particular, as where passes are timed. */
    fun attend(name: String, slot: Slot, source: Source?) {
        if (slot !is NativeSlot || !slot.attends) return
        if (source == null) return slot.attend(Memory("", minOf(TIMED, slot.model.part.source!!.most), slot.model.part, slot.model.kv))
        slot.attend(memories[name]?.takeIf { it.digest == source.digest } ?: fill(name, slot, source))
    }

    private fun fill(name: String, slot: NativeSlot, source: Source) = slot.fill(source.digest, rows(name, source), source.count).also {
        it.users++
        memories.put(name, it)?.let { before -> before.users-- }
    }

    /** Output of a model's encoder, reused for the same source: [S * width]. */
    private fun rows(name: String, source: Source): FloatArray {
        if (bundle.part(name).source?.sharesEncoder == true) return rows("target", source)
        encoded[name]?.let { (digest, rows) -> if (digest == source.digest) return rows }
        val encoder = encoders.getOrPut(name) { encoderSlot(bundle.part(name).encoder!!, open) }
        val tokens = if (source.rows == null) source.tokens else IntArray(source.count)
        return encoder.encode(tokens, source.rows).also { encoded[name] = source.digest to it }
    }

    /** Bytes of kept cross-attention caches, and of encoders' buffers. */
    val nbytes: Long get() = memories.values.sumOf { it.nbytes } + encoders.values.sumOf { it.kvBytes }

    /** Forget all; [encoders]: these too. */
    fun clear() {
        memories.values.forEach { it.users-- }
        memories.clear()
        encoded.clear()
        closeEncoders(encoders)
    }
}
