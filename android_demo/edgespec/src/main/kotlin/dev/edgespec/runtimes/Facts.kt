package dev.edgespec.runtimes

import com.google.gson.JsonArray

/* What decoding and planning need to know of a model: its sizes. */

private const val MOST_LAYERS = 1 shl 10 // every number of a manifest becomes a size, a count or an offset
internal const val MOST_WIDTH = 1 shl 20
private const val MOST_VOCAB = 1 shl 24
private const val MOST_CONTEXT = 1 shl 24
private const val MOST_TAPS = 16

/** The heads of gated delta rules: [values] states [keyDim, valueDim] a layer, on [keys] queries and keys. */
class DeltaHeads(val keys: Int, val values: Int, val keyDim: Int, val valueDim: Int) {
    /** Queries, keys and values of a token, side by side. */
    val mixed: Int get() = 2 * keys * keyDim + values * valueDim
}

/** Mixtures of experts: each row goes to [chosen] of [count] MLPs of width [inner]. */
class ExpertFacts(val count: Int, val chosen: Int, val inner: Int)

/**
 * What decoding and planning need to know of a model; sizes in elements.
 *
 * @property convolutions layers with a short one instead of attention, each of which sees [taps] tokens.
 * @property delta gated delta rules behind those convolutions.
 * @property shared last layers, which read keys and values of earlier ones.
 * @property layerEmbedding width of a layer's own embedding of tokens.
 * @property angles channels that each table of angles turns; empty = positions are learned.
 * @property tied whether LM head and embedding are one matrix.
 */
class ModelFacts(
    val architecture: String, val layers: Int, val hidden: Int, val intermediate: Int, val heads: Int, val kvHeads: Int,
    val headDim: Int, val vocab: Int, val context: Int, val convolutions: List<Int>, val taps: Int, val delta: DeltaHeads?,
    headDims: List<Int>, val shared: Int, val layerEmbedding: Int, val angles: List<Int>, val tied: Boolean, val experts: ExpertFacts?,
) {
    /** Layers with keys and values. */
    val kvLayers: Int = layers - convolutions.size - shared

    /** Size of a head of each layer with keys and values. */
    val dims: List<Int> = headDims.ifEmpty { List(maxOf(0, kvLayers)) { headDim } }
}

/** Facts of a manifest, as far as they go together; [lent]: all layers read another model's keys. */
internal fun facts(of: Reader, lent: Boolean): ModelFacts {
    of.ignore("parameters") // what people are told
    fun width(name: String, from: Reader = of) = from.int(name, 1, MOST_WIDTH)
    val headDims = of.ints("head_dims", 1, MOST_WIDTH)
    val found = ModelFacts(
        of.text("architecture"), of.int("layers", 1, MOST_LAYERS), width("hidden"), width("intermediate"), width("heads"),
        width("kv_heads"), width("head_dim"), of.int("vocab", 1, MOST_VOCAB), of.int("context", 1, MOST_CONTEXT),
        of.ints("convolutions", 0, MOST_LAYERS), of.intOrNull("taps", 0, MOST_TAPS) ?: 0,
        of.partOrNull("delta")?.let {
            it.flag("space") // Mamba-2: another rule, in the graph, on states of the same kind
            DeltaHeads(width("keys", it), width("values", it), width("key_dim", it), width("value_dim", it)).also { _ -> it.done() }
        },
        headDims, of.intOrNull("shared", 0, MOST_LAYERS) ?: 0, of.intOrNull("layer_embedding", 0, MOST_WIDTH) ?: 0, angles(of), of.flag("tied"),
        of.partOrNull("experts")?.let {
            val mixed = ExpertFacts(width("count", it), width("chosen", it), width("inner", it))
            val layers = it.ints("layers", 0, MOST_LAYERS)
            val always = it.intOrNull("always", 0, MOST_WIDTH) ?: 0 // of both, which get every row
            it.done()
            if (always >= mixed.chosen || mixed.chosen > mixed.count || layers.any { layer -> layer >= of.int("layers") }) {
                throw of.wrong("experts", "${mixed.chosen} of ${mixed.count} experts in layers $layers")
            }
            mixed
        },
    )
    of.done()
    val short = found.convolutions
    val (heads, kvHeads, layers) = Triple(found.heads, found.kvHeads, found.layers)
    when {
        short.isNotEmpty() && (short != short.distinct().sorted().filter { it < layers } || found.taps < 2) ->
            throw of.wrong("convolutions", "$short of ${found.taps} tokens in $layers layers")
        found.delta != null && short.isEmpty() -> throw of.wrong("delta", "without convolutions")
        (found.shared >= layers && !lent) || found.shared > layers || (headDims.isNotEmpty() && headDims.size != found.kvLayers) ->
            throw of.wrong("head_dims", "of ${headDims.size} layers, ${found.shared} of $layers shared")
        heads % kvHeads != 0 || (found.kvLayers < 1 && !lent) -> throw of.wrong("kv_heads", "$heads heads do not share $kvHeads KV heads evenly")
    }
    return found
}

/** Channels that each table of angles turns; Gemma has one for windowed layers and one for the others. */
private fun angles(of: Reader): List<Int> {
    val rope = of.jsonOrNull("rope")?.takeIf { it.size() > 0 } ?: return emptyList()
    try {
        val others = (rope["other_dims"] as? JsonArray)?.map { it.asDouble.toInt() } ?: emptyList()
        return listOf(rope["dims"]?.asDouble?.toInt() ?: of.int("head_dim")) + others
    } catch (error: RuntimeException) { // no number
        throw of.wrong("rope", "dims: ${error.message}")
    }
}
