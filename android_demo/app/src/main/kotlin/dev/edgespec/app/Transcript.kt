package dev.edgespec.app

import dev.edgespec.engine.Chunk

/** Who wrote a piece of text: the user, the model's own pass, or a guess that stood or did not. */
enum class Kind { USER, MODEL, ACCEPTED, REFUSED }

data class Piece(val text: String, val kind: Kind)

/** What a chat shows: pieces of text by who wrote them; refused guesses are kept apart, for whoever wants to see them. */
class Transcript(private val decode: (IntArray) -> String) {
    private val all = ArrayList<Piece>()

    /** Pieces to show, with refused guesses or without. */
    fun pieces(refused: Boolean): List<Piece> = all.filter { refused || it.kind != Kind.REFUSED }

    fun ask(text: String) {
        all.add(Piece(text, Kind.USER))
    }

    /** Add a round: its first tokens are guesses that stood, the last one is the model's own. */
    fun add(chunk: Chunk) {
        val round = chunk.round
        chunk.pieces.forEachIndexed { at, text -> push(text, if (round != null && at < round.accepted) Kind.ACCEPTED else Kind.MODEL) }
        push(chunk.text.removePrefix(chunk.pieces.joinToString("")), Kind.MODEL) // what was held back until the end
        if (round != null && round.rejected.isNotEmpty()) push(decode(round.rejected), Kind.REFUSED)
    }

    private fun push(text: String, kind: Kind) {
        if (text.isNotEmpty()) all.add(Piece(text, kind))
    }

    /** Share of guesses that stood, and tokens a second: the line under a chat. */
    fun status(chunk: Chunk): String = chunk.result?.let { result ->
        val stats = result.stats
        "%s: %.1f tokens/s, %.0f%% of %d guesses accepted; %s".format(
            result.methodUsed, stats.tokensPerSecond, 100 * stats.acceptanceRate, stats.drafted, result.reason,
        )
    } ?: ""
}
