package dev.edgespec.app

import android.app.*
import android.content.*
import android.Manifest.permission.RECORD_AUDIO
import android.content.pm.PackageManager.PERMISSION_GRANTED
import android.graphics.Typeface
import android.media.*
import android.os.*
import android.provider.MediaStore
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.WindowManager
import android.widget.*
import dev.edgespec.EdgespecError
import dev.edgespec.audio.*
import dev.edgespec.engine.Trim
import dev.edgespec.planning.MemoryFacts
import java.io.File

class PhoneMemory(context: Context) : MemoryFacts {
    private val manager = context.getSystemService(ActivityManager::class.java)
    private val now get() = ActivityManager.MemoryInfo().also(manager::getMemoryInfo)
    override val total: Long get() = now.totalMem
    override val available: Long get() = now.let { maxOf(0, it.availMem - it.threshold) }
    override val low: Boolean get() = now.lowMemory
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
        val around = Surroundings(
            bundle = File(getExternalFilesDir(null) ?: filesDir, "bundle"), // `adb push` can also put one here
            chat = File(filesDir, "chat.json"),
            cache = cacheDir,
            library = File("libedgespec.so"), // by its name: it stays in the APK
            device = mapOf("model" to Build.MODEL, "android" to Build.VERSION.RELEASE, "abi" to Build.SUPPORTED_ABIS.joinToString()),
            memory = PhoneMemory(this),
            heat = PhoneHeat(this),
            brought = { Assets(assets) },
        )
        state = AppState(around) { work -> main.post(work) }
        state.worked = ::work
        state.start()
    }

    /** Stay at work, with a notification, while something is done; a start in the background goes without. */
    private fun work(busy: Boolean) {
        val service = Intent(this, WorkService::class.java)
        runCatching { if (busy) startService(service) else stopService(service) }
    }

    override fun onTrimMemory(level: Int) {
        super.onTrimMemory(level)
        state.trim(if (level >= ComponentCallbacks2.TRIM_MEMORY_BACKGROUND) Trim.ALL else Trim.SOME)
    }
}

private const val PICK = 1
private const val ALLOW = 2
private const val GALLERY = 3
private const val CAMERA = 4
private const val SHOWN = "shown"
private const val NOTIFY = "android.permission.POST_NOTIFICATIONS" // from Android 13 on

/** The app's one window: screens, the one chosen, and what the app is doing.  All it knows is in [App.state]. */
class MainActivity : Activity() {
    private val state get() = (application as App).state
    private lateinit var screens: List<Screen>
    private lateinit var tabs: List<Button>
    private lateinit var place: FrameLayout
    private lateinit var title: TextView
    private lateinit var status: TextView

    override fun onCreate(saved: Bundle?) {
        super.onCreate(saved)
        saved?.getString(SHOWN)?.let { state.screen = it }
        screens = listOf(
            ChatScreen(this, state, ::picture), TranslateScreen(this, state), ListenScreen(this, state, ::microphone), BenchScreen(this, state),
            PlanScreen(this, state), ProofScreen(this, state),
        )
        place = FrameLayout(this)
        status = text().apply { setTextIsSelectable(true) }
        tabs = screens.map { screen -> tab(screen.name) { choose(screen.name) } }
        title = text().apply { setTypeface(null, Typeface.BOLD) }
        val more = tab("More") { menu(it) }.apply {
            contentDescription = text
            text = "\u22ee"
        }
        val wide = resources.configuration.screenWidthDp >= 600 // a tablet, or a phone on its side
        place.setPadding(0, dp(8), 0, 0)
        val body = column(place, status).apply { if (wide) setPaddingRelative(dp(12), 0, 0, 0) }
        val below = if (!wide) column(body).also { it.addView(row(*tabs.toTypedArray()), 0) } else LinearLayout(this).apply {
            addView(stack(tabs))
            addView(body, LinearLayout.LayoutParams(0, MATCH_PARENT, 1f))
        }
        setContentView(
            column(below).apply {
                addView(line(title, more), 0)
                fitsSystemWindows = true
                setPadding(dp(12), dp(4), dp(12), dp(4))
            },
        )
        choose(state.screen)
    }

    private fun menu(at: View) {
        offer(at, listOf(
            say("Import a bundle") to { startActivityForResult(Intent(Intent.ACTION_OPEN_DOCUMENT_TREE), PICK) },
            say("New chat") to { if (!state.busy) { state.chat.clear(); state.save(); show() } },
            say("Licences") to ::licences,
        ))
    }

    private fun offer(at: View, offered: List<Pair<String, () -> Unit>>) {
        PopupMenu(this, at).apply {
            offered.forEachIndexed { number, (says, _) -> menu.add(0, number, number, says) }
            setOnMenuItemClickListener { item -> state.tryTo(offered[item.itemId].second).let { true } }
        }.show()
    }

    private fun licences() {
        val held = resources.openRawResource(resource("raw", "licences")).use { it.readBytes().toString(Charsets.UTF_8) }
        val shown = text().apply {
            text = held
            setTextIsSelectable(true)
            setPadding(dp(16), dp(8), dp(16), dp(8))
        }
        AlertDialog.Builder(this).setTitle(say("Licences")).setView(ScrollView(this).apply { addView(shown) }).setPositiveButton(android.R.string.ok, null).show()
    }

    /** The microphone, or a question for it. */
    private fun microphone(): SoundSource? {
        if (checkSelfPermission(RECORD_AUDIO) == PERMISSION_GRANTED) return Microphone()
        requestPermissions(arrayOf(RECORD_AUDIO), ALLOW)
        return null
    }

    private fun picture(at: View) {
        val photo = Intent(MediaStore.ACTION_IMAGE_CAPTURE).putExtra(MediaStore.EXTRA_OUTPUT, SharedFiles.photo)
        photo.clipData = ClipData.newRawUri("photo", SharedFiles.photo)
        photo.addFlags(Intent.FLAG_GRANT_WRITE_URI_PERMISSION or Intent.FLAG_GRANT_READ_URI_PERMISSION)
        val gallery = Intent(Intent.ACTION_GET_CONTENT).setType("image/*").addCategory(Intent.CATEGORY_OPENABLE)
        offer(at, listOf(
            say("From the gallery") to { startActivityForResult(gallery, GALLERY) },
            say("With the camera") to { startActivityForResult(photo, CAMERA) },
        ))
    }

    private fun choose(name: String) {
        val screen = screens.firstOrNull { it.name == name } ?: screens[0]
        state.screen = screen.name
        tabs.forEach { it.choose(it.tag == screen.name) }
        place.removeAllViews()
        place.addView(screen.view)
        show()
    }

    private fun show() {
        val made = state.engine
        val reads = made != null && (made.sources != null || made.bundle.manifest.speech != null)
        // tabs that the current model does not support are hidden
        val hidden = if (made == null) setOf(TRANSLATE, LISTEN) else setOfNotNull(
            CHAT.takeIf { reads }, TRANSLATE.takeIf { made.sources == null }, LISTEN.takeIf { made.bundle.manifest.speech == null },
        )
        title.text = state.title
        tabs.forEach { it.visibility = if (it.tag in hidden) View.GONE else View.VISIBLE }
        if (state.screen in hidden) return choose(screens.first { it.name !in hidden }.name)
        screens.first { it.name == state.screen }.show()
        if (state.busy) window.addFlags(WindowManager.LayoutParams.FLAG_KEEP_SCREEN_ON)
        else window.clearFlags(WindowManager.LayoutParams.FLAG_KEEP_SCREEN_ON)
        if (state.busy) askToNotify()
        // a screen reader announces the result, not every intermediate figure
        status.accessibilityLiveRegion = if (state.busy) View.ACCESSIBILITY_LIVE_REGION_NONE else View.ACCESSIBILITY_LIVE_REGION_POLITE
        if (status.text.toString() != state.status) status.text = state.status
    }

    private var asked = false

    /** Ask once: without it work continues, invisible from other apps. */
    private fun askToNotify() {
        if (asked || Build.VERSION.SDK_INT < 33) return
        asked = true
        if (checkSelfPermission(NOTIFY) != PERMISSION_GRANTED) requestPermissions(arrayOf(NOTIFY), ALLOW)
    }

    override fun onStart() {
        super.onStart()
        state.changed = ::show
        show()
    }

    override fun onStop() {
        state.changed = {}
        if (state.recording) state.stop() // stop recording in the background
        state.save()
        super.onStop()
    }

    override fun onSaveInstanceState(saved: Bundle) {
        super.onSaveInstanceState(saved)
        saved.putString(SHOWN, state.screen)
    }

    override fun onActivityResult(request: Int, result: Int, data: Intent?) {
        if (result != RESULT_OK) return
        val given = if (request == CAMERA) SharedFiles.photo else data?.data ?: return
        if (request == PICK) state.take { Documents(contentResolver, given) } else state.attach(PhonePicture(contentResolver, given))
    }
}
