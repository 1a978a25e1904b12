package dev.edgespec.app

import dev.edgespec.BundleError
import dev.edgespec.runtimes.Bundle
import java.io.File
import java.io.IOException
import java.io.InputStream

/** Files that a user has picked, by their paths inside the bundle; on a phone a document tree. */
interface BundleSource {
    val files: List<String>

    fun open(name: String): InputStream
}

/**
 * Copy a bundle to [target], whole or not at all: into a sibling first, every file compared with its SHA-256, then renamed.
 * [progress] is told the bytes copied.
 */
fun importBundle(source: BundleSource, target: File, progress: (Long) -> Unit = {}): File {
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
        target.deleteRecursively()
        if (!partial.renameTo(target)) throw BundleError("$target: cannot be replaced", "free some space, and try again")
        return target
    } catch (error: IOException) {
        throw BundleError("$target: copying failed: ${error.message}", "free some space, and try again", error)
    } finally {
        partial.deleteRecursively()
    }
}
