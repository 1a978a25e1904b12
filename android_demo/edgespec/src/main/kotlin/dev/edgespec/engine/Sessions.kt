package dev.edgespec.engine

import dev.edgespec.runtimes.*
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest

/* Sessions that wait for the next turn of their conversations, in memory and on the disk. */

private const val FEW = 16 // tokens: a text of fewer is read again as fast as it is found
private const val MOST_IDLE = 4 // finished conversations whose KV is kept

/** Length of the common prefix of two texts. */
internal fun common(one: IntArray, other: IntArray): Int = one.indices.firstOrNull { it >= other.size || one[it] != other[it] } ?: one.size

/** A session and the text in it; [limited]: to the memory that was free when it was opened. */
internal class TextSession(val native: NativeSession, val limited: Boolean) {
    var text = IntArray(0)
    var adapter = 0 // that the text was read with
    var short = false // less memory was free than a text needed: another one may have more room
    private var asked = 0 // tokens of the last prompt

    fun begins(prompt: IntArray, with: Int) {
        text = prompt
        adapter = with
        asked = prompt.size
    }

    /** Whether a prompt continues the whole conversation; the last answer may be left out, and the question end in other tokens. */
    fun goesOn(prompt: IntArray, with: Int): Boolean =
        text.isEmpty() || adapter == with && common(text, prompt).let { text.size - it <= FEW || it > maxOf(FEW, asked - FEW) }
}

/** Hands every request a session, its conversation's or an abandoned one; from any thread. */
internal class SessionPool(private val make: () -> TextSession) {
    private val idle = ArrayList<TextSession>() // the one that was used last is last
    private val busy = ArrayList<TextSession>()

    /** The idle session whose text the prompt continues; else a new one, or where enough are idle the one not used for longest. */
    @Synchronized
    fun take(prompt: IntArray, adapter: Int): TextSession {
        val found = idle.filter { it.goesOn(prompt, adapter) }.maxByOrNull { common(it.text, prompt) } ?: if (idle.size < MOST_IDLE) null else idle.first()
        idle.remove(found)
        return (found ?: make()).also { busy.add(it) }
    }

    /** The same, without a text. */
    @Synchronized
    fun fresh(): TextSession = make().also { busy.add(it) }

    @Synchronized
    fun giveBack(session: TextSession) {
        busy.remove(session)
        if (session.short) return session.native.close()
        idle.add(session)
        while (idle.size > MOST_IDLE) idle.removeAt(0).native.close()
    }

    @Synchronized
    fun drop(session: TextSession) {
        busy.remove(session)
        session.native.close()
    }

    @get:Synchronized
    val bytes: Long get() = idle.sumOf { it.native.bytes } // one that is in use belongs to its thread

    @get:Synchronized
    val inUse: Boolean get() = busy.isNotEmpty()

    @get:Synchronized
    val any: Boolean get() = idle.isNotEmpty()

    @Synchronized
    fun clear(kept: Int = 0) {
        while (idle.size > kept) idle.removeAt(0).native.close()
    }
}

private const val LEAST = 64 // tokens that a file must have more than the session
private const val SAVED = ".text"
private const val TOKENS = ".tokens"
private const val DIGITS = 32

/**
 * Texts with their keys and values on the disk, for the next process, in at most [limit] bytes of [folder]: what a session saves, and its tokens
 * in a file next to it.
 */
internal class SavedTexts(private val folder: File, private val limit: Long) {
    var worth = 1.0 // seconds: texts that are read again in less time are not written

    private fun tokens(file: File): IntArray = try {
        val numbers = ByteBuffer.wrap(file.readBytes()).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer()
        IntArray(numbers.remaining()).also(numbers::get)
    } catch (_: IOException) {
        IntArray(0)
    }

    private fun all(): List<File> = folder.listFiles().orEmpty().filter { it.name.endsWith(TOKENS) }
    private fun saved(tokens: File) = File(folder, tokens.name.removeSuffix(TOKENS) + SAVED)

    /** Load into a session the text that begins most like a prompt, if it begins more like it than the session's. */
    @Synchronized
    fun restore(session: TextSession, prompt: IntArray) {
        if (session.adapter != 0) return // the library saves no texts of adapters
        val found = all().map { it to common(tokens(it), prompt) }.maxByOrNull { it.second } ?: return
        if (found.second < common(session.text, prompt) + LEAST) return
        try {
            session.native.restore(saved(found.first))
            session.text = tokens(found.first)
            listOf(found.first, saved(found.first)).forEach { it.setLastModified(System.currentTimeMillis()) }
        } catch (_: RuntimeException) { // damaged, of another version, or too long: it is read again
            remove(found.first)
        }
    }

    /** Write a session's text, if it took [seconds] to read. */
    @Synchronized
    fun keep(session: TextSession, seconds: Double) {
        val text = session.text
        if (seconds < worth || text.size < LEAST || session.adapter != 0) return
        try {
            folder.mkdirs()
            for (file in all()) if (tokens(file).let { it.size <= text.size && common(it, text) == it.size }) remove(file) // this one begins with it
            val room = minOf(limit, (folder.usableSpace + size()) / 10)
            val numbers = ByteBuffer.allocate(4 * text.size).order(ByteOrder.LITTLE_ENDIAN).also { it.asIntBuffer().put(text) }.array()
            val name = hex(MessageDigest.getInstance("SHA-256").digest(numbers)).take(DIGITS)
            val file = File(folder, name + SAVED)
            session.native.save(file)
            if (file.length() + numbers.size > room) file.delete()
            else File(folder, name + TOKENS).writeBytes(numbers) // last: a text without it is not found, and is removed when room is made
            makeRoom(room)
        } catch (_: IOException) { // no room, no rights: it is read again
        } catch (_: RuntimeException) {
        }
    }

    private fun size() = folder.listFiles().orEmpty().sumOf { it.length() }

    /** Remove what was used longest ago, until all is within [most] bytes, and what a killed process has left. */
    private fun makeRoom(most: Long) {
        folder.listFiles().orEmpty().filter { it.name.endsWith(SAVED) && !File(folder, it.name.removeSuffix(SAVED) + TOKENS).exists() }.forEach { it.delete() }
        for (file in all().sortedBy { it.lastModified() }) if (size() > most) remove(file) else break
    }

    private fun remove(tokens: File) {
        tokens.delete()
        saved(tokens).delete()
    }
}
