package dev.edgespec.app

import android.app.*
import android.content.*
import android.net.Uri
import android.os.*
import android.provider.OpenableColumns
import android.database.Cursor
import android.database.MatrixCursor
import java.io.File
import java.io.FileNotFoundException

/* What Android asks of an app that works: a notification while it does, and files that other apps may read. */

private const val CHANNEL = "work"
private const val STOP = "dev.edgespec.app.STOP"

/** Keeps the process at work while something is written or measured, with a notification that stops it. */
class WorkService : Service() {
    override fun onBind(intent: Intent?): IBinder? = null

    override fun onStartCommand(intent: Intent?, flags: Int, id: Int): Int {
        val state = (application as App).state
        if (intent?.action == STOP) state.stop()
        if (!state.busy) {
            stopSelf()
            return START_NOT_STICKY
        }
        val manager = getSystemService(NotificationManager::class.java)
        manager.createNotificationChannel(NotificationChannel(CHANNEL, say("Work"), NotificationManager.IMPORTANCE_LOW))
        val fixed = PendingIntent.FLAG_IMMUTABLE
        val back = PendingIntent.getActivity(this, 0, Intent(this, MainActivity::class.java), fixed)
        val stop = PendingIntent.getService(this, 1, Intent(this, WorkService::class.java).setAction(STOP), fixed)
        val shown = Notification.Builder(this, CHANNEL).setSmallIcon(resource("drawable", "notification")).setContentTitle("edgespec")
            .setContentText(say("Working on this device")).setContentIntent(back).setOngoing(true)
            .addAction(Notification.Action.Builder(null, say("Stop"), stop).build())
        state.tryTo { startForeground(1, shown.build()) }
        return START_NOT_STICKY
    }
}

/** How hot the phone is: PowerManager says it from Android 10 on, which is newer than what this is compiled against. */
class PhoneHeat(context: Context) : dev.edgespec.planning.Heat {
    private val power = context.getSystemService(PowerManager::class.java)
    private val asked = runCatching { PowerManager::class.java.getMethod("getCurrentThermalStatus") }.getOrNull()

    override fun level(): Int = runCatching { asked?.invoke(power) as? Int }.getOrNull() ?: 0
}

/** Reports as files for the app that they are shared with. */
class SharedFiles : ContentProvider() {
    private fun file(uri: Uri) = File(folder(context!!), File(uri.lastPathSegment ?: "").name)

    override fun onCreate() = true
    override fun getType(uri: Uri) = "application/json"
    override fun insert(uri: Uri, values: ContentValues?): Uri? = null
    override fun delete(uri: Uri, where: String?, arguments: Array<String>?) = 0
    override fun update(uri: Uri, values: ContentValues?, where: String?, arguments: Array<String>?) = 0

    override fun query(uri: Uri, columns: Array<String>?, where: String?, arguments: Array<String>?, order: String?): Cursor {
        val shown = file(uri)
        return MatrixCursor(arrayOf(OpenableColumns.DISPLAY_NAME, OpenableColumns.SIZE)).apply { addRow(arrayOf<Any>(shown.name, shown.length())) }
    }

    override fun openFile(uri: Uri, mode: String): ParcelFileDescriptor {
        if (mode != "r") throw FileNotFoundException("$uri: may only be read")
        return ParcelFileDescriptor.open(file(uri), ParcelFileDescriptor.parseMode(mode))
    }

    companion object {
        private fun named(name: String) = Uri.parse("content://dev.edgespec.app.shared/$name")

        private fun folder(context: Context) = File(context.cacheDir, "shared")

        /** Offer a text as a file of this name. */
        fun send(context: Context, name: String, text: String) {
            val made = File(folder(context).apply { mkdirs() }, name)
            made.writeText(text)
            val uri = named(made.name)
            val intent = Intent(Intent.ACTION_SEND).setType("application/json").putExtra(Intent.EXTRA_STREAM, uri)
            intent.clipData = ClipData.newRawUri(made.name, uri)
            context.startActivity(Intent.createChooser(intent.addFlags(Intent.FLAG_GRANT_READ_URI_PERMISSION), say("Share")))
        }
    }
}
