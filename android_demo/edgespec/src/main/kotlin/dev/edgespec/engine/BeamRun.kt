package dev.edgespec.engine

import dev.edgespec.BudgetError
import dev.edgespec.InvalidRequest
import dev.edgespec.decoding.*
import dev.edgespec.planning.showBytes
import dev.edgespec.runtimes.*

/** Beam search over a source: all live texts are rows of one pass, with one cross-attention cache. */
internal fun Engine.searchBeams(source: Source, given: Settings): Result = onDecodeThread {
    val asked = given.beams!!
    val target = bundle.manifest.target
    if (!given.sampling.greedy || given.method != null || given.proposer != null) throw InvalidRequest(
        "beams are searched by plain passes, without sampling", "set temperature 0, and no method",
    )
    if (target.facts.convolutions.isNotEmpty()) throw InvalidRequest("beams are searched where no layer keeps states")
    val encoding = encoding!!.also { it.check(source) }
    val rules = bundle.manifest.text?.rules
    val options = asked.copy(
        lengthPenalty = asked.lengthPenalty ?: rules?.lengthPenalty ?: 1.0, earlyStopping = asked.earlyStopping ?: rules?.earlyStopping ?: "false",
    )
    val settings = ruled(given, source.begin.size)
    val longest = minOf(context, source.begin.size + settings.length)
    if (source.begin.isEmpty() || source.begin.size >= longest) throw InvalidRequest("a text of $longest tokens that begins with ${source.begin.size}")
    val bytes = attention.kv!!.nbytes(target.facts, longest + target.headroom) * options.beams
    if ((allowance.limit ?: bytes) < bytes) throw BudgetError("${options.beams} beams of $longest tokens take ${showBytes(bytes)}", "search fewer beams")
    val sampling = settings.sampling.copy(prompt = source.begin.size)
    val search = BeamSearch(source.begin.toList(), options, sampling, if (settings.ignoreEos) emptySet() else eos, longest, counted = 1)
    val stats = Stats()
    val slot = beamSlot(options.beams, longest)
    try {
        var start = System.nanoTime()
        encoding.attend("target", slot, source)
        stats.sourceRows = source.count
        stats.encodeMs = since(start)
        slot.prefill(source.begin.copyOf(source.begin.size - 1))
        stats.promptTokens = source.begin.size
        stats.prefillMs = since(start) - stats.encodeMs
        var places = List(options.beams) { it } // slot of each text's keys and values, then the free slots
        while (!search.over) {
            start = System.nanoTime()
            val used = places.take(search.going.size)
            val logits = slot.forwardBeams(IntArray(used.size) { search.going[it].tokens.last() }, used.toIntArray()).logits
            val took = since(start)
            stats.verifyMs += took
            stats.add(RoundTime(0.0, took, used.size), 0)
            search.step(logits)
            if (!search.over) places = slot.spread(places, search.parents)
        }
    } finally {
        slot.close()
    }
    resultOf(search, source, settings, stats)
}

private fun Engine.resultOf(search: BeamSearch, source: Source, settings: Settings, stats: Stats): Result {
    val tokens = search.best.tokens.drop(source.begin.size).toIntArray()
    val ended = !settings.ignoreEos && tokens.lastOrNull() in eos
    val decoder = StreamDecoder(codec::decode, source.begin, settings.stop)
    for (token in tokens.dropLast(if (ended) 1 else 0)) if (decoder.stopped == null) decoder.push(token)
    decoder.finish()
    val said = if (unproven.isEmpty()) true else null
    return Result(
        text = decoder.text, tokens = tokens, finish = if (decoder.stopped != null) "stop" else if (ended) "eos" else "length", stats = stats,
        methodRequested = null, methodUsed = "beams", reason = "the likeliest of ${settings.beams!!.beams} texts at a time",
        lossless = said, exact = said, approximations = approximations, operators = operators.kind, unproven = unproven,
    )
}
