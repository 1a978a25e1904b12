package dev.edgespec.app

import com.google.gson.Gson
import dev.edgespec.engine.*
import dev.edgespec.runtimes.*
import java.io.*
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import java.util.Locale
import kotlinx.coroutines.flow.Flow

/** A message as it is kept. */
private class Said(val role: String, val content: String)

private class Kept(
    val messages: List<Said> = emptyList(), val pieces: List<Piece> = emptyList(), val typed: String = "", val method: String = AUTO,
)

private const val LONGEST = 1024 // tokens of an answer; where the context ends before, it is cut there

/** The app's conversation, kept in [file]; a model without a chat template continues the text instead. */
class Chat(private val file: File) {
    private val messages = ArrayList<Said>()
    private var asked: Said? = null // a question whose answer is being written
    private val answer = StringBuilder()
    private var before = Transcript() // the question
    private var leftOut = 0 // messages that the model does not see any more
    var transcript = Transcript()
        private set
    var typed = "" // and not sent yet
    var method = AUTO

    init {
        // none, or half of a file, from a phone without power: an empty chat, rather than an app that does not start
        val kept: Kept? = runCatching { Gson().fromJson(file.readText(), Kept::class.java) }.getOrNull()
        if (kept != null) {
            messages.addAll(kept.messages)
            transcript = Transcript(kept.pieces)
            typed = kept.typed
            method = kept.method
        }
    }

    /** Take down a question; [answer] then answers it, [add] adds to that, and [end] ends it. */
    fun question(engine: Engine, text: String) {
        asked = Said("user", text)
        answer.clear()
        before = Transcript(transcript.pieces(true))
        val shown = if (!talks(engine)) text else if (transcript.text.isEmpty()) "$text\n\n" else "\n\n$text\n\n"
        transcript.add(shown, Kind.USER)
        typed = ""
    }

    /** The answer's stream; where the context is full the oldest of the chat is left out.  Not for the main thread: texts become tokens. */
    fun answer(engine: Engine): Flow<Chunk> {
        val settings = engine.defaults.copy(method = method.takeIf { it != AUTO && it in engine.methods }, maxNewTokens = LONGEST)
        if (!talks(engine)) return engine.stream(fitting(engine, engine.encode(transcript.text)), settings)
        val talk = engine.conversation(messages.map { Message(it.role, it.content) }).also { it.leftOut = leftOut }
        return asked!!.let { talk.stream(it.content, settings) }.also { leftOut = talk.leftOut }
    }

    /** The end of a text, cut where it stays cut for a while, so that it need not be read again each time. */
    private fun fitting(engine: Engine, tokens: IntArray): IntArray {
        val step = engine.context / 2
        val over = tokens.size + engine.context / 4 - engine.context
        return if (over <= 0) tokens else tokens.copyOfRange(minOf((over + step - 1) / step * step, tokens.size - 1), tokens.size)
    }

    fun add(chunk: Chunk, decode: (IntArray) -> String) {
        answer.append(chunk.text)
        transcript.add(chunk, decode)
    }

    /** Finish the answer, complete or stopped, and keep its text -> false: it is empty, and the question is to be sent again. */
    fun end(): Boolean {
        val question = asked ?: return false
        asked = null
        if (answer.isBlank()) {
            transcript = before
            if (typed.isEmpty()) typed = question.content
            return false
        }
        messages.add(question)
        messages.add(Said("assistant", answer.toString()))
        return true
    }

    fun clear() {
        messages.clear()
        asked = null
        leftOut = 0
        transcript = Transcript()
    }

    /** Return a function that saves the current state atomically, on any thread; a partial answer is kept. */
    fun kept(): () -> Unit {
        val half = asked?.takeIf { answer.isNotBlank() }?.let { listOf(it, Said("assistant", answer.toString())) } ?: emptyList()
        val waits = asked?.takeIf { half.isEmpty() }
        val shown = if (waits != null) before else transcript
        val kept = Kept(messages + half, shown.pieces(true), typed.ifEmpty { waits?.content ?: "" }, method)
        return {
            val part = File(file.path + ".part")
            part.writeText(Gson().toJson(kept))
            Files.move(part.toPath(), file.toPath(), StandardCopyOption.REPLACE_EXISTING)
        }
    }

    /** Whether the model has a chat template that can be followed. */
    fun talks(engine: Engine): Boolean = engine.chats
}

/** Origin of a piece of text: the user, the model, an accepted guess or a rejected one. */
enum class Kind { USER, MODEL, ACCEPTED, REFUSED }

data class Piece(val text: String, val kind: Kind)

/** Pieces of a chat by origin; rejected guesses are stored separately and shown on request. */
class Transcript(pieces: List<Piece> = emptyList()) {
    private val all = ArrayList(pieces)
    val size: Int get() = all.size

    /** All pieces from [first] on, with [refused] guesses or without. */
    fun pieces(refused: Boolean, first: Int = 0): List<Piece> = all.drop(first).filter { refused || it.kind != Kind.REFUSED }

    val text: String get() = all.filter { it.kind != Kind.REFUSED }.joinToString("") { it.text }

    fun add(text: String, kind: Kind) {
        if (text.isNotEmpty()) all.add(Piece(text, kind))
    }

    /** Add a round: accepted guesses, then the model's token. */
    fun add(chunk: Chunk, decode: (IntArray) -> String) {
        val round = chunk.round
        val accepted = round.tokens.copyOf(round.accepted)
        // both lengths lack the space that a decoder strips from a text's beginning, and the text that is held back
        val own = if (accepted.isEmpty()) chunk.text.length else decode(round.tokens).length - decode(accepted).length
        val at = (chunk.text.length - own).coerceIn(0, chunk.text.length)
        add(chunk.text.take(at), Kind.ACCEPTED)
        add(chunk.text.drop(at), Kind.MODEL)
        if (round.rejected.isNotEmpty()) add(decode(round.rejected), Kind.REFUSED)
    }
}

/** Tokens per second and acceptance during generation; [clock] in nanoseconds. */
class Live(private val clock: () -> Long = System::nanoTime) {
    private var begun = 0L // time of the first round: a prompt's pass emits nothing
    private var tokens = 0
    private var drafted = 0
    private var accepted = 0

    fun add(chunk: Chunk) {
        val round = chunk.round
        drafted += round.drafted.size
        accepted += round.accepted
        if (begun == 0L) begun = clock() else tokens += round.tokens.size
    }

    /** A readable line; empty before the second round. */
    val line: String
        get() {
            val seconds = (clock() - begun) / 1e9
            if (tokens == 0 || seconds <= 0) return ""
            return speedLine(tokens / seconds, accepted, drafted)
        }
}

/** Tokens per second, and acceptance. */
fun speedLine(speed: Double, accepted: Int, drafted: Int): String =
    if (drafted == 0) "%.1f ${say("tokens/s")}".format(Locale.ROOT, speed)
    else say("%.1f tokens/s, %.0f %% of %d guesses accepted").format(Locale.ROOT, speed, 100.0 * accepted / drafted, drafted)
