package dev.edgespec.app

import com.google.gson.GsonBuilder
import dev.edgespec.*
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.*
import dev.edgespec.planning.*
import dev.edgespec.reports.*
import java.io.File
import kotlin.coroutines.cancellation.CancellationException
import kotlin.coroutines.resume
import kotlinx.coroutines.*

/** Folders of the app, and facts from the system. */
class Surroundings(
    val bundle: File, // a folder, there or not
    val chat: File,
    val cache: File? = null,
    val library: File = File("libedgespec.so"),
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
    var benched: List<MethodFigures> = emptyList()
        private set
    var proved: List<Proved> = emptyList()
        private set

    /** The current model, in one line. */
    val title: String
        get() = engine?.let { made ->
            val name = (made.bundle.manifest.provenance["model"]?.asString ?: "").substringAfterLast('/').substringAfter(':')
            listOf(name, made.bundle.manifest.format, made.operators.kind).filter { it.isNotEmpty() }.joinToString(" \u00b7 ")
        } ?: "edgespec"
    val methods: List<String> get() = listOf(AUTO) + (engine?.methods ?: emptyList())

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

    private fun demonstrate() = ask(examples.first())

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

    /** Stop the current work. */
    fun stop() {
        job?.cancel()
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

    fun report(kind: String): String {
        val made = engine
        val found = linkedMapOf<String, Any?>(
            "kind" to kind, "edgespec_version" to Edgespec.VERSION, "device" to around.device, "operators" to made?.operators?.kind,
            "format" to made?.bundle?.manifest?.format,
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
const val BENCH = "Bench"
const val PROOF = "Proof"
