package dev.edgespec.runtimes

import dev.edgespec.BundleError
import dev.edgespec.drafters.hex
import java.io.File
import java.io.IOException
import java.security.MessageDigest

fun sha256(path: File): String {
    val digest = MessageDigest.getInstance("SHA-256")
    path.forEachBlock(1 shl 20) { piece, count -> digest.update(piece, 0, count) }
    return hex(digest.digest())
}

class Bundle private constructor(val path: File, val manifest: Manifest) {
    internal fun runAs(native: Boolean, high: Boolean) = Bundle(path, manifest.runAs(native, high))

    fun part(name: String): ModelPart = when (name) {
        "target" -> manifest.target
        "draft" -> manifest.draft ?: throw BundleError("$path: has no draft model", "export with `--method speculative --draft MODEL2`")
        else -> manifest.drafter ?: throw BundleError("$path: has no drafter model", "export with `--method eagle --drafter DRAFTER`")
    }

    companion object {
        /** Open a bundle; presence and size of every file are always checked, with [check] their SHA-256 too. */
        fun open(folder: File, check: Boolean = true): Bundle {
            val manifest = readManifest(folder)
            for (name in listOfNotNull(manifest.target, manifest.draft, manifest.drafter).flatMap { it.named() }) {
                if (name !in manifest.files) throw BundleError("${File(folder, MANIFEST)}: uses '$name' but does not list it under files")
            }
            for ((name, entry) in manifest.files) {
                val file = File(folder, name)
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
                    if (!check) continue
                    val got = sha256(file)
                    if (got != entry.sha256) throw BundleError(
                        "$file: altered: expected SHA-256 ${entry.sha256.take(12)}..., got ${got.take(12)}...",
                        "export it again, or pass --no-check if you changed it on purpose",
                    )
                } catch (error: IOException) {
                    throw BundleError("$file: cannot read it: ${error.message}", "copy it again", error)
                }
            }
            return Bundle(folder, manifest)
        }
    }
}
