package dev.edgespec.runtimes

import com.google.gson.JsonParser
import dev.edgespec.BundleError
import dev.edgespec.InvalidRequest
import java.io.File

/** A message of a conversation; roles are `system`, `user`, `assistant`. */
data class Message(val role: String, val content: String)

internal const val CHAT_FILE = "chat.json"
private const val CHAT_VERSION = 1

/**
 * What a model's chat template writes, as data that the exporter has compared with the template: the text between two
 * messages depends on their roles alone.  [gaps]: "start>user", "user>assistant", ..., "user>answer" (what stands before an
 * answer) and "assistant>end"; [trimmed]: roles whose content is written without the white space around it.
 */
class ChatTemplate(private val gaps: Map<String, String>, private val trimmed: Set<String>) {
    /** The text of a conversation, with what stands before an answer unless [answer] is false. */
    fun write(messages: List<Message>, answer: Boolean = true): String {
        if (messages.isEmpty()) throw InvalidRequest("expected a conversation of at least one message, got none")
        val text = StringBuilder()
        var last = "start"
        for (message in messages) {
            text.append(gap(last, message.role))
            text.append(if (message.role in trimmed) message.content.trim() else message.content)
            last = message.role
        }
        return text.append(gap(last, if (answer) "answer" else "end")).toString()
    }

    private fun gap(before: String, after: String): String = gaps["$before>$after"] ?: throw InvalidRequest(
        "the model's chat template refuses these messages: ${if (after == "answer") "an answer" else "a message of role $after"} " +
            if (before == "start") "cannot come first" else "cannot follow one of role $before"
    )

    companion object {
        /** The template of a bundle. */
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
                        "this model's chat template cannot be followed here: ${it.asString}", "write the whole prompt yourself, as the model expects it",
                    )
                }
                return ChatTemplate(
                    data.getAsJsonObject("gaps").entrySet().associate { it.key to it.value.asString },
                    data.getAsJsonArray("trimmed").map { it.asString }.toSet(),
                )
            } catch (error: InvalidRequest) {
                throw error
            } catch (error: Exception) { // whatever is wrong with it
                throw BundleError("$file: not readable: ${error.message}", "export the bundle again", error)
            }
        }
    }
}
