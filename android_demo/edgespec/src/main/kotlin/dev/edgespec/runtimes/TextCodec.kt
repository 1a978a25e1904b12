package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.*
import dev.edgespec.decoding.INSERTED
import dev.edgespec.drafters.hex
import dev.edgespec.images.Picture
import java.io.File
import java.security.MessageDigest

/* Text to tokens and back, by the tokenizers library of Hugging Face; it reads the bundle's file and never the network. */

class TextCodec(private val folder: File, name: String = "tokenizer.json") : AutoCloseable {
    private val tokenizer: Tokenizer
    private val names = HashMap<Int, String>() // all tokens by id, and those that are special
    private val special = HashSet<Int>()

    init {
        val file = File(folder, name)
        if (!file.isFile) throw BundleError("$folder: has no $name", "download the model's tokenizer files too")
        try {
            val data = JsonParser.parseString(file.readText()).asJsonObject
            readVocabulary(data)
            tokenizer = if (NativeTokenizer.found) NativeTokenizer.read(file) else DjlTokenizer(file, ByteTokens.of(data, names, special))
        } catch (error: Exception) { // the libraries raise their own types
            throw BundleError("$file: not a readable tokenizer: ${firstLine(error)}", "download it again", error)
        }
    }

    private fun readVocabulary(data: JsonObject) {
        val vocab: JsonElement? = data.getAsJsonObject("model")["vocab"]
        if (vocab != null && vocab.isJsonObject) {
            vocab.asJsonObject.entrySet().forEach { names[it.value.asInt] = it.key }
        } else {
            vocab?.asJsonArray?.forEachIndexed { at, entry -> names[at] = entry.asJsonArray[0].asString }
        }
        data.getAsJsonArray("added_tokens")?.forEach { entry ->
            val token = entry.asJsonObject
            names[token["id"].asInt] = token["content"].asString
            if (token["special"]?.asBoolean == true) special.add(token["id"].asInt)
        }
    }

    val vocabSize: Int get() = names.size // number of tokens, added ones included

    /** SHA-256 of all tokens with their ids, as hex digits: equal where token ids mean the same. */
    fun vocabularySha256(): String {
        val digest = MessageDigest.getInstance("SHA-256")
        for ((number, token) in names.toSortedMap()) {
            digest.update("$number ${token.codePointCount(0, token.length)} $token".toByteArray())
        }
        return hex(digest.digest())
    }

    /** Token ids of a text; [withSpecial] adds BOS and other special tokens. */
    fun encode(text: String, withSpecial: Boolean = true): IntArray {
        if (!Charsets.UTF_8.newEncoder().canEncode(text)) { // lone surrogates: not text
            throw InvalidRequest("the prompt cannot be encoded: it has half of a surrogate pair")
        }
        return try {
            tokenizer.encode(text, withSpecial)
        } catch (error: Exception) {
            throw InvalidRequest("the prompt cannot be encoded: ${firstLine(error)}", cause = error)
        }
    }

    /** Text of token ids, without special tokens and rows of pictures; bytes outside of characters become U+FFFD. */
    fun decode(tokens: IntArray): String {
        val words = if (tokens.any { it >= INSERTED }) tokens.filter { it < INSERTED }.toIntArray() else tokens
        return if (words.isEmpty()) "" else tokenizer.decode(words)
    }

    override fun close() = tokenizer.close()
}

private const val CONTEXT = 8 // tokens of the prompt that are enough context, if no character is cut
private const val HALF = 3 // maximum bytes of an incomplete character, each perhaps written as U+FFFD

/**
 * Text of a growing token list, given out as soon as it is complete UTF-8 and cannot begin a stop string.  The window is
 * the last tokens that gave text and those after them: enough for the space of the next word, and for characters that are
 * written by several tokens.
 */
class StreamDecoder(private val decode: (IntArray) -> String, prompt: IntArray = IntArray(0), stop: List<String> = emptyList()) {
    private val stop = stop.filter { it.isNotEmpty() }
    private val given = StringBuilder()
    private var window: IntArray = tail(prompt)
    private var settled = window.size // tokens of the window whose text is out
    private var out = decode(window).length // of the window's text, what is out
    private var held = "" // complete text that may begin a stop string
    val text: String get() = given.toString()

    /** The stop string that ended the text; null = none did. */
    var stopped: String? = null
        private set

    /** Add a token -> new text, possibly empty.  Once stopped, nothing more comes. */
    fun push(token: Int): String {
        if (stopped != null) return ""
        window += token
        val text = decode(window)
        val whole = whole(text)
        val fresh = if (whole > out) text.substring(out, whole) else ""
        out = minOf(maxOf(out, whole), text.length) // a prompt may end within a character
        if (whole == text.length) {
            if (fresh.trim(' ').isNotEmpty()) { // others stay: some decoders strip the spaces before the first word they see
                window = window.copyOfRange(settled, window.size)
                out = decode(window).length
            }
            settled = window.size
        }
        return give(held + fresh)
    }

    fun finish(): String {
        if (stopped != null) return ""
        val text = decode(window)
        val rest = if (out < text.length) text.substring(out) else ""
        out = text.length
        settled = window.size
        val now = give(held + rest)
        val last = held // empty if a stop string was found
        held = ""
        given.append(last)
        return now + last
    }

    /** The length of a text without those at its end that may be the beginning of another character. */
    private fun whole(text: String): Int = text.length - minOf(text.length - text.trimEnd('\ufffd').length, HALF)

    /** The end of the prompt, long enough to be written as in the whole. */
    private fun tail(prompt: IntArray): IntArray {
        val whole = decode(prompt)
        var count = CONTEXT
        while (count < prompt.size) {
            val part = decode(prompt.copyOfRange(prompt.size - count, prompt.size))
            if (part.isNotEmpty() && whole.endsWith(part)) break
            count *= 2
        }
        return prompt.copyOfRange(maxOf(0, prompt.size - count), prompt.size)
    }

    private fun give(candidate: String): String {
        held = ""
        var now = candidate
        val found = stop.map { candidate.indexOf(it) to it }.filter { it.first >= 0 }
        if (found.isNotEmpty()) {
            val (at, string) = found.minWith(compareBy({ it.first }, { it.second }))
            stopped = string
            now = candidate.take(at)
        } else {
            val keep = stop.maxOfOrNull { overlap(candidate, it) } ?: 0
            held = candidate.takeLast(keep)
            now = candidate.dropLast(keep)
        }
        given.append(now)
        return now
    }
}

/** Length of the longest end of [text] that begins [string]. */
private fun overlap(text: String, string: String): Int =
    (minOf(text.length, string.length - 1) downTo 1).firstOrNull { string.startsWith(text.takeLast(it)) } ?: 0

/** A message of a conversation; roles are `system`, `user`, `assistant`; a [picture] of the user's comes before the content. */
data class Message(val role: String, val content: String, val picture: Picture? = null)

internal const val CHAT_FILE = "chat.json"
private const val CHAT_VERSION = 1

/**
 * A model's chat template as data that the exporter has compared with the template: the text between two messages depends only on their
 * roles.  [gaps]: "start>user", "user>assistant", ..., "user>answer" for the text before an answer, and "start>user+image" for the text
 * before a message with a picture, including the picture's placeholder; [trimmed]: roles whose content is stripped of white space;
 * [thoughts]: earlier answers are written without the part before </think>.
 */
class ChatTemplate(private val gaps: Map<String, String>, private val trimmed: Set<String>, private val thoughts: Boolean) {
    fun write(messages: List<Message>): String {
        if (messages.isEmpty()) throw InvalidRequest("expected a conversation of at least one message, got none")
        val text = StringBuilder()
        var last = "start"
        for (message in messages) {
            text.append(gap(last, if (message.picture == null) message.role else "${message.role}+image"))
            var content = message.content
            if (thoughts && message.role == "assistant") content = content.substringAfterLast("</think>").trimStart('\n')
            text.append(if (message.role in trimmed) content.trim() else content)
            last = message.role
        }
        return text.append(gap(last, "answer")).toString()
    }

    private fun gap(before: String, after: String): String = gaps["$before>$after"] ?: throw InvalidRequest(
        "the model's chat template refuses these messages: ${if (after == "answer") "an answer" else "a message of role $after"} " +
            if (before == "start") "cannot come first" else "cannot follow one of role $before"
    )

    companion object {
        fun read(folder: File): ChatTemplate {
            val file = File(folder, CHAT_FILE)
            if (!file.isFile) {
                throw InvalidRequest("this model has no chat template", "use plain prompts, or export a chat-tuned model with its template")
            }
            try {
                val data = JsonParser.parseString(file.readText()).asJsonObject
                require(data["version"].asInt == CHAT_VERSION) { "version ${data["version"]}, expected $CHAT_VERSION" }
                data["refused"]?.let {
                    throw InvalidRequest(
                        "this model's chat template cannot be followed here: ${it.asString}",
                        "write the whole prompt yourself, as the model expects it",
                    )
                }
                return ChatTemplate(
                    data.getAsJsonObject("gaps").entrySet().associate { it.key to it.value.asString },
                    data.getAsJsonArray("trimmed").map { it.asString }.toSet(), data["thoughts"].asBoolean,
                )
            } catch (error: InvalidRequest) {
                throw error
            } catch (error: Exception) { // any defect
                throw BundleError("$file: not readable: ${error.message}", "export the bundle again", error)
            }
        }
    }
}
