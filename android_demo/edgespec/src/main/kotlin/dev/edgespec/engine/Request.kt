package dev.edgespec.engine

import dev.edgespec.EdgespecError
import dev.edgespec.control.Auto
import dev.edgespec.control.Chain
import dev.edgespec.decoding.*
import dev.edgespec.drafters.Predicted
import dev.edgespec.planning.Admission
import dev.edgespec.runtimes.*
import kotlin.math.abs

/** A running request, a round at a time; made, run and closed on the decode thread. */
internal class Request(
    private val engine: Engine, private val prompt: IntArray, private val source: Source?, private val settings: Settings,
) : AutoCloseable {
    private var choice: MethodChoice
    private val admission: Admission
    private val stats = Stats()
    private val lane: Lane
    private val drafter: Drafter
    private var predicted: Chain? = null // asks the prediction before the drafter
    private val rounds: Rounds
    private val decoder: StreamDecoder
    private val written = Tokens()
    private val logprobs = ArrayList<Double>()
    private var finish: String? = null
    private var released = false
    private var heat: String? = null // its effect, as text
    private val kept = HashMap<Boolean, KeptText>() // parts of the target's and the draft's slots on disk

    private var sees = false // pictures, some rows of which may be read again, so they are kept

    init {
        val (chosen, admitted, taken) = engine.admit(engine.chooseFor(settings), Tokens(prompt), settings)
        choice = chosen
        admission = admitted
        lane = taken
        try {
            if (prompt.any { it >= INSERTED }) {
                engine.reader.hold(prompt)
                sees = true
            }
            if (source != null) {
                val start = System.nanoTime()
                lane.attend(source)
                stats.sourceRows = source.count
                stats.encodeMs = since(start)
            }
            lane.asked = endOfQuestion(prompt, engine.eos)
            lane.chunk = admission.chunk
            val ends = endsOfTurns(prompt, engine.eos)
            lane.target.mark(ends + lane.shared, admission.checkpoints)
            drafter = lane.drafter(choice, settings)
            val eos = if (settings.ignoreEos) emptySet() else engine.eos
            if (!settings.prediction.isNullOrEmpty() && settings.method != "ar") {
                val expected = engine.codec.encode(settings.prediction, withSpecial = false)
                predicted = Chain(listOf(Predicted(expected, prompt.size), drafter))
            }
            val how = settings.copy(sampling = settings.sampling.copy(prompt = prompt.size))
            rounds = Rounds(lane.target, predicted ?: drafter, prompt, how, settings.gamma ?: choice.gamma, eos, stats, source?.tokens ?: NONE)
            decoder = StreamDecoder(engine.codec::decode, prompt, settings.stop)
            lane.target.reserve(minOf(lane.target.context, prompt.size + settings.length))
            takeUp(lane.target, ends, draft = false)
            lane.onDraft = { takeUp(it, ends, draft = true) }
        } catch (error: Throwable) {
            leave()
            throw error
        }
    }

    private fun takeUp(slot: Slot, ends: List<Int>, draft: Boolean) {
        if (sees) return // their tokens are numbers of this process
        val found = engine.prompts?.takeUp(slot, prompt, prompt.size + settings.length, draft) ?: return
        kept[draft] = found.also { it.watch(prompt, ends) }
    }

    /** Read a small piece of the pending prompt, so that other requests wait only briefly -> whether there was any. */
    fun read(): Boolean {
        val asked = rounds.unread() ?: return false
        val pace = engine.paces.getValue(asked.draft)
        val most = if (asked.left <= FIRST) asked.left else minOf(asked.left, pace.rows(lane.chunk, engine.lanes.inUse < 2))
        val rows = kept[false]?.takeIf { !asked.draft }?.rows(most) ?: most
        val start = System.nanoTime()
        rounds.read(rows)
        pace.took(rows, (System.nanoTime() - start) / 1e9)
        return true
    }

    fun next(): Chunk {
        val spared = engine.spare()
        rounds.most = spared.guesses
        if (spared.reason.isNotEmpty()) heat = spared.reason
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
            pieces.add(if (ended) "" else decoder.push(token)) // EOS is not text, even if it is a word
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
        try {
            if (finish != null) kept.values.forEach { it.keep(prompt + written.toIntArray()) }
        } catch (_: EdgespecError) { // the text is complete; another process reads it again
        } finally {
            leave()
        }
    }

    private fun leave() {
        lane.onDraft = null
        kept.values.forEach { it.close() }
        if (source != null) lane.attend(null) // its memory may make room for another one
        if (sees) engine.reader.letGo(prompt)
        engine.lanes.giveBack(lane)
    }

    fun result(): Result {
        val auto = drafter as? Auto
        val used = auto?.used ?: choice.name
        return Result(
            text = decoder.text, tokens = written.toIntArray(), finish = finish ?: "cancelled", stats = stats,
            methodRequested = settings.method, methodUsed = used, reason = reason(), lossless = said(settings.accept.lossless),
            exact = said(engine.strict && rounds.keepsText && (used == "ar" || engine.rowsExact)),
            unproven = engine.unproven, approximations = engine.approximations + settings.accept.approximations,
            operators = engine.operators.kind, draftAttention = draftAttention,
            logprobs = if (settings.logprobs) logprobs.toDoubleArray() else null, predictedBytes = admission.predicted,
            modelSampling = keptOfModel(engine.defaults.sampling, settings.sampling),
        )
    }

    private fun said(claim: Boolean): Boolean? = claim.takeUnless { claim && engine.unproven.isNotEmpty() }

    private val draftAttention: String?
        get() {
            val skipping = listOf("self-spec", "swift").any { (drafter as? Auto)?.uses(it) ?: choice.uses(it) }
            return engine.attention.draft.takeIf { skipping }
        }

    private fun reason(): String {
        val dropped = stats.droppedReason
        val reading = draftAttention?.let { "drafts read $it keys, verification ${engine.attention.name}" }
        val sure = predicted?.let { "the prediction guessed in ${it.won[0]} rounds" }
        val said = if (dropped != null) listOf("drafter dropped: $dropped") else listOfNotNull(reading, sure, drafter.reason, heat)
        return (listOf(choice.reason) + said).filter { it.isNotEmpty() }.joinToString("; ")
    }
}

/** Whether all of these hold: false if one does not, else null if one is unknown. */
internal fun ofAll(claims: List<Boolean?>): Boolean? = if (false in claims) false else if (null in claims) null else true

/** Result of a request; fields and their meaning are those of the Python side. */
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
    val unproven: List<String> = emptyList(), // why those two are unknown, a sentence each: something was not checked
) {
    val device = "cpu"
}

/** A piece of a stream, of one [round] (null: held back until the end); [pieces]: by its tokens; the last has the [result]. */
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

private val SIZES = listOf(8, 16, 32, 64, 128) // rows of a chunk
internal const val FIRST = 16 // while nothing is known; a prompt with no more left is read to its end
private const val ALONE = 0.08 // seconds of a chunk: the wait of a new request
private const val BESIDE = 0.03 // the wait of a running request
private const val GAIN = 0.9 // a larger chunk is used if its row costs at most this share of a smaller one's
private const val FORGET = 256 // chunks until larger ones are tried again

/** Bounds chunks of a prompt by time; a single request takes larger ones if they are cheaper per row. */
internal class Pace {
    private var cost = LinkedHashMap<Int, Double>() // seconds of a row, by rows of the chunk
    private var chunks = 0

    /** Seconds of a row in the largest chunk that was timed; 0 = none was. */
    val seconds: Double get() = cost.maxByOrNull { it.key }?.value ?: 0.0

    /** Rows of the next chunk, at most [most]; [alone]: no other request is running. */
    fun rows(most: Int, alone: Boolean): Int {
        val sizes = SIZES.filter { it <= most }.ifEmpty { listOf(most) }
        var at = maxOf(0, sizes.indexOfLast { fits(it, alone) })
        while (alone && cost.isNotEmpty() && at + 1 < sizes.size) {
            val here = cost[sizes[at]] ?: break
            val next = cost[sizes[at + 1]]
            if (next != null && next > GAIN * here) break
            at++
        }
        return sizes[at]
    }

    private fun fits(size: Int, alone: Boolean): Boolean {
        if (cost.isEmpty()) return size <= FIRST
        val nearest = cost.keys.minBy { abs(it - size) }
        return size * cost.getValue(nearest) <= if (alone) ALONE else BESIDE
    }

    /** Record the time of a chunk.  What changed since, the depth or other load, changed for all sizes. */
    fun took(rows: Int, seconds: Double) {
        if (rows !in SIZES) return // the last one of a prompt
        val now = seconds / rows
        val change = now / (cost[rows] ?: now)
        for ((size, old) in cost) cost[size] = old * change
        cost[rows] = now
        chunks++
        if (chunks % FORGET == 0) cost.keys.removeAll { it > rows }
    }
}
