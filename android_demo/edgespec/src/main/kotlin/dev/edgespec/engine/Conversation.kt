package dev.edgespec.engine

import dev.edgespec.decoding.Settings
import dev.edgespec.decoding.Tokens
import dev.edgespec.runtimes.Message
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.onEach

/**
 * Turns of one conversation, written down by the model's own template.  Every turn is tokenized from the text of all
 * messages; the longest beginning that it has in common with what a KV slot holds is not computed again: the whole
 * conversation so far, unless the answer's text has other tokens than were written.
 */
class Conversation internal constructor(private val engine: Engine, messages: List<Message>, private val settings: Settings) {
    private val all = ArrayList(messages)

    /** All messages so far, to keep and to begin again with. */
    val messages: List<Message> get() = synchronized(all) { ArrayList(all) }

    /** Ask, and keep the answer. */
    fun ask(content: String, settings: Settings = this.settings): Result = engine.collect(stream(content, settings))

    /** Answer a question as a stream; question and answer are kept once it has ended, and not if it was cancelled. */
    fun stream(content: String, settings: Settings = this.settings): Flow<Chunk> {
        val asked = messages + Message("user", content)
        val prompt = engine.encodeChat(asked)
        return engine.stream(prompt, settings).onEach { chunk ->
            chunk.result?.let { take(asked, prompt, it.text, it.tokens) }
        }
    }

    /** Keep what a cancelled stream had written so far as the answer to [content]. */
    fun keep(content: String, answer: String) = synchronized(all) {
        all.add(Message("user", content))
        all.add(Message("assistant", answer))
    }

    /**
     * Some tokenizers write the space before an answer as a part of its first word, and some templates write it themselves:
     * of the text with and without spaces around it, what gives back most of the tokens in a next turn is kept.
     */
    private fun take(asked: List<Message>, prompt: IntArray, text: String, tokens: IntArray) {
        val written = Tokens(prompt + tokens)
        fun same(answer: String): Int {
            val next = asked + Message("assistant", answer) + Message("user", "?")
            return Tokens(engine.encodeChat(next)).commonPrefix(written)
        }
        val texts = listOf(text, text.trimStart(), text.trim()).distinct()
        val answer = if (texts.size > 1) texts.maxBy(::same) else text
        synchronized(all) {
            all.clear()
            all.addAll(asked + Message("assistant", answer))
        }
    }
}
