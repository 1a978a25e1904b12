package dev.edgespec.engine

import dev.edgespec.Edgespec
import dev.edgespec.decoding.Tokens
import dev.edgespec.runtimes.*
import java.io.File
import java.io.IOException
import java.util.concurrent.*

/*
 * Prompts are read once: their KV caches are kept on disk for the next process, as in Python
 * (edgespec/engine/prompt_cache.py), whose files these are.
 */

private const val LEAST = 64 // tokens that a file must have more than the slot
private const val EVERY = 2048 // tokens of a long prompt between two writes
private const val TRIES = 8 // beginnings of one text that are tried, where files are damaged or gone
private const val MOST_STATES = 64L shl 20 // bytes of states that may wait to be written
private const val MOST = 256 // texts that may wait
private val NO_STATE = ByteArray(0)

/**
 * The prompts of a loaded bundle, under [cache], in at most [limit] bytes.  Only for the decode thread, which runs what
 * [between] is given between two rounds.
 */
internal class PromptCache(
    private val bundle: Bundle, private val library: File?, private val cache: File, limit: Long,
    private val paces: Map<Boolean, Pace>, between: (() -> ByteArray?) -> ByteArray?,
) {
    var worth = 1.0 // seconds: texts that are read again in less time are not written
    private val writer = PromptWriter(cache, limit, between)
    private val folders = HashMap<String, PromptFolder?>() // by weights

    /** Wait until all that is to be written is, and take no more; not for the decode thread. */
    fun finish() = writer.finish()

    /**
     * Load into a slot, the target's or a [draft]'s, the longest prefix of a text that it or a file has, except the text's last token; it
     * gets room for [room] tokens -> the text's part on disk; null = this slot is not cached.
     */
    fun takeUp(slot: Slot, tokens: IntArray, room: Int, draft: Boolean): KeptText? {
        if (draft && slot.stateful) return null // it re-reads after going back in any case
        val folder = folders.getOrPut(slot.model.part.weights) {
            rootOf(originOf(bundle.manifest, slot.model, library), cache)?.let { PromptFolder(it, cache) }
        } ?: return null
        val text = tokens.copyOf(tokens.size - 1)
        var held = slot.cropped(slot.tokens.commonPrefix(Tokens(text)))
        var found = folder.find(text, slot.stateful)
        for (attempt in 1..TRIES) {
            if (found.length < held + LEAST || restore(folder, slot, text, found, held, minOf(slot.context, room))) break
            held = slot.tokens.size
            found = folder.find(text, slot.stateful)
        }
        touch(found.map { it.file })
        return KeptText(writer, folder, slot, found.length, paces.getValue(draft), worth)
    }

    /** Fill a slot that holds [held] tokens of a text from the cache; false = a file was wrong, and was deleted. */
    private fun restore(folder: PromptFolder, slot: Slot, text: IntArray, found: List<Piece>, held: Int, room: Int): Boolean {
        slot.reserve(room)
        slot.settle() // pending work of the last request
        slot.takeUp(text.copyOf(found.length), found.length)
        val pieces = found.filter { it.stop > held || !it.whole }
        var done = false
        try {
            val states = arrayOfNulls<ByteArray>(pieces.size)
            pieces.indices.toList().parallelStream().forEach { states[it] = read(folder, pieces[it], slot) }
            done = states.all { it != null } && slot.putState(states.last()!!) && slot.takenUp()
        } finally {
            if (!done) slot.crop(if (slot.stateful) 0 else minOf(held, pieces[0].start)) // the old content may be overwritten
        }
        return done
    }

    /** Read a file into the slot -> the states in it; null = it was damaged, or they are of another text, and it is gone. */
    private fun read(folder: PromptFolder, piece: Piece, slot: Slot): ByteArray? = try {
        folder.read(piece.file, slot.part(piece.start, piece.stop))
    } catch (_: IOException) {
        piece.file.delete()
        null
    }
}

/** Identity of a slot's bytes, by name, as in Python.  Those of ONNX Runtime round by version and processor. */
internal fun originOf(manifest: Manifest, model: Model, library: File?): Map<String, String> {
    val files = manifest.files
    val facts = linkedMapOf(
        "weights" to files.getValue(model.part.weights).sha256, "operators" to model.graph.operators,
        "graph" to files.getValue(model.graph.file).sha256, "edgespec" to Edgespec.VERSION,
    )
    if (model.part.highAlone) facts["planes"] = "high"
    if (!model.native) return facts + mapOf(
        "processor" to processor(), "ONNX Runtime" to onnxRuntimeVersion(), "threads" to "${minOf(model.threads, 2)}", // one, or several
    )
    val tables = model.part.attention?.tables?.let { files.getValue(it).sha256 }.orEmpty()
    return facts + mapOf("attention" to model.kv.named(), "key tables" to tables, "library" to identityOf(library!!))
}

private fun processor(): String {
    val said = linesOf("/proc/cpuinfo").filter { line -> listOf("model name", "Hardware", "flags", "Features").any(line::startsWith) }
    return (listOf(System.getProperty("os.arch")) + said.distinct()).joinToString("; ")
}

/** A slot's text, of which [length] tokens are on disk, and pending writes; [pace]: reading speed. */
internal class KeptText(
    private val writer: PromptWriter, private val folder: PromptFolder, private val slot: Slot, private var length: Int,
    private val pace: Pace, private val worth: Double,
) {
    private var stops: Set<Int> = emptySet()

    /** Write a prompt during its prefill, at the [ends] of turns, at the end, and every [EVERY] tokens. */
    fun watch(tokens: IntArray, ends: List<Int>) {
        val last = tokens.size - 1
        stops = (ends + last + (EVERY until last step EVERY)).filter { it in length + 1..last }.toSet()
        slot.onRead = { if (slot.tokens.size in stops) keep(tokens) }
    }

    /** Bound the next piece, so that it ends where something is kept. */
    fun rows(most: Int): Int = minOf(most, stops.map { it - slot.tokens.size }.filter { it > 0 }.minOrNull() ?: most)

    /** Write the slot's text, if reading it again would take long. */
    fun keep(text: IntArray) {
        val held = slot.tokens.commonPrefix(Tokens(text))
        if ((held - length) * pace.seconds < worth || held < LEAST) return
        if (slot.stateful && held < slot.tokens.size) return
        if (writer.add(folder, slot, text.copyOf(held), slot.state())) length = held
    }

    /** Watch no more. */
    fun close() {
        slot.onRead = null
    }
}

/** Writes in a separate thread, block by block, while the slots still hold the text. */
internal class PromptWriter(private val cache: File, private val limit: Long, private val between: (() -> ByteArray?) -> ByteArray?) {
    private val thread = ThreadPoolExecutor(
        1, 1, 1, TimeUnit.SECONDS, LinkedBlockingQueue(MOST),
        { run -> Thread(run, "edgespec-prompts").apply { isDaemon = true } }, ThreadPoolExecutor.DiscardPolicy(),
    ).apply { allowCoreThreadTimeOut(true) }

    /** Queue a text that [slot] holds, and the [state] after it; false = the queue is full. */
    fun add(folder: PromptFolder, slot: Slot, text: IntArray, state: ByteArray): Boolean {
        val waiting = thread.queue.sumOf { (it as Wanted).state.size.toLong() }
        if (waiting > 0 && waiting + state.size > MOST_STATES) return false
        thread.execute(Wanted(folder, slot, text, state))
        return true
    }

    fun finish() {
        thread.shutdown()
        thread.awaitTermination(Long.MAX_VALUE, TimeUnit.SECONDS)
    }

    private inner class Wanted(val folder: PromptFolder, val slot: Slot, val text: IntArray, val state: ByteArray) : Runnable {
        override fun run() {
            runCatching { write() } // no room, no rights, a closed engine: it is read again then
        }

        private fun write() {
            val pieces = folder.pieces(text, state.isNotEmpty())
            val missing = pieces.filterNot { it.file.exists() }
            if (missing.isEmpty()) return
            val block = copy(0, minOf(PROMPT_BLOCK, text.size)) ?: return
            val most = roomFor(cache, limit)
            val size = block.size.toLong() * missing.size + state.size
            if (size > most / 2) return
            trim(cache, most, size)
            folder.make()
            for (piece in missing) folder.write(piece.file, copy(piece.start, piece.stop) ?: break, if (piece.whole) NO_STATE else state)
            touch(pieces.map { it.file })
        }

        /** Copy the slot's bytes of some tokens; null = it holds another text now, or is closed. */
        private fun copy(start: Int, stop: Int): ByteArray? = between {
            if (slot.tokens.commonPrefix(Tokens(text)) < stop) return@between null
            val parts = slot.part(start, stop)
            ByteArray(parts.sumOf { it.remaining() }).also { bytes ->
                parts.fold(0) { at, part -> at + part.remaining().also { part.get(bytes, at, it) } }
            }
        }
    }
}
