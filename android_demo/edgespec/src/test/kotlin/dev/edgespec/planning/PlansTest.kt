package dev.edgespec.planning

import com.google.gson.*
import dev.edgespec.EdgespecError
import dev.edgespec.decoding.DraftOptions
import dev.edgespec.engine.*
import dev.edgespec.runtimes.*
import dev.edgespec.support.*
import java.io.File
import java.nio.file.Path
import org.junit.jupiter.api.Assertions.*
import org.junit.jupiter.api.Test
import org.junit.jupiter.api.io.TempDir

/** Memory plans and auto's candidates equal those of the Python side, byte for byte and word for word. */
class PlansTest {
    @TempDir
    lateinit var folder: Path

    private fun each(use: (JsonObject, Manifest, RunOptions, Host) -> Unit) {
        for (case in vectors("plans")) {
            File(folder.toFile(), MANIFEST).writeText(case["manifest"].toString())
            // Python counts its process, and pages of a cache once they are written
            val host = Host(zeroed = false, process = case["process"].asLong)
            use(case, readManifest(folder.toFile()), RunOptions(operators = case.text("operators")), host)
        }
    }

    /** The result, or the error message. */
    private fun said(find: () -> Any?): Any? = try {
        find()
    } catch (error: EdgespecError) {
        mapOf("error" to error.what, "hint" to error.hint)
    }

    private fun json(found: Any?): JsonElement = GsonBuilder().serializeNulls().create().toJsonTree(found)

    @Test
    fun `every part of the memory has the bytes of the Python side`() = each { case, manifest, use, host ->
        for (one in case["memory"].asJsonArray.map { it.asJsonObject }) {
            val chosen = use.copy(
                method = one.text("method"), context = one.int("context"), gamma = one.int("gamma"), chunk = one.int("chunk"),
                greedy = one.flag("greedy"), checkpoints = one.int("checkpoints"),
            )
            val expected = one["parts"].asJsonObject.entrySet().associate { it.key to it.value.asLong }
            assertEquals(expected, memoryOf(manifest, chosen, host).associate { it.name to it.bytes }, "$chosen ${manifest.target.format}")
            val zeroed = memoryOf(manifest, chosen).associate { it.name to it.bytes }
            assertTrue(zeroed.getValue("kv") >= expected.getValue("kv") && "process" !in zeroed, "$chosen")
        }
    }

    @Test
    fun `the same is admitted under every limit, for the same reason`() = each { case, manifest, use, host ->
        for (one in case["admitted"].asJsonArray.map { it.asJsonObject }) {
            val limit = one["limit"].asLong
            val allowance = Allowance(manifest, use, limit, host)
            assertEquals(one["bundle"], json(said { allowance.admitBundle().let { null } }))
            val methods = listOf("ngram", "speculative", "medusa", "mtp")
            assertEquals(one["together"], json(allowance.together(methods, 700)), "$limit")
            for (name in methods + "ar") {
                val how = one[name]?.asJsonObject ?: continue
                val found = said {
                    allowance.admit(name, 700, how.int("gamma"), how.flag("greedy"), how["busy"].asLong, how["idle"].asLong)
                        .let { listOf(it.method, it.chunk, it.reason, it.crowded, it.checkpoints) }
                }
                assertEquals(how["found"], json(found), "$name in $limit")
            }
        }
    }

    @Test
    fun `auto and chains choose the same methods`() = each { case, manifest, _, _ ->
        fun shown(choice: MethodChoice): Map<String, Any> {
            val several = choice.several.takeIf { it.size > 1 || choice.proposers.isNotEmpty() } ?: emptyList()
            return mapOf(
                "name" to choice.name, "gamma" to choice.gamma, "reason" to choice.reason, "promise" to choice.promise,
                "several" to several.map { one -> shown(one) },
            )
        }
        for (one in case["choices"].asJsonArray.map { it.asJsonObject }) {
            val drafts = DraftOptions(proposers = one["proposers"].asJsonArray.map { it.asString })
            val wanted = one["method"].takeIf { !it.isJsonNull }?.asString
            assertEquals(one["found"], json(said { shown(chooseMethod(manifest, wanted, drafts)) }), "$wanted $drafts")
        }
    }

    @Test
    fun `a plan has the longest context that fits, and the fastest method first`() = each { _, manifest, use, host ->
        val most = manifest.target.facts.context
        val allowance = Allowance(manifest, use, null, host)
        fun bytes(method: String, tokens: Int) = allowance.parts(method, tokens).sumOf { it.bytes }
        val runs = plan(manifest, allowance, most, bytes("ar", most / 2))
        assertEquals(manifest.methods.keys, runs.map { it.method }.toSet())
        assertEquals(most / 2, runs.first { it.method == "ar" }.context)
        for (run in runs.filter { it.fits && it.context < most }) {
            assertTrue(run.bytes <= bytes("ar", most / 2) && bytes(run.method, run.context + 64) > bytes("ar", most / 2), run.method)
        }
        val order = runs.map { it.fits to (it.speedup ?: 1.0) }
        assertEquals(order.sortedWith(compareBy({ !it.first }, { -it.second })), order)
    }
}
