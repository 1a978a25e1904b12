package dev.edgespec.runtimes

import com.google.gson.JsonArray

/* Sizes of a model for decoding and planning. */

private const val MOST_LAYERS = 1 shl 10 // every number of a manifest becomes a size, a count or an offset
internal const val MOST_WIDTH = 1 shl 20
private const val MOST_VOCAB = 1 shl 24
private const val MOST_CONTEXT = 1 shl 24
private const val MOST_TAPS = 16

/** The heads of gated delta rules: [values] states [keyDim, valueDim] a layer, on [keys] queries and keys. */
class DeltaHeads(val keys: Int, val values: Int, val keyDim: Int, val valueDim: Int) {
    val mixed: Int get() = 2 * keys * keyDim + values * valueDim // queries, keys and values of a token, side by side
}

/** Mixtures of experts: each row goes to [chosen] of [count] MLPs of width [inner]. */
class ExpertFacts(val count: Int, val chosen: Int, val inner: Int)

/**
 * Facts of a model for decoding and planning; sizes in elements.  Layers of [convolutions] have a short one, of [taps] tokens, instead of
 * attention, followed by gated [delta] rules; [shared] last layers read keys and values of earlier ones; [layerEmbedding]: width of a
 * layer's own embedding of tokens; [angles]: channels that each table of angles turns, empty = positions are learned; [tied]: LM head and
 * embedding are one matrix.
 */
class ModelFacts(
    val architecture: String, val layers: Int, val hidden: Int, val intermediate: Int, val heads: Int, val kvHeads: Int,
    val headDim: Int, val vocab: Int, val context: Int, val convolutions: List<Int>, val taps: Int, val delta: DeltaHeads?,
    headDims: List<Int>, val shared: Int, val layerEmbedding: Int, val angles: List<Int>, val tied: Boolean, val experts: ExpertFacts?,
) {
    val kvLayers: Int = layers - convolutions.size - shared // layers with keys and values

    /** Size of a head of each layer with keys and values. */
    val dims: List<Int> = headDims.ifEmpty { List(maxOf(0, kvLayers)) { headDim } }
}

/** Facts of a manifest, as far as they go together; [borrows]: all layers read another model's keys. */
internal fun Reader.facts(borrows: Boolean): ModelFacts {
    ignore("parameters") // only shown to users
    fun Reader.width(name: String) = int(name, 1, MOST_WIDTH)
    val headDims = ints("head_dims", 1, MOST_WIDTH)
    val layers = int("layers", 1, MOST_LAYERS)
    val found = ModelFacts(
        text("architecture"), layers, width("hidden"), width("intermediate"), width("heads"), width("kv_heads"), width("head_dim"),
        int("vocab", 1, MOST_VOCAB), int("context", 1, MOST_CONTEXT), ints("convolutions", 0, MOST_LAYERS),
        intOrNull("taps", 0, MOST_TAPS) ?: 0,
        partOrNull("delta") {
            flag("space") // Mamba-2: another rule, in the graph, on states of the same kind
            DeltaHeads(width("keys"), width("values"), width("key_dim"), width("value_dim"))
        },
        headDims, intOrNull("shared", 0, MOST_LAYERS) ?: 0, intOrNull("layer_embedding", 0, MOST_WIDTH) ?: 0, angles(), flag("tied"),
        partOrNull("experts") {
            val mixed = ExpertFacts(width("count"), width("chosen"), width("inner"))
            val those = ints("layers", 0, MOST_LAYERS)
            val always = intOrNull("always", 0, MOST_WIDTH) ?: 0 // of both, which get every row
            if (always >= mixed.chosen || mixed.chosen > mixed.count || those.any { it >= layers }) {
                throw this@facts.wrong("experts", "${mixed.chosen} of ${mixed.count} experts in layers $those")
            }
            mixed
        },
    )
    val short = found.convolutions
    val (heads, kvHeads) = found.heads to found.kvHeads
    when {
        short.isNotEmpty() && (short != short.distinct().sorted().filter { it < layers } || found.taps < 2) ->
            throw wrong("convolutions", "$short of ${found.taps} tokens in $layers layers")
        found.delta != null && short.isEmpty() -> throw wrong("delta", "without convolutions")
        (found.shared >= layers && !borrows) || found.shared > layers || (headDims.isNotEmpty() && headDims.size != found.kvLayers) ->
            throw wrong("head_dims", "of ${headDims.size} layers, ${found.shared} of $layers shared")
        heads % kvHeads != 0 || (found.kvLayers < 1 && !borrows) ->
            throw wrong("kv_heads", "$heads heads do not share $kvHeads KV heads evenly")
    }
    return found
}

/** Channels that each table of angles turns; Gemma has one for windowed layers and one for the others. */
private fun Reader.angles(): List<Int> {
    val rope = jsonOrNull("rope")?.takeIf { it.size() > 0 } ?: return emptyList()
    try {
        val others = (rope["other_dims"] as? JsonArray)?.map { it.asDouble.toInt() } ?: emptyList()
        return listOf(rope["dims"]?.asDouble?.toInt() ?: int("head_dim")) + others
    } catch (error: RuntimeException) { // no number
        throw wrong("rope", "dims: ${error.message}")
    }
}
