package dev.edgespec.app

import dev.edgespec.engine.Chunk
import java.util.Locale

/** Who wrote a piece of text: the user, the model's own pass, or a guess that stood or did not. */
enum class Kind { USER, MODEL, ACCEPTED, REFUSED }

data class Piece(val text: String, val kind: Kind)

/** What a chat shows: pieces of text by who wrote them; refused guesses are kept apart, for whoever wants to see them. */
class Transcript(pieces: List<Piece> = emptyList()) {
    private val all = ArrayList(pieces)

    /** Pieces to show, with refused guesses or without. */
    fun pieces(refused: Boolean): List<Piece> = all.filter { refused || it.kind != Kind.REFUSED }

    /** What stands: text of the user and the model's. */
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
