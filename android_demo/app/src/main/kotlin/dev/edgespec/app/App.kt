package dev.edgespec.app

import android.app.*
import android.content.*
import android.content.pm.PackageManager.PERMISSION_GRANTED
import android.graphics.Typeface
import android.os.*
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.WindowManager
import android.widget.*
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
        screens = listOf(ChatScreen(this, state), BenchScreen(this, state), ProofScreen(this, state))
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

    private fun choose(name: String) {
        val screen = screens.firstOrNull { it.name == name } ?: screens[0]
        state.screen = screen.name
        tabs.forEach { it.choose(it.tag == screen.name) }
        place.removeAllViews()
        place.addView(screen.view)
        show()
    }

    private fun show() {
        title.text = state.title
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
        state.save()
        super.onStop()
    }

    override fun onSaveInstanceState(saved: Bundle) {
        super.onSaveInstanceState(saved)
        saved.putString(SHOWN, state.screen)
    }

    override fun onActivityResult(request: Int, result: Int, data: Intent?) {
        if (result != RESULT_OK) return
        val given = data?.data ?: return
        if (request == PICK) state.take { Documents(contentResolver, given) }
    }
}
