package dev.edgespec.app

import android.app.ActivityManager
import android.app.Application
import android.content.ComponentCallbacks2
import android.content.Context
import android.os.Build
import android.os.Handler
import android.os.Looper
import dev.edgespec.engine.Trim
import dev.edgespec.planning.MemoryFacts
import java.io.File

/** What ActivityManager says of memory. */
class PhoneMemory(context: Context) : MemoryFacts {
    private val info = ActivityManager.MemoryInfo().also {
        (context.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(it)
    }
    override val total: Long = info.totalMem
    override val available: Long = maxOf(0, info.availMem - info.threshold)
    override val low: Boolean = info.lowMemory
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
            library = File(applicationInfo.nativeLibraryDir, "libedgespec.so"),
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
