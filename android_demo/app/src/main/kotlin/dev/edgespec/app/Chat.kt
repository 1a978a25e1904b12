package dev.edgespec.app

import com.google.gson.Gson
import com.google.gson.JsonParseException
import dev.edgespec.InvalidRequest
import dev.edgespec.engine.Chunk
import dev.edgespec.engine.Engine
import dev.edgespec.runtimes.ChatTemplate
import dev.edgespec.runtimes.Message
import java.io.File
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import kotlinx.coroutines.flow.Flow

/** What is kept of a chat on disk. */
private class Kept(val messages: List<Message> = emptyList(), val pieces: List<Piece> = emptyList(), val typed: String = "", val method: String = AUTO)

const val AUTO = "auto"

/**
 * The conversation of the app.  It outlives the screen, and, by its [file], the process: what was written until [save] was
 * called is there again.  A model without a chat template goes on with the text instead.
 */
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
        val question = Message("user", text)
        val stream = if (talks(engine)) {
            engine.conversation(messages).stream(text, settings)
        } else {
            engine.stream(transcript.text + text, settings)
        }
        messages.add(question)
        asked = text
        answer.clear()
        transcript.add(if (talks(engine) && transcript.text.isNotEmpty()) "\n\n$text\n\n" else if (talks(engine)) "$text\n\n" else text, Kind.USER)
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
