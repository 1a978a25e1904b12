package dev.edgespec.runtimes

/* Cross-attention caches of decoders that attend over a source. */

/** Format of a cross-attention cache, given that of the cache: 4-bit formats have no tables for it. */
internal fun memoryFormat(kv: KvFormat) = KvFormat(if (kv.keys in listOf("f32", "f16")) kv.keys else "int8", kv.values)

/** Keys and values of one source, for all layers of a decoder that attends over it: filled once, and never written again. */
class Memory internal constructor(val digest: String, val rows: Int, part: ModelPart, kv: KvFormat) {
    internal val bound = Bound.of(Dtype.UINT8, 1, memoryFormat(kv).nbytes(part.facts, rows).toInt())
    internal var users = 0 // slots that refer to it, and the cache that keeps it
        set(count) {
            field = count
            if (count == 0) bound.close()
        }

    val nbytes: Long get() = bound.bytes.capacity().toLong()
}
