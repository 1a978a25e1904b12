package dev.edgespec.runtimes

import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer
import com.google.gson.*
import java.io.File

/* Hugging Face's tokenizers by DJL's library. */

private const val REPLACEMENT = "\ufffd"

/** DJL's library; [bytes] decodes what it decodes otherwise than Python. */
internal class DjlTokenizer(file: File, private val bytes: ByteTokens?) : AutoCloseable {
    private val tokenizer: HuggingFaceTokenizer

    init {
        // a folder's configuration could ask for truncation and padding, so only the file is read; offline it neither asks the network
        // whether this is a data center, nor tells DJL's authors
        System.setProperty("ai.djl.offline", "true")
        tokenizer = file.inputStream().use {
            val asks = mapOf("truncation" to "do_not_truncate", "padding" to "do_not_pad", "addSpecialTokens" to "true")
            HuggingFaceTokenizer.newInstance(it, asks)
        }
    }

    fun encode(text: String, withSpecial: Boolean): IntArray {
        val ids = tokenizer.encode(text, withSpecial, false).ids
        return IntArray(ids.size) { ids[it].toInt() }
    }

    fun decode(tokens: IntArray): String {
        val text = tokenizer.decode(LongArray(tokens.size) { tokens[it].toLong() }, true)
        return if (bytes != null && REPLACEMENT in text) bytes.decode(tokens) else text
    }

    override fun close() = tokenizer.close()
}

private typealias Step = (List<String>) -> List<String>

/**
 * Decoding for tokenizers with byte fallback, of text with bytes outside of characters.  As in sentencepiece, characters next to a broken
 * one stay; DJL's library writes U+FFFD for every byte of a run that has a broken one.
 */
internal class ByteTokens private constructor(
    private val names: Map<Int, String>, private val special: Set<Int>, private val steps: List<Step>,
) {
    fun decode(tokens: IntArray): String {
        var parts = tokens.filter { it !in special }.mapNotNull { names[it] }
        for (step in steps) parts = step(parts)
        return parts.joinToString("")
    }

    companion object {
        private val BYTE = Regex("<0x([0-9A-Fa-f]{2})>")

        /** null = the tokenizer has no byte fallback. */
        fun of(data: JsonObject): ByteTokens? {
            val decoder = data["decoder"]?.takeIf { it.isJsonObject }?.asJsonObject ?: return null
            val several = decoder["type"].asString == "Sequence"
            val all = if (several) decoder.getAsJsonArray("decoders").map { it.asJsonObject } else listOf(decoder)
            if (all.none { it["type"].asString == "ByteFallback" }) return null
            val (names, special) = HashMap<Int, String>() to HashSet<Int>() // all tokens by id, and those that are special
            val vocab: JsonElement? = data.getAsJsonObject("model")["vocab"]
            if (vocab != null && vocab.isJsonObject) vocab.asJsonObject.entrySet().forEach { names[it.value.asInt] = it.key }
            else vocab?.asJsonArray?.forEachIndexed { at, entry -> names[at] = entry.asJsonArray[0].asString }
            data.getAsJsonArray("added_tokens")?.map { it.asJsonObject }?.forEach { token ->
                names[token["id"].asInt] = token["content"].asString
                if (token["special"]?.asBoolean == true) special.add(token["id"].asInt)
            }
            return ByteTokens(names, special, all.map(::step))
        }

        private fun step(decoder: JsonObject): Step = when (val type = decoder["type"].asString) {
            "ByteFallback" -> ::characters
            "Fuse" -> { parts -> listOf(parts.joinToString("")) }
            "Replace" -> {
                val pattern = decoder.getAsJsonObject("pattern")["String"]
                    ?: throw IllegalArgumentException("a decoder that replaces a regular expression")
                each { it.replace(pattern.asString, decoder["content"].asString) }
            }
            "Strip" -> each { strip(it, decoder["content"].asString, decoder["start"].asInt, decoder["stop"].asInt) }
            "Metaspace" -> {
                val mark = decoder["replacement"].asString
                val first = decoder["prepend_scheme"]?.asString != "never"
                val run: Step = { parts ->
                    parts.mapIndexed { at, part -> (if (at == 0 && first) part.removePrefix(mark) else part).replace(mark, " ") }
                }
                run
            }
            else -> throw IllegalArgumentException("byte fallback together with a decoder $type")
        }

        private fun each(change: (String) -> String): Step = { parts -> parts.map(change) }

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

        private fun whole(bytes: ByteArray): Boolean = runCatching { bytes.decodeToString(throwOnInvalidSequence = true) }.isSuccess
    }
}
