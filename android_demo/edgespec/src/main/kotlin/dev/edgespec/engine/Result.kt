package dev.edgespec.engine

import dev.edgespec.decoding.Round
import dev.edgespec.decoding.Stats

/** Result of a request; fields and their meaning are those of the Python side. */
class Result(
    val text: String,
    val tokens: IntArray,
    val finish: String, // eos, length, context or stop
    val stats: Stats,
    val methodRequested: String?,
    val methodUsed: String, // the one that was asked for, else the one whose guesses were accepted most often
    val reason: String,
    val lossless: Boolean?, // null: see [unproven]
    val exact: Boolean?, // whether it is plain decoding's text, token for token
    val approximations: List<String>,
    val operators: String,
    val logprobs: DoubleArray? = null,
    val unproven: List<String> = emptyList(), // why those two are unknown, a sentence each: something was not checked
) {
    val device = "cpu"
}

/** A piece of a stream, of one [round]; the last has the [result]. */
class Chunk(val text: String, val round: Round, val result: Result? = null)

/** Whether all of these hold: false if one does not, else null if one is unknown. */
internal fun ofAll(claims: List<Boolean?>): Boolean? = if (false in claims) false else if (null in claims) null else true
