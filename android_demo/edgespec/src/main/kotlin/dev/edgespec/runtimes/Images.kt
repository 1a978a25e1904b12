package dev.edgespec.runtimes

import dev.edgespec.images.Picture

/* A manifest's part about a model that reads pictures, as in edgespec/runtimes/files/images.py, for the kinds that are supported here. */

private val KINDS = listOf("idefics3", "lfm2-vl", "internvl")

/** How pictures are cut: a level of 0 to 255 becomes (level * rescale - mean) / std, by channel; the rest by kind. */
class PixelPart(
    val kind: String, val patch: Int, val mean: List<Double>, val std: List<Double>, val rescale: Double, val resample: String,
    val longest: Int, val tile: Int, val tiles: List<Int>, val tokens: List<Int>, val tolerance: Double, val split: Boolean, val thumbnail: Boolean,
)

/** Text of a picture: templates write [placeholder], which is replaced by [token], once for each row, between the others. */
class ImageWords(
    val placeholder: String, val token: String, val id: Int, val written: String, val begin: String, val end: String, val tile: String,
    val line: String, val whole: String,
)

/** Learnt places of a tower, float32 [side * side, width] in [file], which are resampled to the grid of patches that a picture has. */
class PlacesPart(val file: String, val side: Int, val width: Int, val how: String)

/**
 * Plain decoding's text about a picture of stripes ([dev.edgespec.engine.proofPicture]); [prompt] has the picture's token for each row.
 */
class SeenVector(val height: Int, val width: Int, val prompt: IntArray, val tokens: IntArray)

/**
 * How pictures become embeddings of a decoder: a vision encoder reads the patches of a piece, after [lead] empty rows.  Squares with
 * [factor] rows to a side become one, and a projector maps them to the decoder, at most [most] of the largest picture.
 */
class ImagePart(
    val pixels: PixelPart, val words: ImageWords, val factor: Int, val lead: Int, val most: Int, val places: PlacesPart?, val proof: List<SeenVector>,
) {
    /** Rows of the decoder that a piece has. */
    fun rowsOf(piece: Picture): Int = piece.height / pixels.patch / factor * (piece.width / pixels.patch / factor)
}

internal fun Reader.image(): ImagePart {
    val pixels = part("processor") { pixels() }
    val words = part("prompt_template") {
        fun Reader.word(name: String) = textOrNull(name) ?: ""
        ImageWords(text("placeholder"), text("token"), int("id", 0), word("written"), word("begin"), word("end"), word("tile"), word("line"), word("whole"))
    }
    val (how, factor, lead) = part("merge") { Triple(text("how"), intOrNull("factor", 1, 1 shl 10) ?: 1, intOrNull("lead", 0, 64) ?: 0) }
    val places = partOrNull("position_embedding") {
        PlacesPart(path("file"), int("side", 1, MOST_WIDTH), int("width", 1, MOST_WIDTH), text("how", listOf("inside", "corners")))
    }
    val proof = parts("proof") { ints("size", 1).let { SeenVector(it[0], it[1], ints("prompt").toIntArray(), ints("tokens").toIntArray()) } }
    val windows = jsonOrNull("windows") != null
    val turned = textOrNull("positions") == "grid" || flag("bidirectional")
    if (pixels.kind !in KINDS || windows || turned || how != "blocks" || ints("deepstack_layers").isNotEmpty()) {
        throw wrong("processor", "pictures as ${pixels.kind} reads them, which this library does not: only ${KINDS.joinToString()}")
    }
    return ImagePart(pixels, words, factor, lead, int("max_rows", 1), places, proof)
}

private fun Reader.pixels(): PixelPart {
    ignore("size", "min_pixels", "max_pixels") // of other kinds
    fun Reader.channels(name: String) = numbers(name).ifEmpty { List(3) { 0.5 } }.also { if (it.size != 3) throw wrong(name, "expected 3 numbers") }
    fun Reader.pair(name: String) = ints(name, 1, MOST_WIDTH).ifEmpty { listOf(1, 1) }.also { if (it.size != 2) throw wrong(name, "expected 2 numbers") }
    fun Reader.width(name: String) = intOrNull(name, 1, MOST_WIDTH) ?: 1
    return PixelPart(
        text("kind"), int("patch", 1, MOST_WIDTH), channels("mean"), channels("std"), numberOrNull("rescale") ?: (1 / 255.0),
        textOrNull("resample", listOf("bilinear", "bicubic", "lanczos")) ?: "bilinear", width("longest"), width("tile"), pair("tiles"),
        pair("tokens"), numberOrNull("tolerance") ?: 2.0, flagOr("split", true), flagOr("thumbnail", true),
    )
}
