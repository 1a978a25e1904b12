package dev.edgespec.app

import com.google.gson.GsonBuilder
import dev.edgespec.*
import dev.edgespec.audio.SoundSource
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.*
import dev.edgespec.images.PictureSource
import dev.edgespec.planning.*
import dev.edgespec.reports.*
import java.io.File
import java.util.Locale
import kotlin.coroutines.cancellation.CancellationException
import kotlin.coroutines.resume
import kotlinx.coroutines.*

/** Folders of the app, and facts from the system. */
class Surroundings(
    val bundle: File, // a folder, there or not
    val chat: File,
    val cache: File? = null,
    val library: File? = null, // of native operators
    val device: Map<String, String> = emptyMap(), // facts about the machine for reports
    val memory: MemoryFacts? = null,
    val heat: Heat? = null,
    val brought: () -> BundleSource? = { null }, // a bundle that came with the app
)

/** Result rows of a run, one per method: [share] of the longest bar, null = none. */
class Card(val title: String, val value: String, val details: List<Pair<String, String>>, val share: Double? = null)

/** State of the app without views, one per process; changed only on the thread of [post]. */
class AppState(private val around: Surroundings, private val post: (() -> Unit) -> Unit) {
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.IO)
    private val disk = Dispatchers.IO.limitedParallelism(1) // writes stay in order
    private val process = Machine.resident()
    private var job: Job? = null
    var changed: () -> Unit = {}
    var worked: (Boolean) -> Unit = {} // told when something begins, and when it has ended
    var engine: Engine? = null
        private set
    private val said = HashMap<String, String>()
    private var place = "" // the screen whose work is being done; empty = the whole app's

    /** Status line of the current screen, or of the app. */
    var status: String
        get() = said[screen] ?: said[""] ?: ""
        private set(text) {
            said[place] = text
        }
    var screen = CHAT
    val busy: Boolean get() = job != null
    val chat = Chat(around.chat)

    // settings of the screens, which a rotation recreates
    var refused = false // guesses are shown
    var prompts = "The\nOnce upon a time\nIn the morning,"
    var budget = 0.5 // of the free memory
    var source = "" // a text to translate, and its languages; empty = as the model has them
    var from = ""
    var to = ""
    var translated = Transcript()
        private set
    var asked = TranscriptionSettings()
    var heard: List<Segment> = emptyList()
        private set
    var hearing = "" // text of the current window
        private set
    @Volatile
    var recording = false
        private set
    var benched: List<MethodFigures> = emptyList()
        private set
    var proved: List<Proved> = emptyList()
        private set
    var profile: String? = null // of this device, as `edgespec plan --device` takes it
        private set

    /** The current model, in one line. */
    val title: String
        get() = engine?.let { made ->
            val name = (made.bundle.manifest.provenance["model"]?.asString ?: "").substringAfterLast('/').substringAfter(':')
            listOf(name, made.bundle.manifest.target.format, made.operators.kind).filter { it.isNotEmpty() }.joinToString(" \u00b7 ")
        } ?: "edgespec"
    val methods: List<String> get() = listOf(AUTO) + (engine?.methods ?: emptyList())
    val free: Long get() = around.memory?.available ?: 0

    /** Run [work] in the background, one at a time, and report its result to [after]; any error becomes the status line of [at]. */
    private fun begin(at: String, says: String, work: suspend CoroutineScope.() -> Unit, after: (String?) -> Unit = {}) {
        if (busy) return
        place = at
        if (at.isEmpty()) said.clear()
        status = says
        job = scope.launch {
            val error = try {
                work()
                null
            } catch (_: CancellationException) {
                say("Stopped")
            } catch (error: Throwable) { // a file that is gone, a right that was withdrawn, a library that is not there
                wordsOf(error)
            }
            change {
                job = null
                if (error != null) status = error
                worked(false)
                after(error)
            }
        }
        worked(true)
        tryTo { changed() }
    }

    /** Do something on the main thread; an error becomes a line. */
    fun tryTo(run: () -> Unit) = try {
        run()
    } catch (error: Throwable) {
        said[screen] = wordsOf(error)
        runCatching { changed() }
        Unit
    }

    private fun wordsOf(error: Throwable): String = when (error) {
        is EdgespecError -> error.message ?: error.what
        is OutOfMemoryError -> say("Out of memory: choose a shorter text or a smaller bundle")
        is SecurityException -> "${say("Android does not allow this any more: pick it again")} (${firstLine(error)})"
        else -> "${error.javaClass.simpleName}: ${firstLine(error)}"
    }

    private fun change(how: () -> Unit) = post { tryTo { how(); changed() } }

    /** The same, and continue once it is shown, so that output never outruns the screen. */
    private suspend fun show(how: () -> Unit) = suspendCancellableCoroutine { shown ->
        change {
            how()
            shown.resume(Unit)
        }
    }

    /** Open the existing bundle, or the one of the app, which then generates a first text. */
    fun start() {
        recoverBundle(around.bundle)
        if (around.bundle.isDirectory) return load()
        begin("", say("Copying"), {
            val brought = around.brought()
            if (brought == null || brought.files.isEmpty()) return@begin change { status = say("Import a bundle: a folder made by `edgespec export`") }
            copy(brought)
        }, { error -> if (error == null && engine != null) demonstrate() })
    }

    fun load() {
        if (engine != null) return
        if (!around.bundle.isDirectory) {
            said[""] = say("Import a bundle: a folder made by `edgespec export`")
            return changed()
        }
        begin("", say("Loading"), { open() })
    }

    private fun made(folder: File) =
        Edgespec.load(folder, library = around.library, cache = around.cache, memory = around.memory, heat = around.heat)

    private fun open() {
        val made = made(around.bundle)
        change {
            engine = made
            status = say("%s operators, %d tokens of context").format(made.operators.kind, made.context)
        }
    }

    /** Replace the bundle: copied, checked, opened, renamed, and only then is the old one gone. */
    fun take(source: () -> BundleSource) = begin("", say("Copying"), { copy(source()) })

    private fun copy(source: BundleSource) {
        try {
            importBundle(source, around.bundle, { copied -> change { status = say("%s copied").format(showBytes(copied)) } }) { folder ->
                val old = engine // both may have no room
                change { engine = null }
                old?.close()
                made(folder).close()
            }
        } catch (error: Throwable) {
            if (around.bundle.isDirectory && engine?.isOpen != true) runCatching { open() } // keep the previous one
            throw error
        }
        open()
    }

    /** First suggestions: the bundle's golden prompts, or questions to a chat model. */
    val examples: List<String>
        get() {
            val made = engine ?: return emptyList()
            if (chat.talks(made)) return listOf(say("What can you do?"), say("Tell me a short story"))
            return made.bundle.manifest.golden.map { made.decode(it.prompt).trim() }.filter { it.isNotEmpty() }.distinct().take(3).ifEmpty { listOf("Once upon a time") }
        }

    private fun demonstrate() {
        val made = engine ?: return
        if (made.bundle.manifest.speech != null) return
        if (made.sources == null) return ask(examples.first())
        source = examples.first()
        translate()
    }

    /** Let a picture go with the next question. */
    fun attach(source: PictureSource) = begin(CHAT, say("Reading the picture"), {
        val name = chat.pictures.keep(source.read())
        change {
            chat.attached = name
            status = say("The picture goes with your next message")
        }
    })

    fun ask(text: String) {
        val made = engine
        if (made == null || text.isBlank() || busy) return
        val live = Live()
        chat.question(made, text)
        begin(CHAT, say("Reading the prompt"), {
            chat.answer(made).collect { chunk -> show { tell(chunk, live) { chat.add(chunk, made::decode) } } }
        }, { error ->
            if (chat.end()) save() else if (error == null) status = say("The model answered with nothing")
        })
    }

    private fun tell(chunk: Chunk, live: Live, add: () -> Unit) {
        add()
        live.add(chunk)
        val result = chunk.result
        if (result == null) {
            status = live.line
            return
        }
        val cut = if (result.finish == "length" || result.finish == "context") "; ${say("cut here: ask it to continue")}" else ""
        status = "${result.methodUsed}: ${speedLine(result.stats.tokensPerSecond, result.stats.accepted, result.stats.drafted)}; ${result.reason}$cut"
    }

    /** Translate [source] line by line. */
    fun translate() {
        val made = engine
        if (made == null || source.isBlank() || busy) return
        val languages = made.defaults.copy(sourceLanguage = from.ifEmpty { null }, targetLanguage = to.ifEmpty { null })
        val settings = languages.copy(method = chat.method.takeIf { it in methods && it != AUTO })
        translated = Transcript()
        val lines = source.lines()
        begin(TRANSLATE, say("Reading the text"), {
            lines.forEachIndexed { at, line ->
                val live = Live()
                if (at > 0) show { translated.add("\n", Kind.MODEL) }
                if (line.isNotBlank()) made.cut(line, settings).forEachIndexed { number, part ->
                    if (number > 0) show { translated.add(" ", Kind.MODEL) }
                    made.stream(part, settings).collect { chunk -> show { tell(chunk, live) { translated.add(chunk, made::decode) } } }
                }
            }
        })
    }

    /** Transcribe the microphone until [stop] is called, or a file. */
    fun listen(sound: SoundSource) {
        val made = engine
        if (made == null || busy) return
        heard = emptyList()
        hearing = ""
        recording = true
        begin(LISTEN, say("Recording: press Stop at the end"), {
            val samples = sound.read { !recording || !isActive }
            recording = false
            show { status = say("Transcribing") }
            made.transcription(samples, asked).collect { one ->
                show {
                    hearing = one.text
                    one.segment?.let {
                        heard = heard + it
                        status = "${it.result.methodUsed}: ${it.result.stats.run { speedLine(tokensPerSecond, accepted, drafted) }}"
                    }
                }
            }
        }, {
            recording = false
            hearing = ""
        })
    }

    /** The transcript, one line per segment, with times if there are any. */
    val transcript: String
        get() = heard.joinToString("") { one ->
            (if (asked.timestamps) "%.1f-%.1f ".format(Locale.ROOT, one.start, one.end) else "") + one.text.trim() + "\n"
        } + hearing.trim()

    /** Stop the recording, so that it is transcribed; else stop the current work. */
    fun stop() {
        if (recording) recording = false else job?.cancel()
    }

    /** Run something with progress, and [show] its result -> the status line. */
    private fun <T> examine(at: String, says: String, run: (Engine, (String) -> Unit) -> T, show: (T) -> String) {
        val made = engine ?: return
        begin(at, says, {
            val found = run(made) { line ->
                ensureActive()
                change { status = line }
            }
            change { status = show(found) }
        })
    }

    fun measure(prompts: List<String>, settings: Settings, repeats: Int) = examine(BENCH, say("Measuring"), { made, tell ->
        bench(made, prompts, settings, repeats) { done, of, method -> tell("$done / $of: $method") }
    }) { found ->
        benched = found
        say("Speed over plain decoding (ar), median and 95 % interval")
    }

    /** Measure this device for `edgespec plan --device`. */
    fun calibrate(): Unit = examine(PLAN, say("Measuring"), { made, tell ->
        val device = Machine(around.device["model"] ?: "", around.memory?.total ?: 0)
        calibrate(made, device, process = process) { part, done, of -> tell("$part: $done / $of") }
    }) { found ->
        profile = found
        say("Measured: share the profile, and plan with `edgespec plan --device FILE`")
    }

    fun prove() = examine(PROOF, say("Comparing"), { made, tell -> proof(made) { done, of -> tell("$done / $of") } }) { found ->
        proved = found
        if (found.isEmpty()) say("This bundle has no golden vectors")
        else say("%d of %d texts equal on this device").format(found.count { it.equal }, found.size)
    }

    fun benchCards(): List<Card> {
        val most = benched.maxOfOrNull { it.speed } ?: 1.0
        return benched.sortedByDescending { it.speed }.map { one ->
            val row = BENCH_HEADINGS.zip(benchRow(one))
            Card(one.method, row[1].second.substringBefore(" "), row, one.speed / most)
        }
    }

    /** A method's golden vectors, generated again here. */
    fun proofCards(): List<Card> = proved.groupBy { it.method }.map { (method, all) ->
        val equal = all.count { it.equal }
        Card(method, "$equal / ${all.size}", listOf("tokens" to "${all.sumOf { it.expected.size }}", "result" to if (equal == all.size) say("equal") else say("differs")))
    }

    /** Methods and contexts of the bundle that fit [budget] bytes. */
    fun planCards(budget: Long): List<Card> {
        val made = engine ?: return emptyList()
        return plan(made.bundle.manifest, made.allowance, made.context, budget).map { run ->
            val details = listOfNotNull("memory" to showBytes(run.bytes), run.speedup?.let { "predicted" to "%.2fx".format(Locale.ROOT, it) })
            val fits = if (run.fits) say("%d tokens").format(run.context) else say("too large")
            Card(run.method, fits, details + run.parts.map { it.name to showBytes(it.bytes) }, minOf(1.0, run.bytes.toDouble() / maxOf(budget, 1)))
        }
    }

    fun report(kind: String): String {
        val made = engine
        val found = linkedMapOf<String, Any?>(
            "kind" to kind, "edgespec_version" to Edgespec.VERSION, "device" to around.device, "operators" to made?.operators?.kind,
            "format" to made?.bundle?.manifest?.target?.format,
        )
        if (kind == "bench") found["methods"] = benched.map { it.asMap() } else found["golden"] = proved.map { it.asMap() }
        return GsonBuilder().setPrettyPrinting().serializeNulls().create().toJson(found)
    }

    fun trim(level: Trim) {
        val made = engine ?: return
        scope.launch { runCatching { made.trim(level) } } // it may be closed by now
    }

    /** Save the state: the screen may close. */
    fun save(): Job {
        val write = chat.kept()
        return scope.launch(disk) {
            try {
                write()
            } catch (error: Exception) {
                change { said[CHAT] = "${say("The chat could not be kept")}: ${firstLine(error)}" }
            }
        }
    }

    fun close() {
        job?.cancel()
        runBlocking { save().join() } // earlier writes are done, also
        engine?.close()
    }
}

const val CHAT = "Chat"
const val TRANSLATE = "Translate"
const val LISTEN = "Listen"
const val BENCH = "Bench"
const val PLAN = "Plan"
const val PROOF = "Proof"
