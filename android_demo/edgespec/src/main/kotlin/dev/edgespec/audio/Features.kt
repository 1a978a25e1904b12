package dev.edgespec.audio

import dev.edgespec.InvalidRequest
import dev.edgespec.runtimes.FeaturePart
import java.io.File
import java.nio.*
import kotlin.math.*

/* Log-mel features of Whisper (arXiv 2212.04356, section 2.2), as the Python side computes them; and recordings. */

const val RATE = 16_000 // samples per second
const val HOP = 160 // samples from one frame to the next: 10 ms
private const val WINDOW = 400 // samples of a frame
private const val SIDE = WINDOW / 2 // what the first and the last frame see beyond the ends is mirrored
private const val SPECTRUM = WINDOW / 2 + 1
private const val LINEAR = 1000.0 // Hz; Slaney's mel scale is linear up to here
private const val STEP = 200.0 / 3 // Hz a mel there
private val LOG_STEP = ln(6.4) / 27 // of the frequency's logarithm a mel, above

/** Frames [frames] of [bins] features each: [frames * bins]. */
class Features(val values: FloatArray, val bins: Int) {
    val frames: Int get() = values.size / bins

    /** [count] frames from [first] on, padded with silence (zeros). */
    fun part(first: Int, count: Int): Features =
        Features(values.copyOfRange(first * bins, minOf(first + count, frames) * bins).copyOf(count * bins), bins)
}

/** Features of a recording, one channel at [RATE]; one of fewer than [least] samples is filled up with silence. */
fun logMel(samples: FloatArray, bins: Int, least: Int): Features {
    val sound = if (samples.size < least) samples.copyOf(least) else samples
    val last = sound.size - 1
    if (last < SIDE) throw InvalidRequest("the sound has ${sound.size} samples: expected more than $SIDE")
    val count = sound.size / HOP // Whisper leaves the last frame out
    val filters = melFilters(bins)
    val fourier = Fourier(WINDOW)
    val frame = DoubleArray(WINDOW)
    val mels = FloatArray(count * bins)
    for (at in 0 until count) {
        for (i in 0 until WINDOW) {
            val place = abs(at * HOP + i - SIDE)
            frame[i] = HANN[i] * sound[if (place > last) 2 * last - place else place]
        }
        fourier.transform(frame)
        for (bin in 0 until bins) {
            val (first, weights) = filters[bin]
            var sum = 0.0
            for (i in weights.indices) sum += weights[i] * fourier.power(first + i)
            mels[at * bins + bin] = log10(maxOf(sum.toFloat(), 1e-10f).toDouble()).toFloat()
        }
    }
    val least = mels.max() - 8f // decades below the loudest band
    for (at in mels.indices) mels[at] = (maxOf(mels[at], least) + 4f) / 4f
    return Features(mels, bins)
}

private val HANN = DoubleArray(WINDOW) { 0.5 - 0.5 * cos(2 * PI * it / WINDOW) }

/** For each band the first frequency with a weight, and the weights of that one and those after it, with the area 1. */
private fun melFilters(bins: Int): List<Pair<Int, FloatArray>> {
    fun hertz(mel: Double) = (LINEAR / STEP).let { if (mel < it) mel * STEP else LINEAR * exp(LOG_STEP * (mel - it)) }
    val top = RATE / 2.0
    val most = LINEAR / STEP + ln(top / LINEAR) / LOG_STEP
    val edges = DoubleArray(bins + 2) { hertz(most * it / (bins + 1)) }
    return List(bins) { bin ->
        val (low, middle, high) = edges.slice(bin..bin + 2)
        val all = FloatArray(SPECTRUM) {
            val heard = top * it / (SPECTRUM - 1)
            (max(0.0, min((heard - low) / (middle - low), (high - heard) / (high - middle))) * (2 / (high - low))).toFloat()
        }
        val heard = all.indices.filter { all[it] > 0 }
        if (heard.isEmpty()) 0 to FloatArray(0) else heard.first() to all.copyOfRange(heard.first(), heard.last() + 1)
    }
}

/** The discrete Fourier transform of [size] real numbers, by the factors of the size (Cooley and Tukey). */
private class Fourier(private val size: Int) {
    private val cosine = DoubleArray(size) { cos(2 * PI * it / size) }
    private val sine = DoubleArray(size) { -sin(2 * PI * it / size) }
    private val real = DoubleArray(size)
    private val imaginary = DoubleArray(size)
    private val parts = DoubleArray(2 * size)

    fun transform(values: DoubleArray) = run(values, size, 0, 1, 0)
    fun power(at: Int): Float = (real[at] * real[at] + imaginary[at] * imaginary[at]).toFloat()

    /** Transforms [n] values from [first] on, with stride [step], into [n] places from [to] on. */
    private fun run(values: DoubleArray, n: Int, first: Int, step: Int, to: Int) {
        if (n == 1) {
            real[to] = values[first]
            imaginary[to] = 0.0
            return
        }
        val radix = (2..n).first { n % it == 0 }
        val count = n / radix
        for (part in 0 until radix) run(values, count, first + part * step, step * radix, to + part * count)
        for (k in 0 until count) {
            for (part in 0 until radix) turned(to + part * count + k, part * k * (size / n), parts, 2 * part)
            for (out in 0 until radix) {
                var (re, im) = 0.0 to 0.0
                for (part in 0 until radix) {
                    val turn = part * out % radix * (size / radix)
                    re += parts[2 * part] * cosine[turn] - parts[2 * part + 1] * sine[turn]
                    im += parts[2 * part] * sine[turn] + parts[2 * part + 1] * cosine[turn]
                }
                real[to + out * count + k] = re
                imaginary[to + out * count + k] = im
            }
        }
    }

    private fun turned(at: Int, turn: Int, into: DoubleArray, place: Int) {
        into[place] = real[at] * cosine[turn] - imaginary[at] * sine[turn]
        into[place + 1] = real[at] * sine[turn] + imaginary[at] * cosine[turn]
    }
}

/**
 * Features as an encoder after two convolutions reads them, [frames / 2, 3 * columns].  Row i has three parts, for the frames p = 2 i
 * - 1, 2 i and 2 i + 1: features of the frames p - 1, p and p + 1 (zeros outside the recording), then a 1, then zeros; a part whose
 * p is -1 is all zeros.
 */
fun encoderRows(features: Features, part: FeaturePart): FloatArray {
    val (bands, columns) = part.bands to part.columns
    val rows = FloatArray(features.frames / 2 * 3 * columns)
    for (row in 0 until features.frames / 2) for (third in 0 until 3) {
        val frame = 2 * row - 1 + third
        if (frame < 0) continue
        val to = (3 * row + third) * columns
        for (near in 0 until 3) {
            val from = frame - 1 + near
            if (from in 0 until features.frames) features.values.copyInto(rows, to + near * bands, from * bands, (from + 1) * bands)
        }
        rows[to + 3 * bands] = 1f
    }
    return rows
}

/** Where sound comes from: a microphone, a file. */
fun interface SoundSource {
    /** One channel at [RATE], -1 to 1, until the source ends or [stopped] returns true. */
    fun read(stopped: () -> Boolean): FloatArray
}

/** A wav file of 16-bit samples at [RATE]; several channels are averaged. */
class WavFile(private val file: File) : SoundSource {
    override fun read(stopped: () -> Boolean): FloatArray {
        val data = ByteBuffer.wrap(file.readBytes()).order(ByteOrder.LITTLE_ENDIAN)
        fun wrong(got: String) =
            InvalidRequest("$file: $got: expected a wav file of 16-bit samples, $RATE a second", "convert it: ffmpeg -ar $RATE -sample_fmt s16")
        fun name(at: Int) = String(data.array(), at, 4, Charsets.US_ASCII)
        if (data.limit() < 12 || name(0) != "RIFF" || name(8) != "WAVE") throw wrong("no wav file")
        var channels = 0
        var at = 12
        while (at + 8 <= data.limit()) {
            val size = data.getInt(at + 4).toLong() and 0xffffffffL
            val end = minOf(at + 8 + size, data.limit().toLong()).toInt()
            if (name(at) == "fmt ") {
                if (end - at < 24) throw wrong("a damaged head")
                channels = data.getShort(at + 10).toInt()
                val (rate, bits) = data.getInt(at + 12) to data.getShort(at + 22).toInt()
                if (rate != RATE || bits != 16 || channels < 1) throw wrong("$bits bits, $rate a second, $channels channels")
            } else if (name(at) == "data" && channels > 0) {
                val samples = (end - at - 8) / 2 / channels
                return FloatArray(samples) { one ->
                    (0 until channels).sumOf { data.getShort(at + 8 + 2 * (one * channels + it)).toInt() } / (channels * 32768f)
                }
            }
            at = end + end % 2
        }
        throw wrong("no samples")
    }
}
