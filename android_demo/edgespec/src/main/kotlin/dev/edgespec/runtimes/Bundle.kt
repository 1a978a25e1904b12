package dev.edgespec.runtimes

import dev.edgespec.BundleError
import java.io.File
import java.io.IOException
import java.security.MessageDigest

internal fun hex(bytes: ByteArray): String = bytes.joinToString("") { "%02x".format(it) }

fun sha256(path: File): String {
    val digest = MessageDigest.getInstance("SHA-256")
    path.forEachBlock(1 shl 20) { piece, count -> digest.update(piece, 0, count) }
    return hex(digest.digest())
}

class Bundle private constructor(val path: File, val manifest: Manifest) {
    companion object {
        /** Open a bundle; presence and size of every file are always checked, with [check] their SHA-256 too. */
        fun open(folder: File, check: Boolean = true): Bundle {
            val manifest = readManifest(folder)
            for ((name, entry) in manifest.files) {
                if (File(name).isAbsolute || ".." in name.split('/', '\\')) throw BundleError("$name: leaves the bundle: only files inside the folder are allowed")
                checkFile(folder, File(folder, name), entry, check)
            }
            return Bundle(folder, manifest)
        }

        private fun checkFile(folder: File, file: File, entry: FileEntry, check: Boolean) {
            if (!file.isFile) throw BundleError("$file: missing from the bundle", "copy the whole folder, or export again")
            try {
                if (!file.toPath().toRealPath().startsWith(folder.toPath().toRealPath())) {
                    throw BundleError("$file: a link that leaves the bundle is not allowed")
                }
                val size = file.length()
                if (size != entry.size) {
                    val word = if (size < entry.size) "truncated" else "altered"
                    throw BundleError("$file: $word: expected ${entry.size} bytes, got $size", "copy or export it again")
                }
                if (!check) return
                val got = sha256(file)
                if (got != entry.sha256) throw BundleError(
                    "$file: altered: expected SHA-256 ${entry.sha256.take(12)}..., got ${got.take(12)}...",
                    "export it again, or pass --no-check if you changed it on purpose",
                )
            } catch (error: IOException) {
                throw BundleError("$file: cannot read it: ${error.message}", "copy it again", error)
            }
        }
    }
}
