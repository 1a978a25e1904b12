package dev.edgespec.runtimes

import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer
import com.google.gson.JsonElement
import com.google.gson.JsonObject
import com.google.gson.JsonParser
import dev.edgespec.BundleError
import dev.edgespec.InvalidRequest
import dev.edgespec.drafters.hex
import dev.edgespec.firstLine
import java.io.File
import java.security.MessageDigest

/* Text to tokens and back, by the tokenizers library of Hugging Face; it reads the bundle's file and never the network. */

private const val REPLACEMENT = "\ufffd"

class TextCodec(private val folder: File) : AutoCloseable {
    private val tokenizer: HuggingFaceTokenizer
    private val bytes: ByteTokens?

    /** All tokens by id, and those that are special. */
    private val names = HashMap<Int, String>()
    private val special = HashSet<Int>()

    init {
        val file = File(folder, "tokenizer.json")
        if (!file.isFile) throw BundleError("$folder: has no tokenizer.json", "download the model's tokenizer files too")
        try {
            val data = JsonParser.parseString(file.readText()).asJsonObject
            readVocabulary(data)
            bytes = ByteTokens.of(data, names, special)
            // a folder's configuration could ask for truncation and padding: the file alone is read; offline it neither asks
            // the network whether this is a data center, nor tells DJL's authors
            System.setProperty("ai.djl.offline", "true")
            tokenizer = file.inputStream().use {
                HuggingFaceTokenizer.newInstance(it, mapOf("truncation" to "do_not_truncate", "padding" to "do_not_pad", "addSpecialTokens" to "true"))
            }
        } catch (error: Exception) { // the libraries raise types of their own
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

    /** Number of tokens, added ones included. */
    val vocabSize: Int get() = names.size

    /** SHA-256 of all tokens with their ids, as hex digits: equal where token ids mean the same. */
    fun vocabularySha256(): String {
        val digest = MessageDigest.getInstance("SHA-256")
        for ((number, token) in names.toSortedMap()) {
            digest.update("$number ${token.codePointCount(0, token.length)} $token".toByteArray())
        }
        return hex(digest.digest())
    }

    /** Token ids of a text; with [withSpecial] whatever the tokenizer puts around it (BOS). */
    fun encode(text: String, withSpecial: Boolean = true): IntArray {
        if (!Charsets.UTF_8.newEncoder().canEncode(text)) { // lone surrogates: not text
            throw InvalidRequest("the prompt cannot be encoded: it has half of a surrogate pair")
        }
        val ids = try {
            tokenizer.encode(text, withSpecial, false).ids
        } catch (error: Exception) {
            throw InvalidRequest("the prompt cannot be encoded: ${firstLine(error)}", cause = error)
        }
        return IntArray(ids.size) { ids[it].toInt() }
    }

    /** Text of token ids, special tokens left out; bytes that are no part of a character are U+FFFD. */
    fun decode(tokens: IntArray): String {
        if (tokens.isEmpty()) return ""
        val text = tokenizer.decode(LongArray(tokens.size) { tokens[it].toLong() }, true)
        return if (bytes != null && REPLACEMENT in text) bytes.decode(tokens) else text
    }

    override fun close() = tokenizer.close()
}

/**
 * Decoding for tokenizers with byte fallback, of text with bytes that make no character.  As in sentencepiece, characters
 * beside a broken one stay; the library writes U+FFFD for every byte in a row of which one is broken.
 */
internal class ByteTokens private constructor(
    private val names: Map<Int, String>,
    private val special: Set<Int>,
    private val steps: List<(List<String>) -> List<String>>,
) {
    fun decode(tokens: IntArray): String {
        var parts = tokens.filter { it !in special }.mapNotNull { names[it] }
        for (step in steps) parts = step(parts)
        return parts.joinToString("")
    }

    companion object {
        private val BYTE = Regex("<0x([0-9A-Fa-f]{2})>")

        /** What decodes with this tokenizer; null if it has no byte fallback. */
        fun of(data: JsonObject, names: Map<Int, String>, special: Set<Int>): ByteTokens? {
            val decoder = data["decoder"]?.takeIf { it.isJsonObject }?.asJsonObject ?: return null
            val all = if (decoder["type"].asString == "Sequence") decoder.getAsJsonArray("decoders").map { it.asJsonObject } else listOf(decoder)
            if (all.none { it["type"].asString == "ByteFallback" }) return null
            return ByteTokens(names, special, all.map(::step))
        }

        private fun step(decoder: JsonObject): (List<String>) -> List<String> = when (val type = decoder["type"].asString) {
            "ByteFallback" -> ::characters
            "Fuse" -> { parts -> listOf(parts.joinToString("")) }
            "Replace" -> {
                val pattern = decoder.getAsJsonObject("pattern")["String"]?.asString ?: throw IllegalArgumentException("a decoder that replaces a regular expression")
                val content = decoder["content"].asString
                val run: (List<String>) -> List<String> = { parts -> parts.map { it.replace(pattern, content) } }
                run
            }
            "Strip" -> {
                val content = decoder["content"].asString
                val run: (List<String>) -> List<String> = { parts ->
                    parts.map { strip(it, content, decoder["start"].asInt, decoder["stop"].asInt) }
                }
                run
            }
            "Metaspace" -> {
                val mark = decoder["replacement"].asString
                val first = decoder["prepend_scheme"]?.asString != "never"
                val run: (List<String>) -> List<String> = { parts ->
                    parts.mapIndexed { at, part -> (if (at == 0 && first) part.removePrefix(mark) else part).replace(mark, " ") }
                }
                run
            }
            else -> throw IllegalArgumentException("byte fallback together with a decoder $type")
        }

        private fun strip(text: String, content: String, start: Int, stop: Int): String {
            var found = text
            repeat(start) { found = found.removePrefix(content) }
            repeat(stop) { found = found.removeSuffix(content) }
            return found
        }

        /** Runs of byte tokens as characters, U+FFFD for every byte that is part of none. */
        private fun characters(parts: List<String>): List<String> {
            val found = ArrayList<String>()
            val run = ArrayList<Byte>()
            fun flush() {
                var at = 0
                while (at < run.size) {
                    val size = (1..minOf(4, run.size - at)).firstOrNull { whole(run.subList(at, at + it).toByteArray()) } ?: 0
                    found.add(if (size > 0) String(run.subList(at, at + size).toByteArray()) else REPLACEMENT)
                    at += maxOf(size, 1)
                }
                run.clear()
            }
            for (part in parts) {
                val byte = BYTE.matchEntire(part)
                if (byte != null) {
                    run.add(byte.groupValues[1].toInt(16).toByte())
                } else {
                    flush()
                    found.add(part)
                }
            }
            flush()
            return found
        }

        private fun whole(bytes: ByteArray): Boolean = try {
            Charsets.UTF_8.newDecoder().decode(java.nio.ByteBuffer.wrap(bytes))
            true
        } catch (_: java.nio.charset.CharacterCodingException) {
            false
        }
    }
}
