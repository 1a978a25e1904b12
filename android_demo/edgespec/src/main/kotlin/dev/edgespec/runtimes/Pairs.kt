package dev.edgespec.runtimes

import java.util.Random

/**
 * Whether lone rows of a strict stock graph go as pairs here, remembered in [Model.pairs].
 *
 * ONNX Runtime multiplies one row by a 4-bit matrix with another kernel than several rows, and on some processors (x86
 * without AVX-512) the kernels round differently. There a pass of one row is run as a pass of two equal rows, and so is an
 * LM head that one row reaches; the results of the second row are dropped. EDGESPEC_STOCK_PAIRS decides where it is set: 1 =
 * always, 0 = never.
 */
internal fun needsPairs(model: Model): Boolean = model.pairs ?: run {
    val forced = System.getenv("EDGESPEC_STOCK_PAIRS")
    model.pairs = forced == "1" // while it is tried: no
    if (forced != "0" && forced != "1") model.pairs = StockSlot(model, null, 1).use { loneRowDiffers(it) }
    model.pairs!!
}

/** Compare the logits of two tokens, each as a single row and followed by the other. */
private fun loneRowDiffers(slot: StockSlot): Boolean {
    val random = Random(7)
    val text = IntArray(2) { random.nextInt(slot.vocabSize) }
    return listOf(text, text.reversedArray()).any { both ->
        val alone = slot.forward(intArrayOf(both[0]), null).logits.copy()
        !alone.contentEquals(slot.forward(both, null).logits.copy(0, 1)) // by bits: NaN equals itself
    }
}
