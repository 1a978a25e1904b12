package dev.edgespec.planning

import dev.edgespec.BudgetError
import dev.edgespec.runtimes.*
import java.util.Locale

/* The memory that an engine may take, and what of a request fits into it. */

private const val LEAST = 64 // tokens: a bundle that has no room for them is refused when it is loaded
private val CHUNKS = listOf(128, 64, 32, 16) // rows of a prefill's pass: fewer need less scratch and more time
private val CHEAPER = listOf("ngram", "ar") // methods without additional memory, the better one first

/**
 * How a request may run: [predicted] bytes with all that is in use (0 = nothing was predicted), and the changes, as [reason]; [crowded]:
 * idle KV of earlier requests must be freed first, except [spare] bytes of it (null = any number may stay).
 */
class Admission(
    val method: String, val chunk: Int, val predicted: Long, val reason: String = "", val crowded: Boolean = false,
    val checkpoints: Int = CHECKPOINTS, val spare: Long? = null,
)

/** Memory limit of an engine: private bytes beyond those of its process when it is made; [limit] null = no limit. */
class Allowance(private val manifest: Manifest, use: RunOptions, limit: Long?, private val host: Host = Host()) {
    var limit = limit
        private set
    private val use = use.copy(checkpoints = 0) // they take what is left
    private val checkpoint = if (use.operators == "native") checkpointBytesOf(manifest.target, use) else 0

    private val least: Long by lazy { takes(this.use.copy(method = "ar", context = LEAST, chunk = CHUNKS.last())) }

    /** Update the free memory: [available] bytes in addition to the loaded ones, of which [kv] are keys and values of texts. */
    fun renew(available: Long, kv: Long) {
        limit = available + kv + least
    }

    fun admitBundle() {
        val limit = limit ?: return
        if (least > limit) throw BudgetError(
            "this bundle needs at least ${showBytes(least)} to decode plainly, and ${showBytes(limit)} are free",
            "`edgespec plan` says which format and method would fit",
        )
    }

    /** How a request of [tokens] tokens of prompt and answer may run; [busy]: KV of others, [idle]: KV left by earlier ones. */
    fun admit(method: String, tokens: Int, gamma: Int, greedy: Boolean, busy: Long = 0, idle: Long = 0): Admission {
        val limit = limit ?: return Admission(method, CHUNKS[0], 0)
        val base = use.copy(context = tokens, gamma = gamma, greedy = greedy)
        for (name in listOf(method) + CHEAPER.filter { it in manifest.methods && it != method }) for (chunk in CHUNKS) {
            val takes = takes(base.copy(method = name, chunk = chunk)) + busy
            if (takes > limit) continue
            val kept = if (checkpoint > 0) minOf(CHECKPOINTS.toLong(), (limit - takes) / checkpoint).toInt() else 0
            val needs = showBytes(takes(base.copy(method = method, chunk = CHUNKS.last())))
            val reason = if (name == method) "" else "$method needs $needs, and ${showBytes(limit)} are free: $name instead"
            return Admission(name, chunk, takes + kept * checkpoint, reason, takes + idle > limit, kept, limit - takes)
        }
        val least = base.copy(method = "ar", chunk = CHUNKS.last())
        throw BudgetError(
            "$tokens tokens of prompt and answer need ${showBytes(takes(least) + busy)} with plain decoding, and " +
                "${showBytes(limit)} are free",
            shorter(least, busy),
        )
    }

    /** Those of the methods, the first ones first, whose memory fits at the same time with [tokens] tokens. */
    fun together(methods: List<String>, tokens: Int): List<String> {
        val limit = limit ?: return methods
        var left = limit - takes(use.copy(context = tokens, chunk = CHUNKS.last(), method = "ar"))
        return methods.filter { name ->
            val extra = extra(listOf(name), tokens)
            (extra <= left).also { fits -> if (fits) left -= extra }
        }
    }

    /** Additional bytes of methods over plain decoding, all of them together. */
    fun extra(methods: List<String>, tokens: Int): Long {
        if (limit == null) return 0
        val plain = use.copy(context = tokens, chunk = CHUNKS.last(), method = "ar")
        return methods.sumOf { maxOf(0, takes(plain.copy(method = it)) - takes(plain)) }
    }

    fun parts(method: String, tokens: Int): List<MemoryPart> =
        memoryOf(manifest, use.copy(method = method, context = tokens, checkpoints = CHECKPOINTS), host)

    private fun takes(use: RunOptions): Long {
        // requests differ by a token: whole blocks of KV are what is allocated anyway
        return memoryOf(manifest, use.copy(context = minOf(up(use.context, 64), manifest.target.facts.context)), host).sumOf { it.bytes }
    }

    private fun shorter(use: RunOptions, busy: Long): String {
        var low = 0
        var high = use.context
        while (high - low > 64) {
            val middle = (low + high) / 2
            if (takes(use.copy(context = middle)) + busy <= limit!!) low = middle else high = middle
        }
        if (low < LEAST) return "`edgespec plan` says which format and method would fit"
        return "${low / 64 * 64} tokens fit: shorten the prompt, ask for fewer new tokens, or keep keys as int8"
    }
}

/** The system's current memory figures; on Android those of ActivityManager.MemoryInfo. */
interface MemoryFacts {
    val total: Long // bytes of the machine
    val available: Long // bytes that this process may allocate in addition
    val low: Boolean // whether the system is short of memory already
}

/** How hot a device says it is whenever it is asked, as Android's PowerManager counts: 0 = not at all, 1 = light, 2 = moderate, 3 = severe ... */
fun interface Heat {
    fun level(): Int
}

/** Limits for a hot device: passes of fewer [threads], and at most [guesses] draft tokens; null = as many as a request asks for. */
class Sparing(val threads: Int, val guesses: Int?, val reason: String = "") {
    companion object {
        /** Moderate heat removes a thread and the longest drafts, severe heat half of the threads and drafts of more than two tokens. */
        fun at(level: Int, threads: Int): Sparing = when {
            level < 2 -> Sparing(threads, null)
            level == 2 -> maxOf(1, threads - 1).let { Sparing(it, 4, "the device is warm: $it of $threads threads, at most 4 guesses") }
            else -> maxOf(1, threads / 2).let { Sparing(it, 2, "the device is hot: $it of $threads threads, at most 2 guesses") }
        }
    }
}

/** Human-readable bytes: 1610612736 -> "1.50 GiB". */
fun showBytes(count: Long): String {
    var value = count.toDouble()
    var unit = "B"
    for (larger in listOf("KiB", "MiB", "GiB", "TiB")) {
        if (value < 1024) break
        value /= 1024
        unit = larger
    }
    val digits = if (unit == "B") 0 else if (value >= 100) 1 else 2
    return "%.${digits}f %s".format(Locale.ROOT, value, unit)
}

/* Choice of methods and contexts of a bundle that fit a memory budget. */

private const val SHORTEST = 64 // tokens

/** A method under a budget: maximum context that fits (0 = not even [SHORTEST]), its memory, the predicted speed over plain decoding. */
class PlannedRun(val method: String, val context: Int, val parts: List<MemoryPart>, val speedup: Double?) {
    val fits: Boolean get() = context > 0
    val bytes: Long get() = parts.sumOf { it.bytes }
}

/** Every method of a bundle: the longest context, [most] at most, that [budget] bytes have room for; fastest first. */
fun plan(manifest: Manifest, allowance: Allowance, most: Int, budget: Long): List<PlannedRun> = manifest.methods.map { (method, part) ->
    fun bytes(tokens: Int) = allowance.parts(method, tokens).sumOf { it.bytes }
    var least = 0
    var steps = most / SHORTEST // the last one may be shorter
    while (least < steps) {
        val middle = (least + steps + 1) / 2
        if (bytes(middle * SHORTEST) <= budget) least = middle else steps = middle - 1
    }
    val context = if (bytes(most) <= budget) most else least * SHORTEST
    PlannedRun(method, context, allowance.parts(method, if (context > 0) context else minOf(SHORTEST, most)), part.predictedSpeedup)
}.sortedByDescending { (if (it.fits) 1000.0 else 0.0) + (it.speedup ?: 1.0) }
