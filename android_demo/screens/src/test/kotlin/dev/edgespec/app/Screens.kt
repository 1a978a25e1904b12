package dev.edgespec.app

import android.app.ActivityManager
import android.content.Context
import android.graphics.*
import android.os.Looper
import android.view.*
import android.widget.Button
import android.widget.Switch
import dev.edgespec.decoding.Settings
import java.io.File
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import org.robolectric.annotation.GraphicsMode

/** Draws the app's screens with a real bundle: Android's own views and graphics, on a desktop JVM (tools/make_screens.py). */
@RunWith(RobolectricTestRunner::class)
@Config(sdk = [34], qualifiers = "w360dp-h640dp-hdpi")
@GraphicsMode(GraphicsMode.Mode.NATIVE)
class Screens {
    private val app get() = RuntimeEnvironment.getApplication() as App
    private val state get() = app.state

    @Test
    fun draw() {
        val memory = ActivityManager.MemoryInfo().apply { totalMem = 6L shl 30; availMem = 2L shl 30 }
        shadowOf(app.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).setMemoryInfo(memory)
        File(System.getProperty("edgespec.bundle")).copyRecursively(File(app.getExternalFilesDir(null), "bundle"))
        state.load()
        work()
        state.chat.method = "speculative"
        state.ask("What say you, my lord?")
        work()
        picture("chat") { find<Switch>(it)!!.isChecked = true }
        check(state.refused) { "a screen that is made anew must be set as the last one" }
        RuntimeEnvironment.setFontScale(1.5f)
        picture("chat-large-font")
        RuntimeEnvironment.setFontScale(1f)
        state.measure(listOf("My lord,", "The king"), Settings(maxNewTokens = 64), repeats = 3)
        work()
        picture("bench") { button(it, "Bench").performClick() }
        RuntimeEnvironment.setQualifiers("+night")
        picture("plan-dark") { button(it, "Plan").performClick() }
        picture("chat-dark")
        RuntimeEnvironment.setQualifiers("+notnight")
        state.prove()
        work()
        picture("proof") { button(it, "Proof").performClick() }
        state.close()
    }

    /** Be the main thread until the app has nothing to do. */
    private fun work() {
        while (state.busy) {
            shadowOf(Looper.getMainLooper()).idle()
            Thread.sleep(1)
        }
        println(state.status)
    }

    /** Draw the app as it is once [before] is done. */
    private fun picture(name: String, before: (View) -> Unit = {}) {
        Robolectric.buildActivity(MainActivity::class.java).setup().use { made ->
            val view = made.get().window.decorView
            before(view)
            shadowOf(Looper.getMainLooper()).idle()
            val bitmap = Bitmap.createBitmap(view.width, view.height, Bitmap.Config.ARGB_8888)
            view.draw(Canvas(bitmap))
            val file = File(System.getProperty("edgespec.pictures"), "$name.webp")
            file.outputStream().use { bitmap.compress(Bitmap.CompressFormat.WEBP_LOSSY, 80, it) }
        }
    }

    private fun button(view: View, says: String): Button = all(view).filterIsInstance<Button>().first { it.text == says }
    private inline fun <reified T> find(view: View): T? = all(view).filterIsInstance<T>().firstOrNull()

    private fun all(view: View): Sequence<View> = sequence {
        yield(view)
        if (view is ViewGroup) for (at in 0 until view.childCount) yieldAll(all(view.getChildAt(at)))
    }
}
