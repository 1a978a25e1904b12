package dev.edgespec.decoding

import java.security.SecureRandom
import kotlin.math.ln

/*
 * Counter-based randomness: every random number is a hash of (seed, position, stream, token), so a position gets the same
 * token whether it was reached by plain decoding or inside a verified block.  The numbers are those of the Python side.
 */

private const val GOLDEN = -0x61c8864680b583ebL // 0x9E3779B97F4A7C15; splitmix64 (Steele et al. 2014)
private const val MIX1 = -0x40a7b892e31b1a47L // 0xBF58476D1CE4E5B9
private const val MIX2 = -0x6b2fb644ecceee15L // 0x94D049BB133111EB

/** Streams: uses of randomness that must be independent of each other at one position. */
const val TARGET = 0L
const val RESIDUAL = 1L
const val ACCEPT = 1L shl 20 // + sibling
const val DRAFT = 1L shl 40 // + length at the start of the draft
const val BLOCK = 1L shl 30 // + length at the start of the block

internal const val UNIT = 1.0 / (1L shl 53)

private fun mix(value: Long): Long {
    var x = value
    x = (x xor (x ushr 30)) * MIX1
    x = (x xor (x ushr 27)) * MIX2
    return x xor (x ushr 31)
}

/** Randomness without state; [seed] null = 64 bits from the operating system. */
class Noise(seed: Long? = null) {
    val seed: Long = seed ?: SecureRandom().nextLong()
    private val key = mix(this.seed + GOLDEN)

    private fun state(position: Int, stream: Long): Long = mix(mix(key + position * GOLDEN) + stream * MIX1 + 1)

    /** One number in [0, 1). */
    fun uniform(position: Int, stream: Long): Double = (mix(state(position, stream)) ushr 11).toDouble() * UNIT

    /** [k]: 53 random bits for each of [tokens]. */
    fun bits(position: Int, tokens: IntArray, stream: Long = TARGET): LongArray {
        val state = state(position, stream)
        return LongArray(tokens.size) { mix(tokens[it] * GOLDEN + state) ushr 11 }
    }

    /** Standard Gumbel noise, [k], one number for each of [tokens]. */
    fun gumbel(position: Int, tokens: IntArray, stream: Long = TARGET): DoubleArray {
        val bits = bits(position, tokens, stream)
        return DoubleArray(bits.size) { gumbelOf(bits[it]) }
    }
}

/** -log(-log(u)) of the uniform number that 53 [bits] are; increasing in them. */
fun gumbelOf(bits: Long): Double = -ln(-ln((bits.toDouble() + 0.5) * UNIT)) // never 0 and never 1
