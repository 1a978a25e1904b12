package dev.edgespec.images

import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.Settings
import dev.edgespec.engine.proofPicture
import dev.edgespec.reports.proof
import dev.edgespec.runtimes.*
import dev.edgespec.support.*
import java.awt.image.BufferedImage
import java.io.File
import javax.imageio.ImageIO
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test

/** Pictures are cut as on the Python side, and texts after them are the same. */
class PicturesTest {
    @Test
    fun `pictures of odd sizes become the numbers of the Python side`() {
        for (case in vectors("pictures")) {
            val part = Reader(File("vectors"), case["part"].asJsonObject).image()
            for ((size, wanted) in case["pictures"].asJsonObject.entrySet()) {
                val (height, width) = size.split(" ").map { it.toInt() }
                val found = process(proofPicture(height, width), part)
                assertEquals(wanted.asJsonObject.text("text"), found.text, "${part.pixels.kind} $size")
                val grids = found.pieces.map { listOf(it.height / part.pixels.patch, it.width / part.pixels.patch) }
                assertEquals(wanted.asJsonObject["grids"].asJsonArray.map { it.ints().asList() }, grids)
                val columns = 3 * part.pixels.patch * part.pixels.patch
                val numbers = found.pieces.flatMap { piece -> towerRows(piece, part, null, columns).let { it.indices.step(401).map(it::get) } }
                assertArrayEquals(wanted.asJsonObject.doubles("numbers"), numbers.map { it.toDouble() }.toDoubleArray(), 1e-5, "${part.pixels.kind} $size")
            }
        }
    }

    @Test
    fun `texts behind pictures are those of the Python side, by every method, and golden vectors are reproduced`() {
        for (case in GOLDEN["seen"].asJsonArray.map { it.asJsonObject }) loadNative(File(case.text("path"))).use { engine ->
            val wrong = case["cases"].asJsonArray.map { it.asJsonObject }.mapNotNull { one ->
                val (height, width) = one.ints("size").asList()
                val result = engine.generate(engine.encode(case.text("text"), listOf(proofPicture(height, width))), settings(one))
                val same = one.ints("tokens").contentEquals(result.tokens) && result.stats.droppedReason == null
                "${one["settings"]}: ${result.tokens.asList()} ${result.stats.droppedReason}".takeUnless { same }
            }
            assertEquals(emptyList<String>(), wrong)
            val talk = if (case["turns"].asJsonArray.isEmpty) null else engine.conversation()
            case["turns"].asJsonArray.map { it.asJsonObject }.forEachIndexed { at, turn ->
                val result = talk!!.ask(turn.text("question"), Settings("ngram", 16), if (at == 0) proofPicture(16, 200) else null)
                assertEquals(turn.ints("tokens").asList(), result.tokens.asList(), "turn $at")
                if (at > 0) assertTrue(result.stats.reusedTokens > 20) // the picture is not read again
            }
            val proved = proof(engine)
            assertEquals(emptyList<String>(), proved.filterNot { it.equal }.map { it.method })
            assertEquals(engine.methods.size * (engine.bundle.manifest.golden.size + 1), proved.size)
        }
    }

    @Test
    fun `what is no picture, or cannot be read, is refused`() {
        fun said(run: () -> Unit) = assertThrows(InvalidRequest::class.java, run).what
        assertTrue("0 x 4" in said { Picture(0, 4, ByteArray(0)) })
        assertTrue("expected 48" in said { Picture(4, 4, ByteArray(47)) })
        assertTrue("pixels" in said { Picture(1 shl 20, 1 shl 20, ByteArray(0)) })
        loadNative().use { engine -> assertTrue("text alone" in said { engine.encode("What?", listOf(proofPicture(4, 4))) }) }
        val seen = GOLDEN["seen"].asJsonArray.map { File(it.asJsonObject.text("path")) }
        loadNative(seen[0]).use { engine ->
            assertTrue("2 times for 1" in said { engine.encode("<image>", listOf(proofPicture(16, 16))) })
            assertTrue("patches" in said { engine.encode("x", listOf(proofPicture(1, 20_000))) })
            val far = engine.encode("x", listOf(proofPicture(16, 16)))
            engine.close()
            loadNative(seen[0]).use { other -> assertTrue("not there any more" in said { other.generate(far) }) }
        }
    }

    @Test
    fun `desktop images become pictures, white where they are transparent`() {
        val drawn = BufferedImage(3, 2, BufferedImage.TYPE_INT_ARGB).apply { setRGB(1, 1, 0x80FF0000.toInt()) }
        val file = File.createTempFile("edgespec", ".png").apply { deleteOnExit() }
        ImageIO.write(drawn, "png", file)
        val read = ImageIO.read(file)
        val found = Picture.ofArgb(read.width, read.height, read.getRGB(0, 0, read.width, read.height, null, 0, read.width))
        assertEquals(listOf(255, 127, 127), found.rgb.slice(12..14).map { it.toInt() and 255 })
        assertTrue(found.rgb.indices.all { it in 12..14 || found.rgb[it].toInt() == -1 })
    }
}
