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
import java.util.Locale
import org.junit.Test
import org.junit.runner.RunWith
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.annotation.Config
import org.robolectric.annotation.GraphicsMode

private fun given(name: String) = File(System.getProperty("edgespec.$name"))

private class Folder(private val folder: File) : BundleSource {
    override val files = folder.walkTopDown().filter { it.isFile }.map { it.relativeTo(folder).path }.toList()

    override fun open(name: String) = File(folder, name).inputStream()
}

/** Draws the app's screens with real bundles: Android's own views and graphics, on a desktop JVM (tools/make_screens.py). */
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
        work()
        bring("bundle")
        state.chat.method = "speculative"
        state.ask("What say you, my lord?")
        work { state.chat.transcript.text.length > 400 }
        state.stop()
        work()
        picture("chat") { find<Switch>(it)!!.isChecked = true }
        check(state.refused) { "a screen that is made anew must be set as the last one" }
        RuntimeEnvironment.setFontScale(1.5f)
        picture("chat-large-font")
        RuntimeEnvironment.setFontScale(1f)
        state.measure(listOf("My lord,", "The king"), Settings(maxNewTokens = 64), repeats = 3)
        work()
        picture("bench") { tab(it, BENCH) }
        state.prove()
        work()
        picture("proof") { tab(it, PROOF) }
        RuntimeEnvironment.setQualifiers("w800dp-h600dp-land-hdpi")
        picture("bench-tablet") { tab(it, BENCH) }
        RuntimeEnvironment.setQualifiers("w360dp-h640dp-port-hdpi")
        bring("talking")
        state.refused = false
        state.screen = CHAT
        state.chat.clear()
        for (question in listOf("What say you, my lord?", "And what of the king?")) {
            val before = state.chat.transcript.text.length
            state.ask(question)
            work { state.chat.transcript.text.length > before + 200 }
            state.stop()
            work()
        }
        picture("talk")
        RuntimeEnvironment.setQualifiers("+night")
        picture("talk-dark")
        RuntimeEnvironment.setQualifiers("+notnight")
        RuntimeEnvironment.setQualifiers("ko-rKR-w360dp-h640dp-port-hdpi")
        Locale.setDefault(Locale.KOREA) // as the system does
        picture("bench-korean") { tab(it, BENCH) }
        state.close()
    }

    private fun bring(name: String) {
        state.take { Folder(given(name)) }
        work()
    }

    /** Be the main thread until the app has nothing to do, or [until] is so. */
    private fun work(until: () -> Boolean = { false }) {
        while (state.busy && !until()) {
            shadowOf(Looper.getMainLooper()).idle()
            Thread.sleep(1)
        }
        println(state.status)
        check("Error:" !in state.status && "Exception:" !in state.status) { state.status }
    }

    private fun picture(name: String, before: (View) -> Unit = {}) {
        Robolectric.buildActivity(MainActivity::class.java).setup().use { made ->
            val view = made.get().window.decorView
            before(view)
            shadowOf(Looper.getMainLooper()).idle()
            val beyond = all(view).filter { it.isShown && it is Button && !it.getGlobalVisibleRect(Rect()) }.map { (it as Button).text }.toList()
            check(beyond.isEmpty()) { "$name: beyond the edge: $beyond" }
            val bitmap = Bitmap.createBitmap(view.width, view.height, Bitmap.Config.ARGB_8888)
            view.draw(Canvas(bitmap))
            val file = File(System.getProperty("edgespec.pictures"), "$name.png")
            file.outputStream().use { bitmap.compress(Bitmap.CompressFormat.PNG, 100, it) }
        }
    }

    private fun tab(view: View, name: String) = all(view).first { it.tag == name }.performClick()
    private inline fun <reified T> find(view: View): T? = all(view).filterIsInstance<T>().firstOrNull()

    private fun all(view: View): Sequence<View> = sequence {
        yield(view)
        if (view is ViewGroup) for (at in 0 until view.childCount) yieldAll(all(view.getChildAt(at)))
    }
}
