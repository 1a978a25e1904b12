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
 * messages depends on their roles alone.  [gaps]: "start>user", "user>assistant", ..., and "user>answer" for what stands
 * before an answer; [trimmed]: roles whose content is written without the white space around it; [thoughts]: earlier answers
 * are written without what is before </think>.
 */
class ChatTemplate(private val gaps: Map<String, String>, private val trimmed: Set<String>, private val thoughts: Boolean) {
    /** The text of a conversation and what stands before its answer. */
    fun write(messages: List<Message>): String {
        if (messages.isEmpty()) throw InvalidRequest("expected a conversation of at least one message, got none")
        val text = StringBuilder()
        var last = "start"
        for (message in messages) {
            text.append(gap(last, message.role))
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
                    data["thoughts"].asBoolean,
                )
            } catch (error: InvalidRequest) {
                throw error
            } catch (error: Exception) { // whatever is wrong with it
                throw BundleError("$file: not readable: ${error.message}", "export the bundle again", error)
            }
        }
    }
}
