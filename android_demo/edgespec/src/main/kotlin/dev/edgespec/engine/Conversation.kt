package dev.edgespec.engine

import dev.edgespec.decoding.*
import dev.edgespec.runtimes.Message
import kotlinx.coroutines.flow.*

/**
 * Turns of one conversation, written down by the model's own template.  Every turn is tokenized from the text of all
 * messages; the longest beginning that it has in common with what a session holds is not computed again: the whole
 * conversation so far, unless the answer's text has other tokens than were written.
 *
 * Where the context is full the oldest turns are left out of the prompt, as many at once as free half of it, so that the next
 * turns compute little again; the messages before the first question, such as a system message, stay in it.
 */
class Conversation internal constructor(private val engine: Engine, messages: List<Message>, private val settings: Settings) {
    private val all = ArrayList(messages)

    /** Messages that the model does not see any more; [messages] still has them. */
    var leftOut = 0

    /** All messages so far, to keep and to begin again with. */
    val messages: List<Message> get() = synchronized(all) { ArrayList(all) }

    fun ask(content: String, settings: Settings = this.settings): Result =
        engine.collect(stream(content, settings))

    /** Answer a question as a stream; question and answer are kept once it has ended, and not if it was cancelled. */
    fun stream(content: String, settings: Settings = this.settings): Flow<Chunk> {
        val asked = messages + Message("user", content)
        val prompt = fitting(asked, settings.maxNewTokens ?: engine.context)
        return engine.stream(prompt, settings).onEach { chunk ->
            chunk.result?.let { take(asked, prompt, it.text, it.tokens) }
        }
    }

    /** The prompt, without the oldest turns that leave no room for the answer (its length, or a quarter of the context). */
    private fun fitting(asked: List<Message>, length: Int): IntArray {
        val turns = asked.indices.filter { asked[it].role == "user" }.map { it - first(asked) }
        var left = if (leftOut in turns) leftOut else 0 // messages may have been taken away
        var prompt = written(asked, left)
        if (prompt.size + minOf(length, engine.context / 4) > engine.context) for (turn in turns.filter { it > left }) {
            left = turn
            prompt = written(asked, left)
            if (prompt.size <= engine.context / 2) break
        }
        leftOut = left
        return prompt
    }

    private fun first(messages: List<Message>) = messages.indexOfFirst { it.role == "user" }.let { if (it < 0) messages.size else it }

    private fun written(messages: List<Message>, left: Int): IntArray =
        first(messages).let { engine.chatPrompt(messages.take(it) + messages.drop(it + left)) }

    /** With or without the spaces around an answer: as its tokens come again in the next turn, for templates differ. */
    private fun take(asked: List<Message>, prompt: IntArray, text: String, tokens: IntArray) {
        val written = prompt + tokens
        fun same(answer: String): Int {
            val next = asked + Message("assistant", answer) + Message("user", "?")
            return common(written(next, leftOut), written)
        }
        val texts = listOf(text, text.trimStart(), text.trim()).distinct()
        val answer = if (texts.size > 1) texts.maxBy(::same) else text
        synchronized(all) {
            all.clear()
            all.addAll(asked + Message("assistant", answer))
        }
    }
}
