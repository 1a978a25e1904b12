package dev.edgespec.app

import android.app.*
import android.content.*
import android.Manifest.permission.RECORD_AUDIO
import android.content.pm.PackageManager.PERMISSION_GRANTED
import android.media.*
import android.os.Build
import android.os.Bundle
import android.os.Handler
import android.os.Looper
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.ViewGroup.LayoutParams.WRAP_CONTENT
import android.widget.FrameLayout
import android.widget.LinearLayout
import android.widget.TextView
import dev.edgespec.EdgespecError
import dev.edgespec.audio.*
import dev.edgespec.engine.Trim
import dev.edgespec.planning.MemoryFacts
import java.io.File

class PhoneMemory(context: Context) : MemoryFacts {
    private val info = ActivityManager.MemoryInfo().also {
        (context.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(it)
    }
    override val total: Long = info.totalMem
    override val available: Long = maxOf(0, info.availMem - info.threshold)
    override val low: Boolean = info.lowMemory
}

private const val LONGEST = 600 * RATE // samples of a recording

/** The phone's microphone; its permission must be given. */
class Microphone : SoundSource {
    override fun read(stopped: () -> Boolean): FloatArray {
        val (mono, form) = AudioFormat.CHANNEL_IN_MONO to AudioFormat.ENCODING_PCM_16BIT
        val piece = ShortArray(RATE / 10)
        val size = maxOf(AudioRecord.getMinBufferSize(RATE, mono, form), 2 * RATE)
        val record = AudioRecord(MediaRecorder.AudioSource.VOICE_RECOGNITION, RATE, mono, form, size)
        var found = FloatArray(0)
        var count = 0
        try {
            if (record.state != AudioRecord.STATE_INITIALIZED) throw EdgespecError(say("The microphone may not be used"))
            record.startRecording()
            while (!stopped() && count < LONGEST) {
                val read = record.read(piece, 0, piece.size)
                if (read < 0) break
                if (count + read > found.size) found = found.copyOf(2 * found.size + piece.size)
                for (at in 0 until read) found[count++] = piece[at] / 32768f
            }
        } finally {
            record.release()
        }
        return found.copyOf(count)
    }
}

/** The process: what it is doing outlives its screens. */
class App : Application() {
    lateinit var state: AppState
        private set

    override fun onCreate() {
        super.onCreate()
        val main = Handler(Looper.getMainLooper())
        val device = mapOf("model" to Build.MODEL, "android" to Build.VERSION.RELEASE, "abi" to Build.SUPPORTED_ABIS.joinToString())
        val around = Surroundings(
            bundle = File(getExternalFilesDir(null), "bundle"), // where `adb push` can put one, too
            chat = File(filesDir, "chat.json"),
            cache = cacheDir,
            library = File("libedgespec.so"), // by its name: it stays in the APK
            device = device,
            memory = { PhoneMemory(this) },
        )
        state = AppState(around) { work -> main.post(work) }
        val brought = Assets(assets)
        if (around.bundle.isDirectory || brought.files.isEmpty()) state.load() else state.take { brought }
    }

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        state.trim(if (level >= ComponentCallbacks2.TRIM_MEMORY_BACKGROUND) Trim.ALL else Trim.SOME)
    }
}

private const val PICK = 1
private const val ALLOW = 2
private const val SHOWN = "shown"

/** The app's one window: a row of screens, the one chosen, and what the app is doing.  All it knows is in [App.state]. */
class MainActivity : Activity() {
    private val state get() = (application as App).state
    private lateinit var screens: List<Screen>
    private lateinit var place: FrameLayout
    private lateinit var status: TextView
    private var shown = 0

    override fun onCreate(saved: Bundle?) {
        super.onCreate(saved)
        screens = listOf(
            ChatScreen(this, state), TranslateScreen(this, state), ListenScreen(this, state, ::microphone), BenchScreen(this, state),
            PlanScreen(this, state, PhoneMemory(this).available), ProofScreen(this, state),
        )
        place = FrameLayout(this)
        status = text().apply { setTextIsSelectable(true) }
        val names = screens.mapIndexed { at, screen -> button(screen.name) { choose(at) } }
        val bring = button("Import") { startActivityForResult(Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), PICK) }
        bring.contentDescription = say("Import a bundle: pick its folder")
        setContentView(
            LinearLayout(this).apply {
                orientation = LinearLayout.VERTICAL
                fitsSystemWindows = true
                addView(
                    LinearLayout(context).apply {
                        orientation = LinearLayout.VERTICAL
                        setPadding(dp(12), dp(4), dp(12), dp(4))
                        addView(row(*names.toTypedArray(), bring))
                        addView(place, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
                        addView(status, LinearLayout.LayoutParams(MATCH_PARENT, WRAP_CONTENT))
                    },
                    LinearLayout.LayoutParams(MATCH_PARENT, MATCH_PARENT),
                )
            },
        )
        choose(saved?.getInt(SHOWN) ?: 0)
    }

    /** The microphone, or a question for it. */
    private fun microphone(): SoundSource? {
        if (checkSelfPermission(RECORD_AUDIO) == PERMISSION_GRANTED) return Microphone()
        requestPermissions(arrayOf(RECORD_AUDIO), ALLOW)
        return null
    }

    private fun choose(at: Int) {
        shown = at
        place.removeAllViews()
        place.addView(screens[at].view)
        show()
    }

    private fun show() {
        screens[shown].show()
        // a screen reader says what came of it, not every figure on the way
        status.accessibilityLiveRegion = if (state.busy) View.ACCESSIBILITY_LIVE_REGION_NONE else View.ACCESSIBILITY_LIVE_REGION_POLITE
        if (status.text.toString() != state.status) status.text = state.status
    }

    override fun onStart() {
        super.onStart()
        state.changed = ::show
        show()
    }

    override fun onStop() {
        state.changed = {}
        state.save()
        super.onStop()
    }

    override fun onSaveInstanceState(saved: Bundle) {
        super.onSaveInstanceState(saved)
        saved.putInt(SHOWN, shown)
    }

    override fun onActivityResult(request: Int, result: Int, data: Intent?) {
        val tree = data?.data ?: return
        if (request == PICK && result == RESULT_OK) state.take { Documents(contentResolver, tree) }
    }
}
