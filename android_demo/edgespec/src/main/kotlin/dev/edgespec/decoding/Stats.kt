package dev.edgespec.decoding

/** Counters and times of one request, filled round by round. */
class Stats {
    var promptTokens = 0
    var reusedTokens = 0 // of the prompt, whose KV was still in the slot
    var tokens = 0
        private set
    var rounds = 0
        private set
    var drafted = 0
        private set
    var accepted = 0
        private set
    private val byAccepted = arrayListOf(0)
    private val offeredAt = ArrayList<Int>()
    private val takenAt = ArrayList<Int>()
    var prefillMs = 0.0
    var draftMs = 0.0
    var verifyMs = 0.0
    var otherMs = 0.0
    var droppedReason: String? = null
    val monitor = Monitor()

    /** histogram[j] = rounds that accepted j guesses. */
    val histogram: List<Int> get() = byAccepted

    /** offered[i] = rounds that put a guess at position i to the test. */
    val offered: List<Int> get() = offeredAt

    /** acceptedAt[i] = those of them that accepted it. */
    val acceptedAt: List<Int> get() = takenAt

    /** Count one round: tokens emitted, guesses verified and emitted, positions put to the test. */
    fun record(emitted: Int, drafted: Int, accepted: Int, reached: Int) {
        rounds++
        tokens += emitted
        if (drafted == 0) {
            byAccepted[0]++
            return
        }
        this.drafted += drafted
        this.accepted += accepted
        widen(byAccepted, accepted + 1)
        byAccepted[accepted]++
        widen(offeredAt, reached)
        widen(takenAt, reached)
        for (i in 0 until reached) offeredAt[i]++
        for (i in 0 until minOf(accepted, reached)) takenAt[i]++
    }

    val tokensPerRound: Double get() = if (rounds > 0) tokens.toDouble() / rounds else 0.0
    val acceptanceRate: Double get() = if (drafted > 0) accepted.toDouble() / drafted else 0.0
    val decodeMs: Double get() = draftMs + verifyMs + otherMs
    val tokensPerSecond: Double get() = if (decodeMs > 0) 1000 * tokens / decodeMs else 0.0

    /** For JSON; the keys are those of the Python side. */
    fun asMap(): Map<String, Any?> = mapOf(
        "prompt_tokens" to promptTokens,
        "reused_tokens" to reusedTokens,
        "tokens" to tokens,
        "rounds" to rounds,
        "drafted" to drafted,
        "accepted" to accepted,
        "acceptance_rate" to acceptanceRate,
        "tokens_per_round" to tokensPerRound,
        "histogram" to histogram.toList(),
        "offered" to offered.toList(),
        "accepted_at" to acceptedAt.toList(),
        "prefill_ms" to prefillMs,
        "draft_ms" to draftMs,
        "verify_ms" to verifyMs,
        "other_ms" to otherMs,
        "tokens_per_second" to tokensPerSecond,
        "dropped_reason" to droppedReason,
    ) + monitor.asMap()

    private fun widen(counts: ArrayList<Int>, size: Int) {
        while (counts.size < size) counts.add(0)
    }
}
