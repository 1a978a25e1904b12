package dev.edgespec.engine

import dev.edgespec.Edgespec
import dev.edgespec.decoding.Tokens
import dev.edgespec.runtimes.*
import java.io.File
import java.io.IOException
import java.util.concurrent.*

/*
 * Prompts are read once: what passes left of them is kept on the disk, and found by the next process, as in Python
 * (edgespec/engine/prompt_cache.py), whose files these are.
 */

private const val LEAST = 64 // tokens that a file must have more than the slot
private const val EVERY = 2048 // tokens of a long prompt after which what was read so far is written
private const val TRIES = 8 // beginnings of one text that are tried, where files are damaged or gone
private const val MOST_STATES = 64L shl 20 // bytes of states that may wait to be written
private const val MOST = 256 // texts that may wait
private val NO_STATE = ByteArray(0)

/**
 * The prompts of a loaded bundle, under [cache], in at most [limit] bytes.  For the decode thread alone, which runs what
 * [between] is given between two rounds.
 */
internal class PromptCache(
    private val bundle: Bundle, private val library: File?, private val cache: File, limit: Long,
    private val paces: Map<Boolean, Pace>, between: (() -> ByteArray?) -> ByteArray?,
) {
    var worth = 1.0 // seconds: what is read again in less is not written
    private val writer = PromptWriter(cache, limit, between)
    private val folders = HashMap<String, PromptFolder?>() // by weights

    /** Wait until all that is to be written is, and take no more; not for the decode thread. */
    fun finish() = writer.finish()

    /**
     * Let a slot, the target's or a [draft]'s, hold the longest beginning of a text that it or a file has, but for its last
     * token; it gets room for [room] tokens -> what of it is on the disk; null = nothing is kept of this slot.
     */
    fun takeUp(slot: Slot, tokens: IntArray, room: Int, draft: Boolean): KeptText? {
        if (draft && slot.stateful) return null // it reads again what it goes back to anyway
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

    /** Fill a slot that holds [held] tokens of a text with what was found of it; false = a file was wrong, and is gone. */
    private fun restore(folder: PromptFolder, slot: Slot, text: IntArray, found: List<Piece>, held: Int, room: Int): Boolean {
        slot.reserve(room)
        slot.settle() // what the last request left to the next pass
        slot.takeUp(text.copyOf(found.length), found.length)
        val pieces = found.filter { it.stop > held || !it.whole }
        var done = false
        try {
            val states = arrayOfNulls<ByteArray>(pieces.size)
            pieces.indices.toList().parallelStream().forEach { states[it] = read(folder, pieces[it], slot) }
            done = states.all { it != null } && slot.putState(states.last()!!) && slot.takenUp()
        } finally {
            if (!done) slot.crop(if (slot.stateful) 0 else minOf(held, pieces[0].start)) // what was there may be written over
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

/** What a slot's bytes belong to, by name, as Python says it.  Those of ONNX Runtime round by version and processor. */
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

/** A slot's text, of which [length] tokens are on the disk, and what is to come there; [pace]: how fast it is read. */
internal class KeptText(
    private val writer: PromptWriter, private val folder: PromptFolder, private val slot: Slot, private var length: Int,
    private val pace: Pace, private val worth: Double,
) {
    private var stops: Set<Int> = emptySet()

    /** Keep what is read of a prompt as it is read, at the [ends] of turns, at the end, and every [EVERY] tokens. */
    fun watch(tokens: IntArray, ends: List<Int>) {
        val last = tokens.size - 1
        stops = (ends + last + (EVERY until last step EVERY)).filter { it in length + 1..last }.toSet()
        slot.onRead = { if (slot.tokens.size in stops) keep(tokens) }
    }

    /** Bound the next piece, so that it ends where something is kept. */
    fun rows(most: Int): Int = minOf(most, stops.map { it - slot.tokens.size }.filter { it > 0 }.minOrNull() ?: most)

    /** Write what the slot holds, the beginning of a text, if reading it again would take long. */
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

/** Writes in a thread of its own, a block at a time, while the slots still hold it. */
internal class PromptWriter(private val cache: File, private val limit: Long, private val between: (() -> ByteArray?) -> ByteArray?) {
    private val thread = ThreadPoolExecutor(
        1, 1, 1, TimeUnit.SECONDS, LinkedBlockingQueue(MOST),
        { run -> Thread(run, "edgespec-prompts").apply { isDaemon = true } }, ThreadPoolExecutor.DiscardPolicy(),
    ).apply { allowCoreThreadTimeOut(true) }

    /** Line up a text that [slot] holds, and the [state] behind it; false = too much waits already. */
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

        /** Copy what the slot has of some tokens; null = it has gone on to another text, or is closed. */
        private fun copy(start: Int, stop: Int): ByteArray? = between {
            if (slot.tokens.commonPrefix(Tokens(text)) < stop) return@between null
            val parts = slot.part(start, stop)
            ByteArray(parts.sumOf { it.remaining() }).also { bytes ->
                parts.fold(0) { at, part -> at + part.remaining().also { part.get(bytes, at, it) } }
            }
        }
    }
}
