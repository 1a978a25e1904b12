package dev.edgespec.runtimes

/**
 * One way to run a bundle, nothing left open: what memory is predicted for.
 *
 * @property context tokens held at once, prompt and answer.
 * @property kv how native operators keep the target's keys and values; null = what the bundle was exported for.
 * @property gamma most guesses a round; of a tree its nodes.
 * @property chunk rows of a prefill's pass.
 * @property greedy whether only the likeliest token of a row is needed; false = whole rows of logits.
 * @property checkpoints copies of a model's states that each sequence keeps.
 */
data class RunOptions(
    val method: String = "ar",
    val operators: String = "native",
    val context: Int = 512,
    val kv: KvFormat? = null,
    val gamma: Int = GAMMA,
    val chunk: Int = PREFILL_CHUNK,
    val greedy: Boolean = true,
    val checkpoints: Int = CHECKPOINTS,
)
