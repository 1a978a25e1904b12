package dev.edgespec.reports

import dev.edgespec.decoding.Settings
import dev.edgespec.engine.Engine

/** A golden vector of a bundle, written again: [equal] = every token is the one that the exporting machine wrote. */
class Proved(val method: String, val expected: IntArray, val got: IntArray) {
    val equal: Boolean get() = expected.contentEquals(got)

    /** For JSON. */
    fun asMap(): Map<String, Any?> =
        linkedMapOf("method" to method, "equal" to equal, "expected" to expected.toList(), "got" to got.toList())
}

/** The bundle's golden vectors, written again here; [progress] is told (done, of). */
fun proof(engine: Engine, progress: (Int, Int) -> Unit = { _, _ -> }): List<Proved> {
    val golden = engine.bundle.manifest.golden
    return golden.mapIndexed { at, vector ->
        val result = engine.generate(vector.prompt, Settings(vector.method, vector.tokens.size))
        Proved(vector.method, vector.tokens, result.tokens).also { progress(at + 1, golden.size) }
    }
}
