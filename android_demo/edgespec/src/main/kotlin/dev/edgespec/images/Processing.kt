package dev.edgespec.images

import dev.edgespec.runtimes.*
import kotlin.math.*

/*
 * From a picture to what a vision tower reads, as edgespec/runtimes/images/processing.py does it: Idefics 3 (arXiv 2408.12637), SmolVLM
 * (arXiv 2504.05299), LFM2-VL (arXiv 2511.23404), InternVL 3 (arXiv 2504.10479).
 */

private const val LONGEST = 4096 // pixels of a side that Idefics 3 resizes to at most

private data class Size(val height: Int, val width: Int)

/** A picture as a model reads it: what its tower reads at once, in the order of the rows, and the [text] that stands for it. */
class Processed(val pieces: List<Picture>, val text: String)

/** Cut a picture as the model's processor does. */
fun process(picture: Picture, part: ImagePart): Processed {
    val how = part.pixels
    fun resized(size: Size) = picture.resized(size.width, size.height, how.resample)
    val size = Size(picture.height, picture.width)
    return when (how.kind) {
        "idefics3" -> idefics3(picture, size, part)
        "lfm2-vl" -> lfm2(size, part, ::resized)
        else -> {
            val grid = if (how.split) grid(size, how.tile, shapes(how.tiles)) else Size(1, 1)
            val tiles = tiles(resized(Size(grid.height * how.tile, grid.width * how.tile)), how.tile)
            part.written(if (tiles.size > 1) tiles + resized(Size(how.tile, how.tile)) else tiles)
        }
    }
}

/** [words]: joins the rows of all pieces, as text; by default all of them come between begin and end. */
private fun ImagePart.written(pieces: List<Picture>, words: (List<String>) -> String = { it.joinToString("") }): Processed {
    val rows = pieces.map { this.words.token.repeat(rowsOf(it)) }
    return Processed(pieces, this.words.begin + words(rows) + this.words.end)
}

private fun tiles(picture: Picture, tile: Int): List<Picture> =
    (0 until picture.height step tile).flatMap { y -> (0 until picture.width step tile).map { x -> picture.part(x, y, tile, tile) } }

/** The rows of tiles, line by line, each after its number. */
private fun ImagePart.tiled(rows: List<String>, columns: Int): String = rows.chunked(columns).withIndex().joinToString("") { (y, line) ->
    line.withIndex().joinToString("") { (x, own) -> words.tile.replace("{row}", "${y + 1}").replace("{column}", "${x + 1}") + own } + words.line
}

/** Make the longer side [PixelPart.longest], then both sides multiples of a tile's; the picture is cut into those tiles. */
private fun idefics3(given: Picture, size: Size, part: ImagePart): Processed {
    val how = part.pixels
    fun Picture.to(size: Size) = resized(size.width, size.height, how.resample)
    var picture = given.to(even(size, how.longest))
    if (how.split) picture = picture.to(inTiles(Size(picture.height, picture.width), how.tile))
    val whole = picture.to(Size(how.tile, how.tile))
    if (!how.split || (picture.width == how.tile && picture.height == how.tile)) return part.written(listOf(whole)) { part.words.whole + it[0] }
    return part.written(tiles(picture, how.tile) + whole) { rows ->
        part.tiled(rows.dropLast(1), picture.width / how.tile) + part.words.line + part.words.whole + rows.last()
    }
}

private fun scaled(size: Size, longest: Int): Size {
    val ratio = size.width.toDouble() / size.height
    return if (size.width >= size.height) Size((longest / ratio).toInt(), longest) else Size(longest, (longest * ratio).toInt())
}

/** The longer side [longest] and the other one even, then none beyond [LONGEST]. */
private fun even(size: Size, longest: Int): Size {
    val (height, width) = scaled(size, longest)
    val wide = size.width >= size.height
    val found = Size(maxOf(1, if (wide) height + height % 2 else height), maxOf(1, if (wide) width else width + width % 2))
    return if (maxOf(found.height, found.width) > LONGEST) scaled(found, LONGEST) else found
}

/** Both sides multiples of a tile's, the longer one first. */
private fun inTiles(size: Size, tile: Int): Size {
    fun up(side: Int) = (side + tile - 1) / tile * tile
    val ratio = size.width.toDouble() / size.height
    if (size.width >= size.height) return up(size.width).let { Size(up((it / ratio).toInt()), it) }
    return up(size.height).let { Size(it, up((it * ratio).toInt())) }
}

/** Multiples of merged patches; large pictures are cut into tiles as well. */
private fun lfm2(size: Size, part: ImagePart, resized: (Size) -> Picture): Processed {
    val how = part.pixels
    val unit = how.patch * part.factor
    val (least, most) = how.tokens.map { it * unit * unit }
    val rounded = listOf(size.height, size.width).map { maxOf(how.patch, round(it.toDouble() / unit).toInt() * unit).toLong() }
    val whole = resized(bounded(size, unit, least, most))
    if (!how.split || how.tiles.max() == 1 || rounded[0] * rounded[1] <= most * how.tolerance) return part.written(listOf(whole))
    val grid = grid(size, how.tile, asInPython(shapes(how.tiles)))
    val tiles = tiles(resized(Size(grid.height * how.tile, grid.width * how.tile)), how.tile)
    if (tiles.size == 1) return part.written(tiles)
    return part.written(if (how.thumbnail) tiles + whole else tiles) { rows ->
        part.tiled(rows.take(tiles.size), grid.width) + if (how.thumbnail) part.words.whole + rows.last() else ""
    }
}

/** Sides rounded to multiples of [unit] with about the same shape and [least] to [most] pixels. */
private fun bounded(size: Size, unit: Int, least: Int, most: Int): Size {
    val sides = listOf(size.height, size.width).map { it.toDouble() }
    fun all(round: (Double) -> Double, times: Double) = sides.map { maxOf(unit, round(it / times / unit).toInt() * unit) }.let { Size(it[0], it[1]) }
    val found = all(::round, 1.0)
    val pixels = found.height.toLong() * found.width
    if (pixels > most) return all(::floor, sqrt(sides[0] * sides[1] / most))
    if (pixels >= least) return found
    val times = sqrt(least / (sides[0] * sides[1]))
    return Size(ceil(sides[0] * times / unit).toInt() * unit, ceil(sides[1] * times / unit).toInt() * unit)
}

private fun shapes(tiles: List<Int>): List<Size> {
    val sides = 1..tiles[1]
    return sides.flatMap { x -> sides.filter { x * it in tiles[0]..tiles[1] }.map { Size(it, x) } }
}

private val PRIMES = listOf(0x9E3779B185EBCA87uL, 0xC2B2AE3D27D4EB4FuL, 0x27D4EB2F165667C5uL)

/**
 * In the order that a set of pairs (columns, lines) has in Python, which decides between two shapes that are alike: by xxHash
 * (CPython's Objects/tupleobject.c and setobject.c).  Where two fall on one place of the set, the order may be another.
 */
private fun asInPython(shapes: List<Size>): List<Size> {
    var mask = 7
    for (used in 1..shapes.size) if (used * 5 >= mask * 3) {
        mask = 7
        while (mask + 1 <= 4 * used) mask = 2 * mask + 1
    }
    fun hash(vararg numbers: Int): Int {
        val mixed = numbers.fold(PRIMES[2]) { all, one -> (all + one.toULong() * PRIMES[1]).rotateLeft(31) * PRIMES[0] }
        return (mixed + (numbers.size.toULong() xor PRIMES[2] xor 3527539uL)).toInt()
    }
    return shapes.sortedBy { hash(it.width, it.height) and mask }
}

/** Columns and lines of tiles that have the shape of the picture; of two alike the one nearer to its size. */
private fun grid(size: Size, tile: Int, shapes: List<Size>): Size {
    var (best, off) = Size(1, 1) to Double.POSITIVE_INFINITY
    for (one in shapes.sortedBy { it.width * it.height }) {
        val other = abs(size.width.toDouble() / size.height - one.width.toDouble() / one.height)
        val large = size.width.toDouble() * size.height > 0.5 * tile * tile * one.width * one.height
        if (other < off || (other == off && large)) {
            best = one
            off = other
        }
    }
    return best
}

/* From a piece to rows of numbers. */

/**
 * Input rows of a vision encoder for a piece: [rows, columns], the patches line by line, each followed by its position if that is learned
 * separately.
 */
internal fun towerRows(piece: Picture, part: ImagePart, places: FloatArray?, columns: Int): FloatArray {
    val how = part.pixels
    val (down, across) = piece.height / how.patch to piece.width / how.patch
    val found = FloatArray((part.lead + down * across) * columns)
    val levels = List(3) { channel -> FloatArray(256) { ((it * how.rescale).toFloat() - how.mean[channel].toFloat()) / how.std[channel].toFloat() } }
    for (y in 0 until down * how.patch) for (x in 0 until across * how.patch) {
        val row = part.lead + y / how.patch * across + x / how.patch
        val at = row * columns + 3 * (y % how.patch * how.patch + x % how.patch)
        for (channel in 0..2) found[at + channel] = levels[channel][piece.rgb[3 * (y * piece.width + x) + channel].toInt() and 255]
    }
    val learnt = part.places ?: return found
    val resampled = resampled(places!!, down, across, learnt)
    for (row in 0 until down * across) {
        resampled.copyInto(found, (part.lead + row) * columns + 3 * how.patch * how.patch, row * learnt.width, (row + 1) * learnt.width)
    }
    return found
}

/** Learnt places [side * side * width] resampled to a grid of patches. */
private fun resampled(places: FloatArray, down: Int, across: Int, part: PlacesPart): FloatArray {
    /** [outer, side, inner] -> [outer, weights, inner] */
    fun along(data: FloatArray, weights: List<FloatArray>, outer: Int, inner: Int): FloatArray {
        val found = FloatArray(outer * weights.size * inner)
        for (line in 0 until outer) for ((at, row) in weights.withIndex()) for ((from, weight) in row.withIndex()) {
            if (weight != 0f) for (one in 0 until inner) {
                found[(line * weights.size + at) * inner + one] += weight * data[(line * part.side + from) * inner + one]
            }
        }
        return found
    }
    val lines = along(places, weights(down, part), 1, part.side * part.width)
    return along(lines, weights(across, part), down, part.width)
}

/** How much of each learnt place a place of a side has, [size] of [side]. */
private fun weights(size: Int, part: PlacesPart): List<FloatArray> = List(size) { at ->
    if (part.how == "corners") {
        val step = if (size > 1) ((part.side - 1).toDouble() / (size - 1)).toFloat() else 0f
        FloatArray(part.side) { maxOf(1 - abs(it - at * step), 0f) }
    } else {
        val scale = part.side.toFloat() / size
        val center = (at + 0.5f) * scale - 0.5f
        FloatArray(part.side) { maxOf(1 - abs(it - center) / maxOf(scale, 1f), 0f) }.also { row -> row.sum().let { all -> for (one in row.indices) row[one] /= all } }
    }
}

/** One row of [columns] for each square of an encoder's rows [rows, width], concatenated and padded with zeros. */
internal fun merged(rows: FloatArray, width: Int, piece: Picture, part: ImagePart, columns: Int): FloatArray {
    val (down, across) = piece.height / part.pixels.patch to piece.width / part.pixels.patch
    val factor = part.factor
    val found = FloatArray(part.rowsOf(piece) * columns)
    for (y in 0 until down) for (x in 0 until across) {
        val to = (y / factor * (across / factor) + x / factor) * columns + (y % factor * factor + x % factor) * width
        val from = (part.lead + y * across + x) * width
        rows.copyInto(found, to, from, from + width)
    }
    return found
}
