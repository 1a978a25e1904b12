package dev.edgespec.engine

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.INSERTED
import dev.edgespec.images.*
import dev.edgespec.runtimes.*
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder

/* Pictures of prompts: towers and projectors, the rows that they make, and the token ids that name those. */

private const val ROW_BITS = 14 // of a token: which row; the bits above name the picture
private const val MOST_ROWS = 1 shl ROW_BITS
private const val KEPT_BYTES = 64 shl 20 // of rows that no request uses; the picture used last is kept in any case

internal class Sight(private val folder: File, private val model: ModelPart, private val open: Opener) {
    val part: ImagePart = model.image!!
    private val sides = HashMap<ModelPart, NativeSlot>()
    private val places: FloatArray? by lazy {
        part.places?.let { given ->
            val numbers = ByteBuffer.wrap(File(folder, given.file).readBytes()).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
            FloatArray(given.side * given.side * given.width).also(numbers::get)
        }
    }

    /** The rows of a picture that was cut, [rows * hidden]. */
    fun rows(picture: Picture, pieces: List<Picture>): FloatArray {
        val tower = slot(model.tower!!)
        val found = pieces.map { piece ->
            val given = towerRows(piece, part, places, tower.model.givenSize)
            val count = given.size / tower.model.givenSize
            if (count > tower.context) throw InvalidRequest(
                "a picture of ${picture.width} x ${picture.height} makes $count patches, and this model reads ${tower.context} at once",
                "cut it, so that its sides are nearer to each other",
            )
            val projector = slot(model.projectors[0])
            val rows = merged(tower.encode(IntArray(count), given), tower.hiddenSize, piece, part, projector.model.givenSize)
            projector.encode(IntArray(part.rowsOf(piece)), rows)
        }
        return FloatArray(found.sumOf { it.size }).also { all -> found.fold(0) { at, rows -> rows.copyInto(all, at).let { at + rows.size } } }
    }

    private fun slot(side: ModelPart): NativeSlot = sides.getOrPut(side) { encoderSlot(side, open) }
    fun close() = closeEncoders(sides)
}

/**
 * Reader of the pictures of an engine's prompts.  A picture's rows are computed once, and found by its digest as long as a
 * request has them in its text, or others need the room.  Calls may come from any thread.
 */
internal class Pictures(bundle: Bundle, private val codec: TextCodec, open: Opener) {
    private class Seen(val number: Int, val text: String, val rows: FloatArray, val picture: Picture?) {
        var users = 0
        var own: FloatArray? = null // rows of the draft's, which needs the picture for it
        val size: Long get() = 4L * (rows.size + (own?.size ?: 0)) + (picture?.rgb?.size ?: 0)
    }

    private val hidden = bundle.manifest.target.facts.hidden
    private val target = Sight(bundle.path, bundle.manifest.target, open)
    private val draft = bundle.manifest.draft?.takeIf { it.image != null }?.let { Sight(bundle.path, it, open) to it.facts.hidden }
    private val words = target.part.words
    private val numbers = HashMap<String, Int>() // of all that were ever seen, by digest
    private val seen = LinkedHashMap<Int, Seen>() // by number, least recently used first
    private val making = Any()

    /** Token ids of a text with a placeholder for each of these pictures, in order. */
    fun encode(text: String, pictures: List<Picture>, withSpecial: Boolean): IntArray {
        val parts = text.split(words.placeholder)
        if (parts.size != pictures.size + 1) throw InvalidRequest(
            "the text has '${words.placeholder}' ${parts.size - 1} times for ${pictures.size} pictures: expected one each",
            "leave it out of what you write",
        )
        val found = pictures.map(::look)
        val whole = parts.withIndex().joinToString("") { (at, part) -> part + (found.getOrNull(at)?.text ?: "") }
        val tokens = codec.encode(whole, withSpecial)
        val own = found.flatMap(::tokensOf)
        val at = tokens.indices.filter { tokens[it] == words.id }
        if (at.size != own.size) throw InvalidRequest(
            "a text with ${at.size} places for the ${own.size} rows of ${pictures.size} pictures", "leave '${words.token}' out of what you write",
        )
        at.forEachIndexed { number, place -> tokens[place] = own[number] }
        if (tokens.last() >= INSERTED) throw InvalidRequest("the prompt ends with a picture", "add a question after it")
        return tokens
    }

    /** Tokens of pictures and the text after them, without a template. */
    fun written(text: String, count: Int): String = words.written.ifEmpty { words.placeholder }.repeat(count) + text

    /** Golden vectors: prompts and outputs. */
    fun golden(): List<Pair<() -> IntArray, IntArray>> = target.part.proof.map { vector ->
        val make = {
            val own = tokensOf(look(proofPicture(vector.height, vector.width))).iterator()
            IntArray(vector.prompt.size) { at -> vector.prompt[at].let { if (it == words.id) own.next() else it } }
        }
        make to vector.tokens
    }

    private fun tokensOf(one: Seen): List<Int> = List(one.rows.size / hidden) { INSERTED or (one.number shl ROW_BITS) or it }

    private fun look(picture: Picture): Seen = synchronized(making) {
        val (number, known) = synchronized(seen) { numbers.getOrPut(picture.digest) { numbers.size }.let { it to seen[it] } }
        if (number >= INSERTED / MOST_ROWS) throw InvalidRequest("more than ${INSERTED / MOST_ROWS} pictures", "load the bundle again")
        val found = known ?: process(picture, target.part).let { cut ->
            Seen(number, cut.text, target.rows(picture, cut.pieces), picture.takeIf { draft != null })
        }
        synchronized(seen) {
            seen.remove(number)
            seen[number] = found
            trim()
        }
        found
    }

    /** Drop unused rows beyond [KEPT_BYTES], except the last ones. */
    private fun trim() {
        val idle = seen.entries.filter { it.value.users == 0 && it.key != seen.keys.last() }
        var size = idle.sumOf { it.value.size }
        for ((number, one) in idle) {
            if (size <= KEPT_BYTES) break
            seen.remove(number)
            size -= one.size
        }
    }

    private fun numberOf(token: Int) = (token xor INSERTED) shr ROW_BITS
    private fun get(token: Int): Seen = synchronized(seen) { seen[numberOf(token)] }
        ?: throw InvalidRequest("the text has rows of a picture that is not there any more", "encode the prompt again, with the picture")

    /** Keep the pictures of a text until [letGo]. */
    fun hold(tokens: IntArray) = each(tokens) { it.users++ }
    fun letGo(tokens: IntArray) = each(tokens) { it.users-- }.also { synchronized(seen) { if (seen.isNotEmpty()) trim() } }

    private fun each(tokens: IntArray, use: (Seen) -> Unit) = synchronized(seen) {
        tokens.filter { it >= INSERTED }.distinctBy(::numberOf).map(::get).forEach(use)
    }

    /** Rows of the target, and of a draft that reads pictures. */
    val rows = RowsOfPictures { token -> get(token).rows to (token and (MOST_ROWS - 1)) * hidden }
    val draftRows: RowsOfPictures? = draft?.let { (sight, hidden) ->
        RowsOfPictures { token ->
            val found = get(token)
            val own = found.own ?: found.picture!!.let { sight.rows(it, process(it, sight.part).pieces) }.also { found.own = it }
            own to (token and (MOST_ROWS - 1)) * hidden
        }
    }

    /** Free towers and projectors; they are opened again where they are needed. */
    fun clear() = synchronized(making) {
        target.close()
        draft?.first?.close()
    }

    val instead: Int = words.id // the token for a draft that reads only text
}

/** The picture of golden vectors: stripes and bows of all colours. */
fun proofPicture(height: Int, width: Int) = Picture(width, height, ByteArray(3 * height * width) { at ->
    val (x, y, channel) = Triple(at / 3 % width, at / 3 / width, at % 3)
    ((x * (y + 3 * channel) + 7 * y) % 256).toByte()
})
