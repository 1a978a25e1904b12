package dev.edgespec.app

import android.content.ContentResolver
import android.content.res.AssetManager
import android.net.Uri
import android.provider.DocumentsContract
import android.provider.DocumentsContract.Document
import java.io.IOException
import java.io.InputStream

/** A folder that the user has picked, with the folders in it. */
class Documents(private val resolver: ContentResolver, private val tree: Uri) : BundleSource {
    private val found = LinkedHashMap<String, Uri>()
    override val files: List<String> get() = found.keys.toList()

    init {
        list(DocumentsContract.getTreeDocumentId(tree), "")
    }

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

    override fun open(name: String): InputStream =
        resolver.openInputStream(found.getValue(name)) ?: throw IOException("$name is not there any more")
}

/** A bundle that came with the app, in its assets. */
class Assets(private val assets: AssetManager) : BundleSource {
    private val found = ArrayList<String>()
    override val files: List<String> get() = found

    init {
        list("")
    }

    private fun list(lead: String) {
        for (name in assets.list((ASSETS + lead).trimEnd('/')) ?: emptyArray()) {
            if (assets.list(ASSETS + lead + name).isNullOrEmpty()) found.add(lead + name) else list("$lead$name/")
        }
    }

    override fun open(name: String): InputStream = assets.open(ASSETS + name)

    private companion object {
        const val ASSETS = "bundle/"
    }
}
