package dev.edgespec.images

import dev.edgespec.InvalidRequest
import dev.edgespec.drafters.hex
import java.security.MessageDigest
import kotlin.math.*

private const val MOST_PIXELS = 1 shl 26 // of a picture: 200 MB

/** Source of a picture: a gallery, a camera, a file. */
fun interface PictureSource {
    fun read(): Picture
}

/** A picture as models read it, upright: [rgb] has red, green and blue of every pixel, line by line; not to be changed. */
class Picture(val width: Int, val height: Int, val rgb: ByteArray) {
    init {
        if (minOf(width, height) < 1 || width.toLong() * height > MOST_PIXELS) throw InvalidRequest(
            "a picture of $width x $height: expected 1 to $MOST_PIXELS pixels", "make it smaller first",
        )
        if (rgb.size != 3 * width * height) throw InvalidRequest(
            "a picture of $width x $height in ${rgb.size} bytes: expected ${3 * width * height}, red, green and blue of each pixel",
        )
    }

    /** SHA-256 of size and pixels. */
    val digest: String by lazy {
        hex(MessageDigest.getInstance("SHA-256").apply { update("$height $width ".toByteArray()) }.digest(rgb))
    }

    internal fun part(left: Int, top: Int, width: Int, height: Int): Picture {
        val found = ByteArray(3 * width * height)
        for (y in 0 until height) rgb.copyInto(found, 3 * y * width, 3 * ((top + y) * this.width + left), 3 * ((top + y) * this.width + left + width))
        return Picture(width, height, found)
    }

    companion object {
        /** From pixels as Android's bitmaps and desktop images have them, alpha in the upper bits; transparent ones become white. */
        fun ofArgb(width: Int, height: Int, pixels: IntArray): Picture {
            val rgb = ByteArray(3 * pixels.size)
            for ((at, pixel) in pixels.withIndex()) for (channel in 0..2) {
                val (level, alpha) = (pixel shr (16 - 8 * channel) and 255) to (pixel ushr 24)
                rgb[3 * at + channel] = ((level * alpha + 255 * (255 - alpha) + 127) / 255).toByte()
            }
            return Picture(width, height, rgb)
        }
    }
}

/* Resizing, to the very bytes of Pillow (src/libImaging/Resample.c): an axis after the other, weights of 22 bits. */

private const val BITS = 22

private enum class Filter(val support: Double, val of: (Double) -> Double) {
    BILINEAR(1.0, { x -> maxOf(0.0, 1 - abs(x)) }),
    BICUBIC(2.0, { x -> abs(x).let { if (it < 1) (1.5 * it - 2.5) * it * it + 1 else if (it < 2) (((it - 5) * it + 8) * it - 4) * -0.5 else 0.0 } }),
    LANCZOS(3.0, { x -> if (x >= -3 && x < 3) sinc(x) * sinc(x / 3) else 0.0 }),
}

private fun sinc(x: Double): Double = if (x == 0.0) 1.0 else sin(x * PI) / (x * PI)

/** Resize by a filter of Pillow: bilinear, bicubic or lanczos. */
fun Picture.resized(width: Int, height: Int, resample: String): Picture {
    if (width == this.width && height == this.height) return this
    val filter = Filter.valueOf(resample.uppercase())
    fun across(data: ByteArray, lines: Int) = along(data, lines, this.width, width, 3, filter)
    fun down(data: ByteArray, columns: Int) = along(data, 1, this.height, height, 3 * columns, filter)
    // since version 13 the height is first where it shrinks by more than twice as many pixels
    val tall = this.height - height > maxOf(0, 2 * (this.width - width))
    return Picture(width, height, if (tall) across(down(rgb, this.width), height) else down(across(rgb, this.height), width))
}

/** Resample the middle axis of bytes [outer, from, inner] -> [outer, to, inner]. */
private fun along(data: ByteArray, outer: Int, from: Int, to: Int, inner: Int, filter: Filter): ByteArray {
    if (from == to) return data
    val scale = from.toDouble() / to
    val narrow = 1 / maxOf(scale, 1.0)
    val support = filter.support * maxOf(scale, 1.0)
    val found = ByteArray(outer * to * inner)
    for (at in 0 until to) {
        val center = (at + 0.5) * scale
        val first = maxOf(0, (center - support + 0.5).toInt())
        val exact = DoubleArray(minOf(from, (center + support + 0.5).toInt()) - first) { filter.of((it + first - center + 0.5) * narrow) }
        val total = exact.sum()
        val weights = IntArray(exact.size) { (exact[it] / total * (1 shl BITS)).let { one -> if (one < 0) one - 0.5 else one + 0.5 }.toInt() }
        for (line in 0 until outer) for (column in 0 until inner) {
            var sum = 1 shl (BITS - 1)
            var place = (line * from + first) * inner + column
            for (weight in weights) {
                sum += (data[place].toInt() and 255) * weight
                place += inner
            }
            found[(line * to + at) * inner + column] = (sum shr BITS).coerceIn(0, 255).toByte()
        }
    }
    return found
}
