package dev.edgespec.runtimes

import dev.edgespec.drafters.hex
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel
import java.nio.file.*
import java.nio.file.attribute.PosixFilePermissions
import java.security.MessageDigest
import java.security.SecureRandom
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec

/*
 * Cache of computed prompts on the disk: the KV cache of their tokens, in blocks that the next process finds.  Names and files are those
 * of Python (edgespec/runtimes/files/prompts.py describes them), for texts without an owner.
 */

const val PROMPT_BLOCK = 256 // tokens of a whole block
private const val LINE = 64 // bytes of a file's beginning
private const val SEALED = 32 // of those before the seal
private val MAGIC = "EDGEPRMT".toByteArray()
private const val VERSION = 1
private const val MOST_STATES = 1L shl 30 // bytes
private const val HEX = 32 // digits of a hash in a name
private const val KEY_BYTES = 32
private const val STALE = 60_000L // milliseconds; an older partial file is abandoned
private val NAME = Regex("\\w+-(\\d{1,9})(-\\w+)?[.](keys|end)")

/** A file, of tokens [start] to [stop] of a text. */
internal class Piece(val file: File, val start: Int, val stop: Int) {
    val whole: Boolean get() = file.extension == "keys"
}

/** Tokens of the text that these are of, one after the other. */
internal val List<Piece>.length: Int get() = lastOrNull()?.stop ?: 0

/** A folder of prompts under [cache]; [root]: 32 bytes of [rootOf]. */
internal class PromptFolder(private val root: ByteArray, cache: File) {
    val path = File(promptsIn(cache), short(root))

    /** Find the files of the longest prefix of [tokens]; [stateful]: reading can only continue where states are stored. */
    fun find(tokens: IntArray, stateful: Boolean): List<Piece> {
        val chain = chain(tokens)
        val names = path.list().orEmpty().toSet()
        val blocks = blocks(chain).takeWhile { it.file.name in names }
        val ends = names.filter { it.endsWith(".end") }.groupBy { it.take(HEX) }
        for (count in blocks.size downTo if (stateful) 0 else blocks.size) {
            for (name in ends[short(chain[count])].orEmpty().sortedByDescending(::stopOf)) {
                val stop = stopOf(name)
                if (stop !in count * PROMPT_BLOCK..tokens.size) continue
                val end = end(chain, tokens, stop)
                if (name == end.file.name) return blocks.take(count) + end
            }
        }
        return if (stateful) emptyList() else blocks
    }

    /** All files of a text, which ends with states, or none. */
    fun pieces(tokens: IntArray, stateful: Boolean): List<Piece> {
        val chain = chain(tokens)
        val end = if (stateful || tokens.size % PROMPT_BLOCK > 0) listOf(end(chain, tokens, tokens.size)) else emptyList()
        return blocks(chain) + end
    }

    private fun chain(tokens: IntArray): List<ByteArray> = (0..tokens.size - PROMPT_BLOCK step PROMPT_BLOCK)
        .runningFold(root) { parent, start -> next(parent, tokens, start, start + PROMPT_BLOCK) }

    /**
     * Read a file into [keys] and compare its seal -> the states.  Keys and values are written before that is done.
     *
     * @throws IOException it differs from what was written, or cannot be read.
     */
    fun read(file: File, keys: List<ByteBuffer>): ByteArray = FileChannel.open(file.toPath(), StandardOpenOption.READ).use { channel ->
        val begin = ByteBuffer.allocate(LINE).order(ByteOrder.LITTLE_ENDIAN)
        fill(channel, begin, file)
        val size = begin.getLong(16)
        val more = begin.getLong(24)
        val known = begin.array().copyOf(MAGIC.size).contentEquals(MAGIC) && begin.getInt(8) == VERSION
        if (!known || size != keys.sumOf { it.remaining().toLong() } || more !in 0..MOST_STATES) throw IOException("$file: of another form")
        if (channel.size() != LINE + size + more) throw IOException("$file: not as long as it says")
        val states = ByteArray(more.toInt())
        val digest = MessageDigest.getInstance("SHA-256")
        for (part in keys + ByteBuffer.wrap(states)) {
            fill(channel, part.duplicate(), file)
            digest.update(part)
        }
        val seal = seal(file.name, begin.array().copyOf(SEALED), digest.digest())
        if (!MessageDigest.isEqual(seal, begin.array().copyOfRange(SEALED, LINE))) throw IOException("$file: changed after it was written")
        states
    }

    /** Write a file atomically, unless it exists. */
    fun write(file: File, keys: ByteArray, states: ByteArray) {
        if (file.exists()) return
        val begin = ByteBuffer.allocate(LINE).order(ByteOrder.LITTLE_ENDIAN)
        begin.put(MAGIC).putInt(VERSION).putInt(0).putLong(keys.size.toLong()).putLong(states.size.toLong())
        val digest = MessageDigest.getInstance("SHA-256").apply { update(keys) }.digest(states)
        begin.put(seal(file.name, begin.array().copyOf(SEALED), digest))
        writeWhole(file, begin.array(), keys, states)
    }

    /** Make the folder, which only its owner may enter. */
    fun make() {
        for (folder in listOf(path.parentFile, path)) {
            folder.mkdirs()
            Files.setPosixFilePermissions(folder.toPath(), PosixFilePermissions.fromString("rwx------"))
        }
    }

    private fun blocks(chain: List<ByteArray>): List<Piece> = chain.drop(1).mapIndexed { at, own ->
        val stop = (at + 1) * PROMPT_BLOCK
        Piece(File(path, "${short(own)}-$stop.keys"), stop - PROMPT_BLOCK, stop)
    }

    private fun end(chain: List<ByteArray>, tokens: IntArray, stop: Int): Piece {
        val parent = chain[stop / PROMPT_BLOCK]
        val start = stop / PROMPT_BLOCK * PROMPT_BLOCK
        return Piece(File(path, "${short(parent)}-$stop-${short(next(parent, tokens, start, stop, "end"))}.end"), start, stop)
    }

    private fun next(parent: ByteArray, tokens: IntArray, start: Int, stop: Int, what: String = ""): ByteArray {
        val text = ByteBuffer.allocate(8 * (stop - start)).order(ByteOrder.LITTLE_ENDIAN)
        for (at in start until stop) text.putLong(tokens[at].toLong())
        return hmac(parent, what.toByteArray(), text.array())
    }

    private fun seal(name: String, begin: ByteArray, digest: ByteArray) = hmac(root, name.toByteArray(), byteArrayOf(0), begin, digest)
}

/** Seal a folder's facts, on which the bytes of a slot depend; null = without a key, which cannot be made. */
internal fun rootOf(facts: Map<String, String>, cache: File): ByteArray? {
    val text = facts.toSortedMap().map { (name, value) -> "$name $value" }.joinToString("\u0000")
    return userKey(File(cache, "key"))?.let { hmac(it, "prompts\u0000$text\u0000\u0000".toByteArray()) }
}

/** Note that these are used now, all at the same time. */
internal fun touch(files: List<File>) = System.currentTimeMillis().let { now -> files.forEach { it.setLastModified(now) } }

/**
 * Remove the least recently used files, until [room] more bytes are within [limit], and abandoned ones.  Among files that were used at the
 * same time the furthest ends are removed first, so that a text's beginning remains.
 */
internal fun trim(cache: File, limit: Long, room: Long) {
    val young = System.currentTimeMillis() - STALE
    promptsIn(cache).walk().filter { ".part-" in it.name && it.lastModified() < young }.forEach { it.delete() }
    val files = filesIn(cache)
    var left = files.sumOf { it.length() } + room
    if (left <= limit) return
    for ((file, _) in files.map { it to it.lastModified() }.sortedWith(compareBy({ it.second }, { -stopOf(it.first.name) }))) {
        if (left <= limit * 9 / 10) break
        val size = file.length()
        if (file.delete()) left -= size
    }
    promptsIn(cache).listFiles().orEmpty().filter { it.list().orEmpty().isEmpty() }.forEach { it.delete() }
}

/** Bytes that all prompts may take: [limit], or a tenth of what the disk has for them, if that is less. */
internal fun roomFor(cache: File, limit: Long): Long {
    cache.mkdirs()
    return minOf(limit, (cache.usableSpace + filesIn(cache).sumOf { it.length() }) / 10)
}

private fun promptsIn(cache: File) = File(cache, "prompts")
private fun filesIn(cache: File) = promptsIn(cache).walk().filter { it.isFile && stopOf(it.name) > 0 }.toList()

/** After how many tokens of a text a file ends, by its name; 0 = it is none. */
private fun stopOf(name: String): Int = NAME.matchEntire(name)?.run { groupValues[1].toInt() } ?: 0

private fun short(hash: ByteArray) = hex(hash).take(HEX)

private fun hmac(key: ByteArray, vararg data: ByteArray): ByteArray = Mac.getInstance("HmacSHA256").run {
    init(SecretKeySpec(key, "HmacSHA256"))
    data.forEach(::update)
    doFinal()
}

/** The key in a file that only its owner may read, made on first use. */
@Synchronized
private fun userKey(file: File): ByteArray? = try {
    if (!file.exists()) {
        file.parentFile.mkdirs()
        writeWhole(file, ByteArray(KEY_BYTES).also(SecureRandom()::nextBytes))
    }
    file.readBytes().takeIf { it.size == KEY_BYTES }
} catch (_: IOException) {
    null
}

/** Write to a temporary file that only this user may read; it is renamed when all of it is on the disk. */
private fun writeWhole(file: File, vararg pieces: ByteArray) {
    val part = Files.createTempFile(file.parentFile.toPath(), ".${file.name}.part-", "")
    try {
        FileChannel.open(part, StandardOpenOption.WRITE).use { out ->
            for (piece in pieces.map(ByteBuffer::wrap)) while (piece.hasRemaining()) out.write(piece)
            out.force(true)
        }
        Files.move(part, file.toPath(), StandardCopyOption.ATOMIC_MOVE)
    } finally {
        Files.deleteIfExists(part)
    }
}

private fun fill(channel: FileChannel, to: ByteBuffer, file: File) {
    while (to.hasRemaining()) if (channel.read(to) < 0) throw IOException("$file: too short")
}
