package dev.edgespec.runtimes

/**
 * Indices of the gates of a native graph: two per layer, four for the steps before and after, one per group of heads.  A target whose
 * layers are [tapped] has one more.  A drafter that is conditioned on it fuses the taps with [embed] on, and continues with its own hidden
 * state with [load] on.  A decoder that [attends] over cross-attention caches has a last gate to fill them.
 */
internal class Gates(layers: Int, groups: Int, tapped: Boolean, hasPlanes: Boolean, attends: Boolean) {
    val embed = 2 * layers // look tokens up
    val load = embed + 1 // begin with the rows of `hidden_in` instead
    val hidden = embed + 2 // give the residual stream after the last layer
    val lm = embed + 3 // the model's own final norm and LM head
    private val first = embed + 4
    val auxHidden = first + groups // return the auxiliary hidden states, after the columns of `hidden`
    val planes = auxHidden + if (tapped) 1 else 0 // read low planes: of 2 a layer, of the head, of the embedding
    val fill = planes + if (hasPlanes) 2 * layers + 2 else 0 // make keys and values of a memory of `hidden_in`, and nothing else
    val count = fill + if (attends) 1 else 0

    fun group(number: Int): Int = first + number
}
