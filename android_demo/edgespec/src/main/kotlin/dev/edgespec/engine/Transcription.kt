package dev.edgespec.engine

import dev.edgespec.InvalidRequest
import dev.edgespec.audio.*
import dev.edgespec.decoding.*
import dev.edgespec.runtimes.*
import java.util.zip.Deflater
import kotlin.math.*
import kotlinx.coroutines.flow.*
import kotlinx.coroutines.runBlocking

/* Sound to text by windows, as Whisper was made to be used; steps and thresholds are the Python side's. */

private const val FRAME = 0.01 // seconds
private const val TIME_STEP = 0.02 // seconds between two tokens of times
private const val FRESH = 0.5 // above this temperature, a window's text is not a prompt for the next

/**
 * Settings of a transcription; fields and defaults are the Python side's.  [language]: null = it is detected in the first window;
 * [task]: transcribe, or translate into English; [temperatures] are tried in turn, until a text is likely enough; null of a
 * threshold = it does not count.
 */
data class TranscriptionSettings(
    val language: String? = null, val task: String = "transcribe", val timestamps: Boolean = true, val prompt: String? = null,
    val previousText: Boolean = true, val temperatures: List<Double> = listOf(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    val mostCompression: Double? = 2.4, val leastLogprob: Double? = -1.0, val mostSilence: Double? = 0.6,
) {
    init {
        if (task !in listOf("transcribe", "translate")) throw InvalidRequest("task '$task': expected transcribe or translate")
        if (temperatures.isEmpty()) throw InvalidRequest("temperatures is empty: expected one or several")
    }
}

/** A sentence or so, from [start] to [end] in seconds of the recording; [tokens] with those of times; [result]: of its window. */
class Segment(val start: Double, val end: Double, val text: String, val tokens: IntArray, val language: String?, val result: Result)

/** Output of a recording: a complete [segment], or the growing [text] of the current window. */
class Heard(val text: String, val segment: Segment? = null)

/** Which tokens may come where in a transcript, as Whisper was trained to write it (the Python side's decoding/speech_rules.py). */
internal class SpeechRules(
    vocab: Int, private val prompt: Int, private val eos: Int, private val speech: SpeechPart, private val timestamps: Boolean,
) : Constraint {
    override val scored = true
    private val first = speech.noTimestamps + 1 // the token of 0.00 s
    private val always = BooleanArray(vocab) { true }.also { mask ->
        for (token in speech.suppressed) mask[token] = false
        if (timestamps) mask[speech.noTimestamps] = false
    }

    override fun allowed(prefix: List<Int>, row: FloatArray): BooleanArray {
        val mask = always.copyOf()
        val text = prefix.subList(prompt, prefix.size)
        if (text.isEmpty()) for (token in speech.suppressedFirst) mask[token] = false
        if (timestamps) {
            pair(mask, text)
            preferTimes(mask, row)
        }
        return mask
    }

    /** Allow only valid next tokens after [text]: times in pairs, in ascending order. */
    private fun pair(mask: BooleanArray, text: List<Int>) {
        if (text.isEmpty()) {
            mask.fill(false, 0, first)
            speech.latestFirst?.let { if (first + it + 1 < mask.size) mask.fill(false, first + it + 1, mask.size) }
            return
        }
        val ends = text.last() >= first
        val opens = ends && (text.size < 2 || text[text.size - 2] >= first) // that time begins a segment: words come next
        if (opens) mask.fill(false, first, mask.size)
        else if (ends) mask.fill(false, 0, eos) // the end of a segment is followed by the start of another, or the end of the text
        val latest = text.lastOrNull { it >= first } ?: return
        // a segment may begin where one ends, but not end where it begins
        mask.fill(false, first, minOf(mask.size, latest + if (ends && !opens) 0 else 1))
    }

    /** Allow only times if their total probability exceeds that of every other token. */
    private fun preferTimes(mask: BooleanArray, row: FloatArray) {
        fun likeliest(tokens: IntRange) = tokens.filter { mask[it] }.maxOfOrNull { row[it].toDouble() } ?: Double.NEGATIVE_INFINITY
        val times = first until row.size
        val top = likeliest(times)
        if (top == Double.NEGATIVE_INFINITY) return
        val all = top + ln(times.sumOf { if (mask[it]) exp(row[it] - top) else 0.0 })
        if (all > likeliest(0 until first)) mask.fill(false, 0, first)
    }
}

/** Allows all tokens, and keeps the last row that it sees. */
private class KeptRow(private val vocab: Int) : Constraint {
    var row = FloatArray(0)

    override fun allowed(prefix: List<Int>, row: FloatArray): BooleanArray {
        this.row = row.copyOf()
        return BooleanArray(vocab) { true }
    }
}

private class Written(val tokens: IntArray, val text: String, logprobs: DoubleArray, val temperature: Double, val result: Result) {
    val logprob = logprobs.sum() / maxOf(1, logprobs.size) // the mean

    /** Bytes of the text over bytes that zlib makes of them. */
    val compression: Double
        get() {
            val bytes = text.toByteArray()
            val deflater = Deflater().apply { setInput(bytes); finish() }
            return try {
                bytes.size.toDouble() / deflater.deflate(ByteArray(2 * bytes.size + 64))
            } finally {
                deflater.end()
            }
        }
}

private class Listener(private val engine: Engine, private val asked: TranscriptionSettings, private val settings: Settings) {
    private val manifest = engine.bundle.manifest
    private val speech = manifest.speech
        ?: throw InvalidRequest("this bundle's model reads text, not sound: expected a speech model", "such as openai/whisper-small")
    private val features = manifest.target.source?.features ?: throw InvalidRequest("this bundle's model has no features of sound", "such as openai/whisper-small")
    private val vocab = manifest.target.facts.vocab
    private val end = manifest.eos.min() // special tokens and times come after it
    private val first = speech.noTimestamps + 1
    private var language = spoken()
    private var window: Source? = null
    private var before = asked.prompt?.takeIf { it.isNotBlank() }?.let { engine.codec.encode(" " + it.trim(), withSpecial = false) } ?: NONE

    private fun spoken(): String? {
        if (speech.languages.isNotEmpty()) return asked.language?.let { chooseLanguage(it, speech.languages.keys) }
        if ("en" !in namesOf(asked.language ?: "en")) throw InvalidRequest("this model knows English alone, not '${asked.language}'")
        return "en"
    }

    fun run(samples: FloatArray): Flow<Heard> = flow {
        val sound = logMel(samples, features.bands, features.frames * HOP)
        val frames = (samples.size / HOP).coerceIn(1, sound.frames)
        var seek = 0
        while (seek < frames) {
            val held = minOf(features.frames, frames - seek)
            // only a first window has silence after its sound
            val heard = if (seek == 0) sound.part(0, features.frames) else sound.part(seek, held).part(0, features.frames)
            window = Source.of(encoderRows(heard, features), 3 * features.columns, intArrayOf(speech.start))
            if (language == null) language = detected()
            val begin = speech.begin(language, asked.task, asked.timestamps)
            val most = engine.context / 2 - 1
            val lead = if (before.isEmpty() || speech.previous == null) NONE else intArrayOf(speech.previous) + before.takeLast(most)
            val silence = silence(lead + begin[0])
            val written = write(lead + begin, silence) { emit(Heard(it)) }
            if (quiet(silence) && !(asked.leastLogprob != null && written.logprob > asked.leastLogprob)) {
                seek += held
                continue
            }
            val (segments, moved) = cut(written, seek, held)
            before = if (asked.previousText && written.temperature <= FRESH) before + segments.flatMap { it.tokens.asList() } else NONE
            for (one in segments) if (one.start < one.end && one.text.isNotBlank()) emit(Heard("", one))
            seek += moved
        }
    }

    private suspend fun row(tokens: IntArray): FloatArray {
        val kept = KeptRow(vocab)
        val one = Settings("ar", 1, ignoreEos = true, sampling = SamplingParams(constraint = kept))
        engine.stream(window!!.beginning(tokens), one).collect {}
        return kept.row
    }

    private suspend fun detected(): String =
        row(intArrayOf(speech.start)).let { row -> speech.languages.maxByOrNull { row[it.value] }!!.key }

    /** Probability that the window has no speech; null = not computed. */
    private suspend fun silence(begin: IntArray): Double? {
        if (asked.mostSilence == null || speech.noSpeech == null) return null
        return exp(logSoftmaxAt(row(begin), speech.noSpeech))
    }

    private fun quiet(silence: Double?) = silence != null && silence > asked.mostSilence!!

    /** Write a window's text, at higher temperatures where it did not go well. */
    private suspend fun write(prompt: IntArray, silence: Double?, told: suspend (String) -> Unit): Written {
        val rules = SpeechRules(vocab, prompt.size, end, speech, asked.timestamps)
        var written: Written? = null
        for (temperature in asked.temperatures) {
            val sampling = settings.sampling.copy(temperature = temperature, constraint = rules)
            val how = settings.copy(sampling = sampling, maxNewTokens = engine.context - prompt.size, logprobs = true)
            val tokens = ArrayList<Int>()
            var result: Result? = null
            engine.stream(window!!.beginning(prompt), how).collect { chunk ->
                chunk.round?.tokens?.let { tokens += it.asList() }
                chunk.result?.let { result = it }
                told(text(tokens))
            }
            val made = tokens.dropLastWhile { it in manifest.eos }.toIntArray()
            written = Written(made, text(made.asList()), result!!.logprobs!!, temperature, result)
            val unlikely = asked.leastLogprob != null && written.logprob < asked.leastLogprob
            val repeats = asked.mostCompression != null && written.compression > asked.mostCompression
            if (unlikely && quiet(silence) || !unlikely && !repeats) break
        }
        return written!!
    }

    /**
     * Cut a window's text, of [held] frames from [seek] on, into segments -> these, and the number of frames done.  Two timestamps mark
     * the end of a segment and the beginning of the next.  A single timestamp at the end means that nothing is spoken after it.  Otherwise
     * the part after the last pair is transcribed again with the next window.
     */
    private fun cut(written: Written, seek: Int, held: Int): Pair<List<Segment>, Int> {
        val tokens = written.tokens
        fun seconds(token: Int) = (token - first) * TIME_STEP
        fun segment(part: List<Int>, start: Double, end: Double) =
            Segment(seek * FRAME + start, seek * FRAME + end, text(part), part.toIntArray(), language, written.result)
        if (!asked.timestamps) return listOf(segment(tokens.asList(), 0.0, held * FRAME)) to held
        val pairs = (1 until tokens.size).filter { tokens[it - 1] >= first && tokens[it] >= first }
        if (pairs.isEmpty()) {
            val length = tokens.lastOrNull { it > first }?.let(::seconds) ?: (held * FRAME)
            return listOf(segment(tokens.asList(), 0.0, length)) to held
        }
        val single = tokens.size > 1 && tokens[tokens.size - 2] < first && tokens.last() >= first
        val ends = if (single) pairs + tokens.size else pairs
        val segments = (listOf(0) + ends).zip(ends) { from, to ->
            tokens.slice(from until to).let { segment(it, seconds(it.first()), seconds(it.last())) }
        }
        val moved = (seconds(tokens[ends.last() - 1]) / FRAME).roundToInt()
        return segments to if (single || moved <= 0) held else minOf(held, moved)
    }

    private fun text(tokens: List<Int>): String = engine.decode(tokens.filter { it < end }.toIntArray())
}

/** Transcribe a recording, one channel at [RATE]: a flow like that of [Engine.stream]. */
fun Engine.transcription(
    samples: FloatArray, asked: TranscriptionSettings = TranscriptionSettings(), settings: Settings = defaults,
): Flow<Heard> = Listener(this, asked, settings).run(samples)

/** The same at once; not for the main thread of an app. */
fun Engine.transcribe(
    samples: FloatArray, asked: TranscriptionSettings = TranscriptionSettings(), settings: Settings = defaults,
): List<Segment> = runBlocking { transcription(samples, asked, settings).mapNotNull { it.segment }.toList() }
