package dev.edgespec.drafters

import dev.edgespec.StoreError
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.MappedByteBuffer
import java.nio.channels.FileChannel
import java.security.MessageDigest

/*
 * N-gram stores: what mostly followed one to four tokens in texts read earlier, in a file that is only mapped.  The
 * format is described in docs (and written) by the Python side.
 */

private const val STORE_VERSION = 1
private const val N_MAX = 4
private const val HEADER_BYTES = 256
private const val ENTRY_BYTES = 16
private const val SIGNED = HEADER_BYTES - 32
private const val MULTIPLIER = -0x61c8864680b583ebL
private const val BUILD_AGAIN = "build it again: edgespec ngram build"
private val MAGIC = "EDGENGRM".toByteArray(Charsets.US_ASCII)

/** What a store knows: the last [n] tokens were followed [seen] of [of] times by [token]. */
class Hit(val n: Int, val token: Int, val seen: Int, val of: Int)

/** An opened store: mapped, never changed, shared by all who use it; [check] compares the SHA-256 of all of it. */
class NGramStore(val path: File, check: Boolean = true) {
    val nMax = N_MAX
    val vocab: Int
    val vocabulary: String // SHA-256 of the tokenizer's vocabulary, hex digits
    private val entries: Int
    private val data: MappedByteBuffer

    init {
        val head = ByteArray(HEADER_BYTES)
        val size: Long
        try {
            path.inputStream().use { file ->
                var filled = 0
                while (filled < HEADER_BYTES) filled += file.read(head, filled, HEADER_BYTES - filled).also { if (it < 0) break }.coerceAtLeast(0)
                if (!head.copyOf(8).contentEquals(MAGIC)) throw StoreError("$path: not an n-gram store", "make one with: edgespec ngram build")
                if (filled < HEADER_BYTES) {
                    throw StoreError("$path: truncated: expected $HEADER_BYTES bytes or more, got $filled", BUILD_AGAIN)
                }
            }
            size = path.length()
        } catch (error: IOException) {
            throw StoreError("$path: cannot read it: ${error.message}", "expected an n-gram store", error)
        }
        val fields = ByteBuffer.wrap(head).order(ByteOrder.LITTLE_ENDIAN)
        fields.position(8)
        val version = fields.int
        val nMax = fields.int
        vocab = fields.int
        fields.int // texts
        val count = fields.long
        fields.long // entries left out
        fields.long // tokens read
        val named = ByteArray(32).also { fields.get(it) }
        val body = ByteArray(32).also { fields.get(it) }
        val byLength = LongArray(4) { fields.long }
        if (version != STORE_VERSION) {
            throw StoreError(
                "$path: a store of version $version; this edgespec reads version $STORE_VERSION",
                "use the edgespec that built it, or build it again",
            )
        }
        val digest = MessageDigest.getInstance("SHA-256")
        val signed = digest.digest(head.copyOf(SIGNED)).contentEquals(head.copyOfRange(SIGNED, HEADER_BYTES))
        if (!signed || nMax != N_MAX || count != byLength.sum() || count <= 0) {
            throw StoreError("$path: altered: its header does not match its checksum", BUILD_AGAIN)
        }
        vocabulary = hex(named)
        val wanted = HEADER_BYTES + ENTRY_BYTES * count
        if (size != wanted) {
            throw StoreError("$path: ${if (size < wanted) "truncated" else "altered"}: expected $wanted bytes, got $size", BUILD_AGAIN)
        }
        if (size > Int.MAX_VALUE) throw StoreError("$path: $size bytes: expected less than 2 GiB here", "build a smaller store")
        entries = count.toInt()
        data = FileChannel.open(path.toPath()).use { it.map(FileChannel.MapMode.READ_ONLY, 0, size) }
        data.order(ByteOrder.LITTLE_ENDIAN)
        if (check) {
            val rest = data.duplicate()
            rest.position(HEADER_BYTES)
            digest.update(rest)
            val got = digest.digest()
            if (!got.contentEquals(body)) {
                throw StoreError(
                    "$path: altered: expected SHA-256 ${hex(body).take(12)}..., got ${hex(got).take(12)}...",
                    "copy it again, or $BUILD_AGAIN",
                )
            }
        }
    }

    /** Refuse a tokenizer that this store was not made with. */
    fun require(vocabulary: String, vocab: Int) {
        if (this.vocabulary != vocabulary || this.vocab != vocab) {
            throw StoreError(
                "$path: was built with another tokenizer: its vocabulary is ${this.vocabulary.take(12)}... (${this.vocab} " +
                    "tokens), the model's ${vocabulary.take(12)}... ($vocab tokens)",
                "build one for this model: edgespec ngram build TEXT... --tokenizer BUNDLE",
            )
        }
    }

    /** What the longest known end of [tail] was followed by in at least [share] of the cases; null: nothing. */
    fun likely(tail: IntArray, share: Double): Hit? {
        val keys = LongArray(minOf(N_MAX, tail.size))
        var key = 0L
        for (n in keys.indices) {
            key = (key xor (tail[tail.size - 1 - n] + 1L)) * MULTIPLIER
            key = key xor (key ushr 32)
            keys[n] = key
        }
        for (n in keys.size downTo 1) {
            val at = find(keys[n - 1])
            if (at < 0) continue
            val seen = data.getShort(HEADER_BYTES + 12 * entries + 2 * at).toInt() and 0xffff
            val of = data.getShort(HEADER_BYTES + 14 * entries + 2 * at).toInt() and 0xffff
            if (seen >= share * of) return Hit(n, data.getInt(HEADER_BYTES + 8 * entries + 4 * at), seen, of)
        }
        return null
    }

    /** Index of a key, -1 if it is not there. */
    private fun find(key: Long): Int {
        var low = 0
        var high = entries - 1
        while (low <= high) {
            val middle = (low + high) ushr 1
            val order = java.lang.Long.compareUnsigned(data.getLong(HEADER_BYTES + 8 * middle), key)
            if (order == 0) return middle
            if (order < 0) low = middle + 1 else high = middle - 1
        }
        return -1
    }
}

internal fun hex(bytes: ByteArray): String = bytes.joinToString("") { "%02x".format(it) }
