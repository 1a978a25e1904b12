package dev.edgespec.app

import android.content.ContentResolver
import android.content.res.AssetManager
import android.net.Uri
import android.provider.DocumentsContract
import android.provider.DocumentsContract.Document
import dev.edgespec.BundleError
import dev.edgespec.runtimes.Bundle
import java.io.*

/** A folder that the user has picked, with the folders in it. */
class Documents(private val resolver: ContentResolver, private val tree: Uri) : BundleSource {
    private val found = LinkedHashMap<String, Uri>()
    override val files: List<String> get() = found.keys.toList()

    init { list(DocumentsContract.getTreeDocumentId(tree), "") }

    private fun list(id: String, lead: String) {
        val children = DocumentsContract.buildChildDocumentsUriUsingTree(tree, id)
        val columns = arrayOf(Document.COLUMN_DOCUMENT_ID, Document.COLUMN_DISPLAY_NAME, Document.COLUMN_MIME_TYPE)
        resolver.query(children, columns, null, null, null)?.use { rows ->
            while (rows.moveToNext()) {
                val name = lead + rows.getString(1)
                if (rows.getString(2) == Document.MIME_TYPE_DIR) list(rows.getString(0), "$name/")
                else found[name] = DocumentsContract.buildDocumentUriUsingTree(tree, rows.getString(0))
            }
        }
    }

    override fun open(name: String): InputStream = resolver.opened(found.getValue(name))
}

private fun ContentResolver.opened(uri: Uri): InputStream = openInputStream(uri) ?: throw IOException("$uri is not there any more")

private const val ASSETS = "bundle/"

class Assets(private val assets: AssetManager) : BundleSource {
    override val files: List<String> = list("")

    private fun list(lead: String): List<String> = assets.list((ASSETS + lead).trimEnd('/')).orEmpty().flatMap { name ->
        if (assets.list(ASSETS + lead + name).isNullOrEmpty()) listOf(lead + name) else list("$lead$name/")
    }

    override fun open(name: String): InputStream = assets.open(ASSETS + name)
}

/** Files that a user has picked, by their paths inside the bundle; on a phone a document tree. */
interface BundleSource {
    val files: List<String>

    fun open(name: String): InputStream
}

private fun aside(target: File) = File(target.parentFile, ".${target.name}.old")

/** Restore the bundle that an import had moved, if the process ended before the new one was complete. */
fun recoverBundle(target: File) {
    val old = aside(target)
    if (!target.isDirectory && old.isDirectory) old.renameTo(target) else old.deleteRecursively()
}

/**
 * Copy a bundle to [target], whole or not at all: into a sibling, checked, tried by [open], then renamed; the old one is moved aside
 * and goes last.  [progress] receives the bytes copied.
 */
fun importBundle(source: BundleSource, target: File, progress: (Long) -> Unit = {}, open: (File) -> Unit = {}): File {
    val partial = File(target.parentFile, ".${target.name}.part")
    partial.deleteRecursively()
    try {
        var copied = 0L
        for (name in source.files) {
            val file = File(partial, name)
            if (!file.canonicalPath.startsWith(partial.canonicalPath + File.separator)) {
                throw BundleError("$name: leaves the bundle: only files inside the folder are allowed")
            }
            file.parentFile?.mkdirs()
            source.open(name).use { from -> file.outputStream().use { copied += from.copyTo(it, 1 shl 20) } }
            progress(copied)
        }
        Bundle.open(partial, check = true)
        open(partial)
        val old = aside(target).also { it.deleteRecursively() }
        target.renameTo(old)
        if (!partial.renameTo(target)) {
            old.renameTo(target)
            throw BundleError("$target: cannot be replaced", "free some space, and try again")
        }
        old.deleteRecursively()
        return target
    } catch (error: IOException) {
        throw BundleError("$target: copying failed: ${error.message}", "free some space, and try again", error)
    } finally {
        partial.deleteRecursively()
    }
}
