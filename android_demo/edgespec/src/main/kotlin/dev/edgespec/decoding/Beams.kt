package dev.edgespec.decoding

import dev.edgespec.EdgespecError
import dev.edgespec.InvalidRequest
import kotlin.math.*

/*
 * Beam search: the most likely of several texts continue (Graves, arXiv 1211.3711; Wu et al., 1609.08144), with the
 * scores, length penalty and ends of Hugging Face transformers, as edgespec/decoding/beams.py has them.
 */

const val MOST_BEAMS = 64

/**
 * How beams are searched.  A finished text's score is its log-probability over its length to the power of [lengthPenalty].
 * [earlyStopping]: the search ends when as many texts as [beams] are finished; else when no live one can, at its length, be
 * better than the worst of them, and of "never" at no length.  Null = as the model has it, else 1 and "false".
 */
data class BeamOptions(val beams: Int = 4, val lengthPenalty: Double? = null, val earlyStopping: String? = null) {
    init {
        if (beams !in 1..MOST_BEAMS) throw InvalidRequest("beams is $beams: expected a whole number from 1 to $MOST_BEAMS")
        if (lengthPenalty != null && lengthPenalty !in -100.0..100.0) {
            throw InvalidRequest("length_penalty is $lengthPenalty: expected a number from -100 to 100")
        }
        if (earlyStopping !in listOf(null, "true", "false", "never")) {
            throw InvalidRequest("early_stopping is $earlyStopping: expected true, false or never")
        }
    }
}

/** A text, and the sum of its tokens' log-probabilities; of a finished one over its length penalty. */
class Beam(val tokens: List<Int>, val score: Float, val finished: Boolean = false)

/**
 * A search, step by step.  [options]: nothing of them null; [longest]: tokens that a text may come to have, those that it [begin]s
 * with included, of which [counted] do not count in a text's length.
 */
internal class BeamSearch(
    begin: List<Int>, private val options: BeamOptions, private val sampling: SamplingParams, private val eos: Set<Int>,
    private val longest: Int, private val counted: Int,
) {
    private val penalty = options.lengthPenalty!!
    private var improves = true

    /** The live texts, best first, and the parent of each. */
    var going = listOf(Beam(begin, 0f))
        private set
    var parents: List<Int> = emptyList()
        private set
    private var done = List(options.beams) { Beam(begin, -1e9f) } // the best finished ones, the best first
    var over = false
        private set

    /** The best finished text; before there is one, the best live one. */
    val best: Beam get() = if (done[0].finished) done[0] else going[0]

    private class Next(val parent: Int, val token: Int, val score: Float)

    /** Continue the live texts; [logits]: one row each. */
    fun step(logits: Matrix) {
        val length = going[0].tokens.size + 1
        val kept = maxOf(2, 1 + eos.size) * options.beams
        val found = going.indices.flatMap { at -> best(at, scores(going[at], logits.row(at)), kept) }
            .sortedByDescending { it.score }.take(kept) // stable: the lowest wins a tie
        fun ends(next: Next) = next.token in eos || length >= longest
        finish(found.take(options.beams), ::ends, length)
        val next = found.filterNot(::ends).take(options.beams)
        if (next.isEmpty() || found[0].score == Float.NEGATIVE_INFINITY) {
            over = true
            return
        }
        parents = next.map { it.parent }
        going = next.map { Beam(going[it.parent].tokens + it.token, it.score) }
        improves = improves && canImprove(length)
        over = !improves || full
    }

    private val full: Boolean get() = options.earlyStopping == "true" && done.all { it.finished }

    private fun best(parent: Int, scores: FloatArray, count: Int): List<Next> =
        top(doubles(scores), count).map { Next(parent, it, scores[it]) }
            .sortedWith(compareByDescending<Next> { it.score }.thenBy { it.token })

    private fun scores(beam: Beam, row: FloatArray): FloatArray {
        val most = row.max()
        val all = ln(row.sumOf { exp((it - most).toDouble()) })
        if (!all.isFinite()) throw EdgespecError("the model gave NaN or infinity", "the bundle may be damaged: check it with `edgespec verify`")
        val chances = FloatArray(row.size) { (row[it] - most - all).toFloat() }
        val forced = sampling.constraint?.forced(beam.tokens) // costs nothing
        val found = if (forced == null) adjusted(chances, sampling, beam.tokens) else FloatArray(row.size) { if (it == forced) 0f else Float.NEGATIVE_INFINITY }
        return FloatArray(found.size) { found[it] + beam.score }
    }

    private fun finish(found: List<Next>, ends: (Next) -> Boolean, length: Int) {
        if (full || !improves) return
        val power = (length - counted).toDouble().pow(penalty).toFloat()
        val ended = found.filter { ends(it) && it.score > Float.NEGATIVE_INFINITY }
        done = (done + ended.map { Beam(going[it.parent].tokens + it.token, it.score / power, true) }).sortedByDescending { it.score }.take(options.beams)
    }

    /** Whether a live text may still become better than the worst finished one. */
    private fun canImprove(length: Int): Boolean {
        val hoped = (if (options.earlyStopping == "never" && penalty > 0) longest else length) - counted
        return !done.all { it.finished } || going[0].score / hoped.toDouble().pow(penalty).toFloat() > done.last().score
    }
}
