package dev.edgespec.example

import android.app.Activity
import android.os.Bundle
import android.widget.TextView
import dev.edgespec.Edgespec
import dev.edgespec.decoding.Settings
import java.io.File
import kotlinx.coroutines.*

/** Writes on about a line of text with the bundle in the app's own folder (`adb push my-bundle /sdcard/Android/data/dev.edgespec.example/files/bundle`). */
class MainActivity : Activity() {
    private val work = CoroutineScope(Dispatchers.IO)

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        val view = TextView(this).also(::setContentView)
        work.launch {
            val engine = Edgespec.load(File(getExternalFilesDir(null), "bundle"), cache = cacheDir)
            engine.use { it.stream("My lord, ", Settings(maxNewTokens = 64)).collect { chunk -> view.post { view.append(chunk.text) } } }
        }
    }

    override fun onDestroy() {
        work.cancel()
        super.onDestroy()
    }
}
