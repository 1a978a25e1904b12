package dev.edgespec.app

import com.google.gson.GsonBuilder
import dev.edgespec.*
import dev.edgespec.audio.SoundSource
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.*
import dev.edgespec.planning.*
import dev.edgespec.reports.*
import java.io.File
import java.util.Locale
import kotlin.coroutines.cancellation.CancellationException
import kotlin.coroutines.resume
import kotlinx.coroutines.*

/** Where the app keeps things, and what it is told by the system. */
class Surroundings(
    val bundle: File, // a folder, there or not
    val chat: File,
    val cache: File? = null,
    val library: File? = null, // of native operators
    val device: Map<String, String> = emptyMap(), // what reports say of the machine
    val memory: () -> MemoryFacts? = { null },
)

/** All that the app is doing, without any view, one for the process; changed on the thread alone that [post] gives work to. */
class AppState(private val around: Surroundings, private val post: (() -> Unit) -> Unit) {
    private val scope = CoroutineScope(SupervisorJob() + Dispatchers.IO)
    private var job: Job? = null
    var changed: () -> Unit = {}
    var engine: Engine? = null
        private set
    var status = ""
        private set
    val busy: Boolean get() = job != null
    val chat = Chat(around.chat)

    // what screens are set to, which a rotation makes anew
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
    var hearing = "" // the text of the window at hand
        private set
    @Volatile
    var recording = false
        private set
    var benched: List<MethodFigures> = emptyList()
        private set
    var proved: List<Proved> = emptyList()
        private set

    val methods: List<String> get() = listOf(AUTO) + (engine?.methods ?: emptyList())

    /** Run [work] beside the screen, one at a time; an error becomes the status line. */
    private fun begin(says: String, work: suspend CoroutineScope.() -> Unit, after: () -> Unit = {}) {
        if (busy) return
        status = says
        job = scope.launch {
            val error = try {
                work()
                null
            } catch (_: CancellationException) {
                say("Stopped")
            } catch (error: EdgespecError) {
                error.message
            } catch (error: OutOfMemoryError) {
                say("Out of memory: choose a shorter text or a smaller bundle")
            }
            change {
                job = null
                if (error != null) status = error
                after()
            }
        }
        changed()
    }

    private fun change(how: () -> Unit) = post {
        how()
        changed()
    }

    /** The same, and go on once it is shown: nothing is written faster than a screen can follow. */
    private suspend fun show(how: () -> Unit) = suspendCancellableCoroutine { shown ->
        change {
            how()
            shown.resume(Unit)
        }
    }

    fun load() {
        if (engine != null) return
        if (!around.bundle.isDirectory) {
            status = say("Import a bundle: a folder made by `edgespec export`")
            return changed()
        }
        begin(say("Loading"), { open() })
    }

    private fun open() {
        val made = Edgespec.load(around.bundle, library = around.library, cache = around.cache, memory = around.memory())
        change {
            engine = made
            status = "${made.operators.kind} operators, ${made.context} tokens of context"
        }
    }

    /** Replace the bundle: copied, checked, renamed, and only then is the old one gone. */
    fun take(source: () -> BundleSource) = begin(say("Copying"), {
        importBundle(source(), around.bundle) { copied -> change { status = "${showBytes(copied)} copied" } }
        val old = engine
        change { engine = null }
        old?.close()
        open()
    })

    fun ask(text: String) {
        val made = engine
        if (made == null || text.isBlank() || busy) return
        val live = Live()
        val stream = try {
            chat.ask(made, text)
        } catch (error: EdgespecError) {
            status = error.message ?: ""
            return changed()
        }
        begin(say("Reading the prompt"), {
            stream.collect { chunk -> show { tell(chunk, live) { chat.add(chunk, made::decode) } } }
        }, { chat.end() })
    }

    private fun tell(chunk: Chunk, live: Live, add: () -> Unit) {
        add()
        live.add(chunk)
        val result = chunk.result
        status = if (result == null) live.line else "${result.methodUsed}: ${lineOf(result.stats)}; ${result.reason}"
    }

    /** Write what the model makes of [source], a line at a time. */
    fun translate() {
        val made = engine
        if (made == null || source.isBlank() || busy) return
        val languages = made.defaults.copy(sourceLanguage = from.ifEmpty { null }, targetLanguage = to.ifEmpty { null })
        val settings = languages.copy(method = chat.method.takeIf { it in methods && it != AUTO })
        translated = Transcript()
        begin(say("Reading the text"), {
            source.lines().forEachIndexed { at, line ->
                val live = Live()
                if (at > 0) show { translated.add("\n", Kind.MODEL) }
                if (line.isNotBlank()) made.stream(line, settings).collect { chunk ->
                    show { tell(chunk, live) { translated.add(chunk, made::decode) } }
                }
            }
        })
    }

    /** Write down what a microphone hears until [stop] is called, or a file holds. */
    fun listen(sound: SoundSource) {
        val made = engine
        if (made == null || busy) return
        heard = emptyList()
        hearing = ""
        recording = true
        begin(say("Recording: press Stop when all is said"), {
            val samples = sound.read { !recording || !isActive }
            recording = false
            show { status = say("Transcribing") }
            made.transcription(samples, asked).collect { one ->
                show {
                    hearing = one.text
                    one.segment?.let {
                        heard = heard + it
                        status = "${it.result.methodUsed}: ${lineOf(it.result.stats)}"
                    }
                }
            }
        }, {
            recording = false
            hearing = ""
        })
    }

    /** What was heard, a line a segment, with its times where it has them. */
    val transcript: String
        get() = heard.joinToString("") { one ->
            (if (asked.timestamps) "%.1f-%.1f ".format(Locale.ROOT, one.start, one.end) else "") + one.text.trim() + "\n"
        } + hearing.trim()

    private fun lineOf(stats: dev.edgespec.decoding.Stats) = "%.1f tokens/s, %.0f %% of %d guesses accepted".format(
        Locale.ROOT, stats.tokensPerSecond, 100 * stats.acceptanceRate, stats.drafted,
    )

    /** End what is being recorded, so that it is heard; else what is being done. */
    fun stop() {
        if (recording) recording = false else job?.cancel()
    }

    fun measure(prompts: List<String>, settings: Settings, repeats: Int) {
        val made = engine ?: return
        begin(say("Measuring"), {
            val found = bench(made, prompts, settings, repeats) { done, of, method ->
                ensureActive()
                change { status = "$done of $of: $method" }
            }
            change {
                benched = found
                status = "Speed-up over ar, median and 95 % interval"
            }
        })
    }

    fun prove() {
        val made = engine ?: return
        begin(say("Comparing"), {
            val found = proof(made) { done, of ->
                ensureActive()
                change { status = "$done of $of" }
            }
            change {
                proved = found
                val equal = "${found.count { it.equal }} of ${found.size} golden vectors equal on this phone"
                status = if (found.isEmpty()) "This bundle has no golden vectors" else equal
            }
        })
    }

    fun benchTable(): List<List<String>> = listOf(BENCH_HEADINGS) + benchRows(benched)
    fun proofTable(): List<List<String>> = listOf(listOf("vector", "method", "tokens", "result")) +
        proved.mapIndexed { at, one -> listOf("${at + 1}", one.method, "${one.expected.size}", if (one.equal) "equal" else "differs") }

    /** What of the bundle fits [budget] bytes, a row for every method, headings first. */
    fun planTable(budget: Long): List<List<String>> {
        val made = engine ?: return emptyList()
        val runs = plan(made.bundle.manifest, made.allowance, made.context, budget)
        return listOf(listOf("method", "tokens", "memory", "predicted", "parts")) + runs.map { run ->
            listOf(
                run.method, if (run.fits) "${run.context}" else "too large", showBytes(run.bytes),
                run.speedup?.let { "%.2fx".format(Locale.ROOT, it) } ?: "-",
                run.parts.joinToString(", ") { "${it.name} ${showBytes(it.bytes)}" },
            )
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
        scope.launch { made.trim(level) }
    }

    fun save() = chat.save() // the screen goes: what is there is on disk from now on

    fun close() {
        job?.cancel()
        engine?.close()
    }
}
