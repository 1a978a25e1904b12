package dev.edgespec.app

import android.app.Activity
import android.app.ActivityManager
import android.content.ComponentCallbacks2
import android.content.Context
import android.graphics.Color
import android.os.Bundle
import android.os.Handler
import android.os.Looper
import android.text.SpannableStringBuilder
import android.text.Spanned
import android.text.style.ForegroundColorSpan
import android.text.style.StrikethroughSpan
import android.text.style.StyleSpan
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.ArrayAdapter
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.Spinner
import android.widget.Switch
import android.widget.TextView
import dev.edgespec.Edgespec
import dev.edgespec.EdgespecError
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.Engine
import dev.edgespec.engine.MemoryFacts
import dev.edgespec.engine.Trim
import java.io.File
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch

/** What ActivityManager says of memory. */
class PhoneMemory(context: Context) : MemoryFacts {
    private val info = ActivityManager.MemoryInfo().also {
        (context.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(it)
    }
    override val total: Long = info.totalMem
    override val available: Long = maxOf(0, info.availMem - info.threshold)
    override val low: Boolean = info.lowMemory
}

/**
 * One screen: text that a bundle continues, streamed, with accepted guesses in green and refused ones struck out in red.
 * The bundle is the folder `bundle` among the app's external files, where `adb push` can put it.
 */
class MainActivity : Activity() {
    private val scope = CoroutineScope(Dispatchers.Default)
    private val main = Handler(Looper.getMainLooper())
    private var engine: Engine? = null
    private var running: Job? = null
    private var transcript = Transcript { "" }
    private lateinit var text: TextView
    private lateinit var status: TextView
    private lateinit var prompt: EditText
    private lateinit var methods: Spinner
    private lateinit var refused: Switch

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        text = TextView(this).apply { setTextIsSelectable(true) }
        status = TextView(this)
        prompt = EditText(this).apply {
            hint = "Text to go on with"
            setText(state?.getString(PROMPT) ?: "")
        }
        methods = Spinner(this).apply { contentDescription = "Decoding method" }
        refused = Switch(this).apply {
            text = "Show refused guesses"
            setOnCheckedChangeListener { _, _ -> show() }
        }
        val go = Button(this).apply {
            text = "Go on"
            setOnClickListener { start() }
        }
        val stop = Button(this).apply {
            text = "Stop"
            setOnClickListener { running?.cancel() }
        }
        val buttons = LinearLayout(this).apply { listOf(methods, go, stop).forEach { addView(it) } }
        val scroll = ScrollView(this).apply { addView(text) }
        setContentView(
            LinearLayout(this).apply {
                orientation = LinearLayout.VERTICAL
                fitsSystemWindows = true
                addView(scroll, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
                listOf(status, refused, prompt, buttons).forEach { addView(it, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT)) }
            },
        )
        load()
    }

    private fun load() {
        status.text = "Loading"
        scope.launch {
            try {
                val library = File(applicationInfo.nativeLibraryDir, "libedgespec.so").takeIf { it.isFile }
                val folder = File(getExternalFilesDir(null), "bundle")
                val made = Edgespec.load(folder, library = library, cache = cacheDir, memory = PhoneMemory(this@MainActivity))
                main.post {
                    engine = made
                    transcript = Transcript(made::decode)
                    methods.adapter = ArrayAdapter(this@MainActivity, android.R.layout.simple_spinner_item, listOf("auto") + made.methods)
                    status.text = "${made.operators.kind} operators, ${made.context} tokens of context"
                }
            } catch (error: EdgespecError) {
                main.post { status.text = error.message }
            }
        }
    }

    private fun start() {
        val made = engine ?: return
        running?.cancel()
        val asked = prompt.text.toString()
        val settings = Settings(method = (methods.selectedItem as? String)?.takeIf { it != "auto" })
        transcript = Transcript(made::decode).also { it.ask(asked) }
        show()
        running = scope.launch {
            try {
                made.stream(asked, settings).collect { chunk ->
                    main.post {
                        transcript.add(chunk)
                        show()
                        if (chunk.result != null) status.text = transcript.status(chunk)
                    }
                }
            } catch (error: EdgespecError) {
                main.post { status.text = error.message }
            }
        }
    }

    private fun show() {
        val shown = SpannableStringBuilder()
        for (piece in transcript.pieces(refused.isChecked)) {
            val start = shown.length
            shown.append(piece.text)
            val spans = when (piece.kind) {
                Kind.USER -> listOf(StyleSpan(android.graphics.Typeface.BOLD))
                Kind.MODEL -> emptyList()
                Kind.ACCEPTED -> listOf(ForegroundColorSpan(GREEN))
                Kind.REFUSED -> listOf(ForegroundColorSpan(RED), StrikethroughSpan())
            }
            spans.forEach { shown.setSpan(it, start, shown.length, Spanned.SPAN_EXCLUSIVE_EXCLUSIVE) }
        }
        text.text = shown
    }

    override fun onSaveInstanceState(state: Bundle) {
        super.onSaveInstanceState(state)
        state.putString(PROMPT, prompt.text.toString())
    }

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        val made = engine ?: return
        val much = level >= ComponentCallbacks2.TRIM_MEMORY_BACKGROUND
        scope.launch { made.trim(if (much) Trim.ALL else Trim.SOME) }
    }

    override fun onDestroy() {
        super.onDestroy()
        scope.cancel()
        engine?.let { made -> Thread { made.close() }.start() }
    }

    private companion object {
        const val PROMPT = "prompt"
        val GREEN = Color.rgb(0x1B, 0x87, 0x3F)
        val RED = Color.rgb(0xC6, 0x28, 0x28)
    }
}
