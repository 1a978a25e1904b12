package dev.edgespec.runtimes

/**
 * Where the gates of a native graph stand: two a layer, four for what comes before and after, one a group of heads.  A target
 * whose layers are [tapped] has one more.  A drafter that is conditioned on it fuses what was tapped with [embed] on, and
 * goes on with its own hidden state with [load] on.
 */
internal class Gates(layers: Int, groups: Int, tapped: Boolean) {
    val embed = 2 * layers // look tokens up
    val load = embed + 1 // begin with the rows of `hidden_in` instead
    val hidden = embed + 2 // give the residual stream after the last layer
    val lm = embed + 3 // the model's own final norm and LM head
    private val first = embed + 4
    val taps = first + groups // give the residual stream where it is tapped, behind the columns of `hidden`
    val count = taps + if (tapped) 1 else 0

    /** A group of heads. */
    fun group(number: Int): Int = first + number
}
