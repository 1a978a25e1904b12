package dev.edgespec.planning.memory

import dev.edgespec.runtimes.Manifest
import dev.edgespec.runtimes.ModelPart
import dev.edgespec.runtimes.RunOptions

/* Private bytes that a bundle takes while it runs, part by part; mapped files can be read again and do not count. */

private const val MIB = 1 shl 20
private const val MARGIN = 0.01 // of the bytes that were added up
private const val LEAST_MARGIN = 2L * MIB
private const val HUGE = 2L * MIB // a large array's pages, where the system gives it large ones

// measured on the Python side (docs/planning.md): opening a tiny bundle, running it, a session by the size of its graph, a tokenizer
// by that of its file, and what is kept of a token
private const val LOADING = (1.4 * MIB).toLong()
private const val RUNNING = (1.9 * MIB).toLong()
private const val SESSION = (0.6 * MIB).toLong()
private const val STOCK_SESSION = (2.9 * MIB).toLong()
private const val TOKENIZER = 8.7
private const val TEXT = 100L
private const val NGRAM = 340L

/** A part of the memory, in private bytes; names are stable keys. */
data class MemoryPart(val name: String, val bytes: Long)

/**
 * The process: [process] bytes that are counted although they are there before a bundle is; [zeroed]: whether memory
 * is written when it is allocated, as direct buffers are, so that all of it counts at once.
 */
class Host(private val zeroed: Boolean = true, val process: Long = 0) {
    /** Resident bytes of an array of [there], of which [used] were written, in so many pieces. */
    internal fun touched(used: Long, there: Long, pieces: Int): Long =
        if (zeroed) there else if (there < 2 * HUGE) used else minOf(there, used + pieces * HUGE / 2)
}

/** What running a bundle in this way takes; from its manifest alone. */
fun memoryOf(manifest: Manifest, use: RunOptions, host: Host = Host()): List<MemoryPart> {
    val part = when (use.method) {
        "speculative" -> manifest.draft
        "eagle", "mtp", "dflash" -> manifest.drafter
        else -> null
    }
    val checkpoints = use.checkpoints * checkpointBytesOf(manifest.target, use)
    val parts = listOf(
        MemoryPart("process", host.process), MemoryPart("libraries", LOADING), MemoryPart("runtime", RUNNING),
        MemoryPart("tokenizer", (TOKENIZER * (manifest.files["tokenizer.json"]?.size ?: 0)).toLong()),
    ) + model(manifest, manifest.target, use, "", host) + (part?.let { model(manifest, it, use, "draft ", host) } ?: emptyList()) +
        MemoryPart("checkpoints", checkpoints) + MemoryPart("text", use.context * (TEXT + if (use.method == "ngram") NGRAM else 0))
    val margin = maxOf(LEAST_MARGIN, (parts.sumOf { it.bytes } * MARGIN).toLong())
    return (parts + MemoryPart("margin", margin)).filter { it.bytes > 0 }
}

/** Weights, session, keys and values, and scratch space of the target ([lead] "") or the draft. */
private fun model(manifest: Manifest, part: ModelPart, use: RunOptions, lead: String, host: Host): List<MemoryPart> {
    val native = use.operators == "native" && "native" in part.graphs
    val draft = lead.isNotEmpty()
    val groups = if (draft) emptyList() else manifest.methods[use.method]?.heads ?: emptyList()
    val graph = part.graphs[if (native) "native" else part.main]?.let { manifest.files[it.file] }?.size ?: 0
    val rows = minOf(use.chunk, use.context)
    return listOf(
        MemoryPart("${lead}weights", if (native) 0 else packedBytes(part, manifest.files)),
        MemoryPart("${lead}session", if (native) SESSION + 2 * graph else STOCK_SESSION + (12.5 * graph).toLong()),
        MemoryPart("${lead}kv", kvBytes(part, use, native, draft, host)),
        MemoryPart("${lead}scratch", if (native) nativeScratch(part, use, rows, draft) else stockScratch(part, use, rows)),
        MemoryPart("${lead}logits", logitsBytes(part, use, native, draft) + headLogits(part, native, groups)),
    )
}
