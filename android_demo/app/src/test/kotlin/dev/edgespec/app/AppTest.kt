package dev.edgespec.app

import dev.edgespec.BundleError
import dev.edgespec.decoding.Round
import dev.edgespec.engine.Chunk
import dev.edgespec.reports.BENCH_HEADINGS
import java.io.File
import java.io.InputStream
import java.nio.file.Path
import java.util.Locale
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

class AppTest {
    private fun round(accepted: Int, rejected: IntArray) =
        Round(IntArray(accepted + 1), IntArray(accepted + rejected.size), accepted, rejected, null, null)

    @Test
    fun `accepted guesses, the model's own tokens and refused guesses are told apart`() {
        val decode = { tokens: IntArray -> if (tokens[0] == 7) "<${tokens.joinToString()}>" else listOf("upon", " a", " time").take(tokens.size).joinToString("") }
        val transcript = Transcript()
        transcript.add("Once", Kind.USER)
        transcript.add(Chunk(" upon a time", round(2, intArrayOf(7, 8))), decode)
        transcript.add(Chunk(" there", round(0, IntArray(0))), decode)
        val shown = listOf(
            Piece("Once", Kind.USER), Piece(" upon a", Kind.ACCEPTED), Piece(" time", Kind.MODEL),
            Piece("<7, 8>", Kind.REFUSED), Piece(" there", Kind.MODEL),
        )
        assertEquals(shown, transcript.pieces(refused = true))
        assertEquals(shown.filter { it.kind != Kind.REFUSED }, transcript.pieces(refused = false))
        assertEquals("Once upon a time there", transcript.text)
    }

    @Test
    fun `speed and acceptance are told while text is written`() {
        var now = 5_000_000_000L
        val live = Live { now }
        assertEquals("", live.line)
        live.add(Chunk("", round(0, IntArray(0))))
        now += 500_000_000
        live.add(Chunk("", round(3, intArrayOf(9))))
        assertEquals("8.0 tokens/s, 75 % of 4 guesses accepted", live.line)
    }

    @Test
    fun `half of a file of a chat is an empty chat`(@TempDir folder: Path) {
        val file = File(folder.toFile(), "chat.json")
        file.writeText("{\"messages\": [{\"role\"")
        assertEquals("", Chat(file).transcript.text)
        Chat(file).apply { typed = "not sent" }.kept()()
        assertEquals("not sent", Chat(file).typed)
    }

    private class Picked(private val contents: Map<String, String>) : BundleSource {
        override val files = contents.keys.toList()

        override fun open(name: String): InputStream = contents.getValue(name).byteInputStream()
    }

    @Test
    fun `what is no bundle is not imported, and leaves nothing`(@TempDir folder: Path) {
        val target = File(folder.toFile(), "bundle").also { it.mkdirs() }
        File(target, "old").writeText("the bundle that is there")
        for (contents in listOf(mapOf("edgespec.json" to "{}"), mapOf("a" to "b"), mapOf("../outside" to "x"))) {
            assertThrows(BundleError::class.java) { importBundle(Picked(contents), target) }
        }
        assertTrue(File(target, "old").isFile)
        assertEquals(listOf("bundle"), folder.toFile().list()!!.toList())
        // a phone without power between two renames
        target.renameTo(File(folder.toFile(), ".bundle.old"))
        repeat(2) { recoverBundle(target) }
        assertTrue(File(target, "old").isFile)
        assertFalse(File(folder.toFile().parentFile, "outside").exists())
    }

    @Test
    fun `all that the app says is there in Korean`() {
        val words = Regex("(?:say|button|edit|switch|Choice|tab)\\((?:context, )?\"([^\"]+)\"")
        val files = File("src/main/kotlin/dev/edgespec/app").listFiles()!!.filter { it.name != "Words.kt" }
        val figures = BENCH_HEADINGS + listOf("tokens", "result")
        val said = files.flatMap { file -> words.findAll(file.readText()).map { it.groupValues[1] } } +
            listOf(CHAT, BENCH, PROOF, "Measure", "Compare") + figures
        assertTrue(said.size > 20, "$said")
        assertEquals(KOREAN.keys, said.toSet())
        val before = Locale.getDefault()
        try {
            Locale.setDefault(Locale.KOREA)
            assertEquals("속도" to "auto", say("Bench") to say("auto"))
        } finally {
            Locale.setDefault(before)
        }
        assertEquals("Bench", say("Bench"))
    }
}
