package dev.edgespec.app

import com.google.gson.GsonBuilder
import dev.edgespec.Edgespec
import dev.edgespec.EdgespecError
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.Engine
import dev.edgespec.engine.Trim
import dev.edgespec.planning.MemoryFacts
import dev.edgespec.planning.showBytes
import dev.edgespec.planning.plan
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

/**
 * All that the app is doing, without any view: one for the process, so a screen that is made anew finds it as it was.
 * State is changed on one thread alone, the one that [post] gives work to, and [changed] is called there after each change.
 */
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
    var benched: List<MethodFigures> = emptyList()
        private set
    var proved: List<Proved> = emptyList()
        private set

    /** Methods to pick from. */
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
                "Stopped"
            } catch (error: EdgespecError) {
                error.message
            } catch (error: OutOfMemoryError) {
                "Out of memory: choose a shorter text or a smaller bundle"
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

    /** Open the bundle, if there is one. */
    fun load() {
        if (engine != null) return
        if (!around.bundle.isDirectory) {
            status = "Import a bundle: a folder made by `edgespec export`"
            return changed()
        }
        begin("Loading", { open() })
    }

    private fun open() {
        val made = Edgespec.load(around.bundle, library = around.library?.takeIf { it.isFile }, cache = around.cache, memory = around.memory())
        change {
            engine = made
            status = "${made.operators.kind} operators, ${made.context} tokens of context"
        }
    }

    /** Replace the bundle: copied, checked, renamed, and only then is the old one gone. */
    fun take(source: () -> BundleSource) = begin("Copying", {
        importBundle(source(), around.bundle) { copied -> change { status = "${showBytes(copied)} copied" } }
        val old = engine
        change { engine = null }
        old?.close()
        open()
    })

    /** Ask what was typed. */
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
        begin("Reading the prompt", {
            stream.collect { chunk ->
                show {
                    chat.add(chunk, made::decode)
                    live.add(chunk)
                    val result = chunk.result
                    status = if (result == null) live.line else "${result.methodUsed}: ${lineOf(result.stats)}; ${result.reason}"
                }
            }
        }, { chat.end() })
    }

    private fun lineOf(stats: dev.edgespec.decoding.Stats) = "%.1f tokens/s, %.0f %% of %d guesses accepted".format(
        Locale.ROOT, stats.tokensPerSecond, 100 * stats.acceptanceRate, stats.drafted,
    )

    /** End what is running, after the round at hand. */
    fun stop() {
        job?.cancel()
    }

    /** Every method against plain decoding, in turns. */
    fun measure(prompts: List<String>, settings: Settings, repeats: Int) {
        val made = engine ?: return
        begin("Measuring", {
            val found = bench(made, prompts, settings, repeats) { done, of, method ->
                ensureActive()
                change { status = "$done of $of: $method" }
            }
            change { benched = found; status = "Speed-up over ar, median and 95 % interval" }
        })
    }

    /** The golden vectors of the bundle, written again here. */
    fun prove() {
        val made = engine ?: return
        begin("Comparing", {
            val found = proof(made) { done, of ->
                ensureActive()
                change { status = "$done of $of" }
            }
            change { proved = found; status = verdict(found) }
        })
    }

    private fun verdict(found: List<Proved>) =
        if (found.isEmpty()) "This bundle has no golden vectors" else "${found.count { it.equal }} of ${found.size} golden vectors equal on this phone"

    /** The table of the bench screen, its headings first. */
    fun benchTable(): List<List<String>> = listOf(BENCH_HEADINGS) + benchRows(benched)

    /** What of the bundle fits [budget] bytes, a row for every method, headings first. */
    fun planTable(budget: Long): List<List<String>> {
        val made = engine ?: return emptyList()
        return listOf(listOf("method", "tokens", "memory", "predicted", "parts")) + plan(made.bundle.manifest, made.allowance, made.context, budget).map { run ->
            listOf(
                run.method,
                if (run.fits) "${run.context}" else "too large",
                showBytes(run.bytes),
                run.speedup?.let { "%.2fx".format(Locale.ROOT, it) } ?: "-",
                run.parts.joinToString(", ") { "${it.name} ${showBytes(it.bytes)}" },
            )
        }
    }

    /** A report to share, as JSON. */
    fun report(kind: String): String {
        val made = engine
        val found = linkedMapOf<String, Any?>(
            "kind" to kind, "edgespec_version" to Edgespec.VERSION, "device" to around.device, "operators" to made?.operators?.kind,
            "format" to made?.bundle?.manifest?.target?.format,
        )
        if (kind == "bench") found["methods"] = benched.map { it.asMap() } else found["golden"] = proved.map { it.asMap() }
        return GsonBuilder().setPrettyPrinting().serializeNulls().create().toJson(found)
    }

    /** Give memory back; texts stay. */
    fun trim(level: Trim) {
        val made = engine ?: return
        scope.launch { made.trim(level) }
    }

    /** The screen goes: what is there is on disk from now on. */
    fun save() = chat.save()

    fun close() {
        job?.cancel()
        engine?.close()
    }
}
