package dev.edgespec.app

import com.google.gson.*
import dev.edgespec.InvalidRequest
import dev.edgespec.engine.*
import dev.edgespec.runtimes.*
import java.io.File
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import java.util.Locale
import kotlinx.coroutines.flow.Flow

private class Kept(
    val messages: List<Message> = emptyList(), val pieces: List<Piece> = emptyList(), val typed: String = "", val method: String = AUTO,
)

const val AUTO = "auto"

/** The app's conversation, kept in [file]; a model without a chat template goes on with the text instead. */
class Chat(private val file: File) {
    private val messages = ArrayList<Message>()
    private var asked: String? = null // a question whose answer is being written
    private val answer = StringBuilder()
    var transcript = Transcript()
        private set
    var typed = "" // and not sent yet
    var method = AUTO

    init {
        val kept = try {
            if (file.isFile) Gson().fromJson(file.readText(), Kept::class.java) else null
        } catch (_: JsonParseException) {
            null // half of a file, from a phone without power: an empty chat, rather than an app that does not start
        }
        if (kept != null) {
            messages.addAll(kept.messages)
            transcript = Transcript(kept.pieces)
            typed = kept.typed
            method = kept.method
        }
    }

    /** Ask; the answer is added by [add], and kept by [end]. */
    fun ask(engine: Engine, text: String): Flow<Chunk> {
        val settings = engine.defaults.copy(method = method.takeIf { it != AUTO })
        val talks = talks(engine)
        val stream = if (talks) engine.conversation(messages).stream(text, settings) else engine.stream(transcript.text + text, settings)
        messages.add(Message("user", text))
        asked = text
        answer.clear()
        val shown = if (!talks) text else if (transcript.text.isEmpty()) "$text\n\n" else "\n\n$text\n\n"
        transcript.add(shown, Kind.USER)
        typed = ""
        save()
        return stream
    }

    fun add(chunk: Chunk, decode: (IntArray) -> String) {
        answer.append(chunk.text)
        transcript.add(chunk, decode)
    }

    /** The answer is complete, or was stopped: what there is of it stays. */
    fun end() {
        if (asked == null) return
        asked = null
        messages.add(Message("assistant", answer.toString()))
        save()
    }

    fun clear() {
        messages.clear()
        asked = null
        transcript = Transcript()
        save()
    }

    /** Write all of it, whole or not at all; half an answer is kept as an answer. */
    fun save() {
        val half = if (asked == null) emptyList() else listOf(Message("assistant", answer.toString()))
        val part = File(file.path + ".part")
        part.writeText(Gson().toJson(Kept(messages + half, transcript.pieces(true), typed, method)))
        Files.move(part.toPath(), file.toPath(), StandardCopyOption.REPLACE_EXISTING)
    }

    private fun talks(engine: Engine): Boolean = try {
        ChatTemplate.read(engine.bundle.path)
        true
    } catch (_: InvalidRequest) {
        false
    }
}

/** Who wrote a piece of text: the user, the model's own pass, or a guess that stood or did not. */
enum class Kind { USER, MODEL, ACCEPTED, REFUSED }

data class Piece(val text: String, val kind: Kind)

/** What a chat shows: pieces of text by who wrote them; refused guesses are kept apart, for whoever wants to see them. */
class Transcript(pieces: List<Piece> = emptyList()) {
    private val all = ArrayList(pieces)

    fun pieces(refused: Boolean): List<Piece> = all.filter { refused || it.kind != Kind.REFUSED }

    val text: String get() = all.filter { it.kind != Kind.REFUSED }.joinToString("") { it.text }

    fun add(text: String, kind: Kind) {
        if (text.isNotEmpty()) all.add(Piece(text, kind))
    }

    /** Add a round: its first tokens are guesses that stood, the last one is the model's own. */
    fun add(chunk: Chunk, decode: (IntArray) -> String) {
        val round = chunk.round
        chunk.pieces.forEachIndexed { at, text -> add(text, if (round != null && at < round.accepted) Kind.ACCEPTED else Kind.MODEL) }
        add(chunk.text.removePrefix(chunk.pieces.joinToString("")), Kind.MODEL) // what was held back until the end
        if (round != null && round.rejected.isNotEmpty()) add(decode(round.rejected), Kind.REFUSED)
    }
}

/** Tokens a second and the share of guesses that stand, while they are written; [clock] in nanoseconds. */
class Live(private val clock: () -> Long = System::nanoTime) {
    private var begun = 0L // when the first round was there: a prompt's pass writes nothing
    private var tokens = 0
    private var drafted = 0
    private var accepted = 0

    fun add(chunk: Chunk) {
        val round = chunk.round ?: return
        drafted += round.drafted.size
        accepted += round.accepted
        if (begun == 0L) begun = clock() else tokens += round.tokens.size
    }

    /** A line for people; empty before the second round. */
    val line: String
        get() {
            val seconds = (clock() - begun) / 1e9
            if (tokens == 0 || seconds <= 0) return ""
            val share = if (drafted > 0) ", %.0f %% of %d guesses accepted".format(Locale.ROOT, 100.0 * accepted / drafted, drafted) else ""
            return "%.1f tokens/s%s".format(Locale.ROOT, tokens / seconds, share)
        }
}
