package dev.edgespec.engine

import dev.edgespec.control.Auto
import dev.edgespec.decoding.*
import dev.edgespec.planning.Admission
import dev.edgespec.runtimes.StreamDecoder
import dev.edgespec.runtimes.endOfQuestion
import dev.edgespec.runtimes.endsOfTurns

/** A running request, a round at a time; made, run and closed on the decode thread. */
internal class Request(private val engine: Engine, private val prompt: IntArray, private val settings: Settings) : AutoCloseable {
    private var choice: MethodChoice
    private val admission: Admission
    private val stats = Stats()
    private val lane: Lane
    private val drafter: Drafter
    private val rounds: Rounds
    private val decoder: StreamDecoder
    private val written = Tokens()
    private val logprobs = ArrayList<Double>()
    private var finish: String? = null
    private var released = false

    init {
        val (chosen, admitted, taken) = engine.admit(engine.chooseFor(settings), Tokens(prompt), settings)
        choice = chosen
        admission = admitted
        lane = taken
        try {
            lane.asked = endOfQuestion(prompt, engine.eos)
            lane.chunk = admission.chunk
            lane.target.mark(endsOfTurns(prompt, engine.eos) + lane.shared, admission.checkpoints)
            val own = settings.proposer
            drafter = if (own != null) {
                lane.own(own, settings.gamma, settings.adaptive, settings.fallback)
            } else {
                lane.drafter(choice, settings.gamma, settings.adaptive, settings.fallback, settings.drafts)
            }
            val options = DecodeOptions(
                maxNewTokens = settings.maxNewTokens,
                gamma = settings.gamma ?: choice.gamma,
                eos = if (settings.ignoreEos) emptySet() else engine.eos,
                sampling = settings.sampling,
                logprobs = settings.logprobs,
                shadow = settings.shadow ?: if (settings.accept.lossless) 0 else SHADOW_EVERY,
                accept = settings.accept,
            )
            rounds = Rounds(lane.target, drafter, prompt, options, stats)
            decoder = StreamDecoder(engine.codec::decode, prompt, settings.stop)
            lane.target.reserve(minOf(lane.target.context, prompt.size + settings.maxNewTokens))
        } catch (error: Throwable) {
            engine.lanes.giveBack(lane)
            throw error
        }
    }

    /** Read some of what comes before the next round, so little that nobody waits for long -> whether there was any. */
    fun read(): Boolean {
        val asked = rounds.unread() ?: return false
        val pace = engine.paces.getValue(asked.draft)
        val rows = if (asked.left <= FIRST) asked.left else minOf(asked.left, pace.rows(lane.chunk, engine.lanes.inUse < 2))
        val start = System.nanoTime()
        rounds.read(rows)
        pace.took(rows, (System.nanoTime() - start) / 1e9)
        return true
    }

    /** The next piece; the last one has the result. */
    fun next(): Chunk {
        val round = rounds.next()
        val pieces = take(round)
        if (finish == null) return Chunk(pieces.joinToString(""), round, pieces)
        close()
        val rest = decoder.finish()
        return Chunk(pieces.joinToString("") + rest, round, pieces, result())
    }

    /** Add a round's tokens; a stop string in the middle of it drops the tokens after. */
    private fun take(round: Round): List<String> {
        val pieces = ArrayList<String>()
        finish = round.finish
        for ((at, token) in round.tokens.withIndex()) {
            written.push(token)
            round.logprobs?.let { logprobs.add(it[at]) }
            val ended = round.finish == "eos" && at == round.tokens.size - 1
            pieces.add(if (ended) "" else decoder.push(token)) // EOS is no text, even where it is a word
            if (decoder.stopped != null) {
                finish = "stop"
                break
            }
        }
        return pieces
    }

    override fun close() {
        if (released) return
        released = true
        engine.lanes.giveBack(lane)
    }

    /** The result so far; complete once the request has ended. */
    fun result(): Result {
        val auto = drafter as? Auto
        val used = auto?.used ?: choice.name
        return Result(
            text = decoder.text,
            tokens = written.toIntArray(),
            finish = finish ?: "cancelled",
            stats = stats,
            methodRequested = settings.method,
            methodUsed = used,
            reason = reason(),
            lossless = said(settings.accept.lossless),
            exact = said(engine.strict && rounds.keepsText && (used == "ar" || engine.rowsExact())),
            unproven = engine.unproven,
            approximations = engine.approximations + settings.accept.approximations,
            operators = engine.operators.kind,
            draftAttention = draftAttention,
            logprobs = if (settings.logprobs) logprobs.toDoubleArray() else null,
            predictedBytes = admission.predicted,
            modelSampling = keptOfModel(engine.defaults.sampling, settings.sampling),
        )
    }

    /** A claim, where what ran was checked. */
    private fun said(claim: Boolean): Boolean? = claim.takeUnless { claim && engine.unproven.isNotEmpty() }

    /** The coarser keys that this request's drafts read. */
    private val draftAttention: String?
        get() {
            val skipping = listOf("self-spec", "swift").any { (drafter as? Auto)?.uses(it) ?: choice.uses(it) }
            return engine.attention.draft.takeIf { skipping }
        }

    private fun reason(): String {
        val dropped = stats.droppedReason
        val reading = draftAttention?.let { "drafts read $it keys, verification ${engine.attention.name}" }
        val parts = if (dropped != null) listOf(choice.reason, "drafter dropped: $dropped") else listOfNotNull(choice.reason, reading, drafter.reason)
        return parts.filter { it.isNotEmpty() }.joinToString("; ")
    }
}

/** Whether all of these hold: false where one does not, else null where one cannot be said. */
internal fun ofAll(claims: List<Boolean?>): Boolean? = if (false in claims) false else if (null in claims) null else true

/** What a request gave; fields and their meaning are those of the Python side. */
class Result(
    val text: String,
    val tokens: IntArray,
    val finish: String, // eos, length, context, stop or cancelled
    val stats: Stats,
    val methodRequested: String?,
    val methodUsed: String,
    val reason: String,
    val lossless: Boolean?, // null: see [unproven]
    val exact: Boolean?,
    val approximations: List<String>,
    val operators: String,
    val draftAttention: String? = null,
    val logprobs: DoubleArray? = null,
    val predictedBytes: Long = 0,
    val modelSampling: Map<String, Double> = emptyMap(),
    val unproven: List<String> = emptyList(), // why those two cannot be said, a sentence each: something was not checked
) {
    val device = "cpu"

    /** For JSON; the keys are stable. */
    fun asMap(): Map<String, Any?> = linkedMapOf(
        "text" to text, "tokens" to tokens.toList(), "finish" to finish, "method_requested" to methodRequested,
        "method_used" to methodUsed, "reason" to reason, "lossless" to lossless, "exact" to exact,
        "unproven" to unproven,
        "approximations" to approximations, "operators" to operators, "device" to device,
        "stats" to stats.asMap() + ("predicted_bytes" to predictedBytes),
    ).apply {
        draftAttention?.let { put("draft_attention", it) }
        logprobs?.let { put("logprobs", it.toList()) }
        if (modelSampling.isNotEmpty()) put("model_sampling", modelSampling)
    }
}

/**
 * A piece of a stream: [text] became complete in one [round] (null for what was held back until the very end), and
 * [pieces] is it by the round's tokens.  The last chunk of a stream has the [result].
 */
class Chunk(val text: String, val round: Round?, val pieces: List<String> = emptyList(), val result: Result? = null)

/** The model's own settings that decide in a request, by name: those that differ from plain decoding's defaults. */
internal fun keptOfModel(own: SamplingParams, used: SamplingParams): Map<String, Double> {
    fun named(of: SamplingParams) = linkedMapOf(
        "temperature" to of.temperature, "top_p" to of.topP, "top_k" to of.topK.toDouble(), "min_p" to of.minP,
        "repetition_penalty" to of.repetitionPenalty,
    )
    val off = named(SamplingParams())
    val asked = named(used)
    val names = if (used.greedy) setOf("repetition_penalty") else off.keys
    return named(own).filter { (name, value) -> name in names && value == asked[name] && value != off[name] }
}
