package dev.edgespec.runtimes

import com.google.gson.*
import dev.edgespec.*
import java.io.File

/* Text where the app has DJL's tokenizers: they read the bundle's file and never the network.  Our own library needs none of this. */

internal const val TOKENIZER_FILE = "tokenizer.json"

/** Text to tokens and back by DJL's library, where the app has not our own (edgespec/runtimes/tokenizer), as functions of the app. */
internal class DjlCodec(private val folder: File) : AppCodec {
    private val tokenizer: DjlTokenizer

    init {
        val file = File(folder, TOKENIZER_FILE)
        if (!file.isFile) throw BundleError("$folder: has no $TOKENIZER_FILE", "download the model's tokenizer files too")
        try {
            tokenizer = DjlTokenizer(file, ByteTokens.of(JsonParser.parseString(file.readText()).asJsonObject))
        } catch (error: Exception) { // the library raises its own types
            throw BundleError("$file: not a readable tokenizer: ${firstLine(error)}", "download it again", error)
        }
    }

    override fun encode(text: ByteArray, special: Boolean): IntArray = tokenizer.encode(text.toString(Charsets.UTF_8), special)
    override fun decode(tokens: IntArray): ByteArray = tokenizer.decode(tokens).toByteArray(Charsets.UTF_8)
    override fun close() = tokenizer.close()
}

/** A message of a conversation; roles are `system`, `user`, `assistant`. */
data class Message(val role: String, val content: String)

internal const val CHAT_FILE = "chat.json"
private const val CHAT_VERSION = 1

/**
 * A model's chat template as data that the exporter has compared with the template: the text between two messages depends only on their
 * roles.  [gaps]: "start>user", "user>assistant", ..., "user>answer" for the text before an answer, "user>continued" for that before an answer
 * that is continued; [trimmed]: roles whose content is stripped of white space;
 * [thoughts]: earlier answers are written without the part before </think>.
 */
class ChatTemplate(private val gaps: Map<String, String>, private val trimmed: Set<String>, private val thoughts: Boolean) {
    fun write(messages: List<Message>, continueFinal: Boolean = false): String {
        if (messages.isEmpty()) throw InvalidRequest("expected a conversation of at least one message, got none")
        val text = StringBuilder()
        var last = "start"
        for ((at, message) in messages.withIndex()) {
            val continued = continueFinal && at == messages.lastIndex
            if (continued && (message.role != "assistant" || "$last>continued" !in gaps)) throw InvalidRequest(
                "the last message of these cannot be continued here",
                "take libedgespec_tokenizer.so, which runs the model's own template" + if (message.role == "assistant") "" else ", or end with an assistant's message",
            )
            text.append(gap(last, if (continued) "continued" else message.role))
            var content = message.content
            if (thoughts && message.role == "assistant") content = content.substringAfterLast("</think>").trimStart('\n')
            text.append(if (message.role in trimmed) content.trim() else content)
            last = message.role
        }
        if (continueFinal) return if (last in trimmed) text.toString().trimEnd() else text.toString()
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
