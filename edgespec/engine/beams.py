"""Beam search over a bundle: all live texts are rows of one pass, over one memory or one prompt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from edgespec.decoding.beams import BeamOptions, BeamSearch
from edgespec.decoding.loop import check_prompt
from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass
from edgespec.engine.input import Input
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.result import Finish, Result
from edgespec.engine.rules import ruled, with_length
from edgespec.errors import BudgetError, InvalidRequest
from edgespec.runtimes.process import peak_bytes
from edgespec.runtimes.slots.native_batch import BatchSlot, NativeBatch
from edgespec.runtimes.text.stream import StreamDecoder

NAME = "beams"


def search_beams(
    engine: LoadedBundle, given: Input, settings: Settings, cancel: threading.Event | None = None
) -> Result:
    """Search the likeliest text; ``cancel`` ends the search after the current pass, with the best one so far.

    Raises:
        BudgetError: this many texts do not fit in memory.
        InvalidRequest: stock operators, sampling, a grammar, or a prompt that cannot be.
    """
    assert settings.beams is not None
    options = with_rules(engine, settings.beams)
    if engine.operators.kind != "native":
        raise InvalidRequest("beams are searched on native operators, and this model runs on stock ones")
    if not settings.sampling.greedy or settings.grammar is not None or settings.method or settings.guided:
        raise InvalidRequest(
            "beams are searched by plain passes, without sampling, grammars and guidance",
            "set temperature 0, and no method",
        )
    settings = with_length(engine, settings, given)
    longest = min(engine.context, len(given) + engine.most_new(settings))
    check_prompt(given, settings.sampling, engine.bundle.manifest.target.facts.vocab, engine.context)
    if engine.memory_budget.width(options.beams, longest, "ar", greedy=False) < options.beams:
        raise BudgetError(f"{options.beams} beams of {longest} tokens do not fit the memory", "search fewer beams")
    sampling = replace(settings.sampling, prompt=len(given))
    sampling = ruled(engine, sampling, replace(settings, max_new_tokens=longest - len(given)), given)
    counted = 1 if engine.inputs.sourced else len(given)
    ends = () if settings.ignore_eos else tuple(engine.eos)
    adapter = engine.adapter_number(settings.adapter)
    search, stats = BeamSearch(given, options, sampling, ends, longest, counted), Stats()
    batch = NativeBatch(engine.model, options.beams, context=engine.context)
    try:
        with given:
            _run(engine, search, batch, given, stats, cancel, adapter)
    finally:
        with engine.lock:
            batch.close()
    return _result(engine, search, settings, stats, cancelled=not search.over)


def with_rules(engine: LoadedBundle, options: BeamOptions) -> BeamOptions:
    """Fill unset options from the model's generation_config.json."""
    text = engine.bundle.manifest.text
    if text is None:
        return options
    penalty, early = options.length_penalty, options.early_stopping
    return replace(
        options,
        length_penalty=text.rules.length_penalty if penalty is None else penalty,
        early_stopping=text.rules.early_stopping if early is None else early,
    )


def _run(
    engine: LoadedBundle,
    search: BeamSearch,
    batch: NativeBatch,
    given: Input,
    stats: Stats,
    cancel: threading.Event | None,
    adapter: int,
) -> None:
    """Read the prompt once, and search to the end."""
    start = perf_counter()
    slots = list(batch.slots)
    for slot in slots:
        slot.use_adapter(adapter)
    with engine.lock:
        engine.require_open()
        stats.source_rows = len(given.content)
        stats.encode_ms = sum(engine.inputs.attend({"target": slot}, given) for slot in slots)
        slots[0].prefill(search.begin[:-1])
    stats.prompt_tokens, stats.prefill_ms = len(search.begin), 1000 * (perf_counter() - start)
    while not search.over and not (cancel is not None and cancel.is_set()):
        start = perf_counter()
        with engine.lock:
            engine.require_open()
            used = slots[: len(search.going)]
            passes = [
                (slot, Pass(np.array(beam.tokens[-1:], np.int64)))
                for slot, beam in zip(used, search.going, strict=True)
            ]
            outputs = batch.run(passes)
            for slot in used:
                slot.keep([0])
            stats.verify_ms += 1000 * (perf_counter() - start)
            stats.rounds += 1
            stats.work += len(used)
            search.step(np.concatenate([output.logits for output in outputs]))
            if not search.over:
                slots = _reordered(slots, search.parents)


def _reordered(slots: list[BatchSlot], parents: Sequence[int]) -> list[BatchSlot]:
    """Give each live text the slot of the one that it continues, or a copy of it; others stay after them.

    The first to continue a text takes its slot.  Whole blocks of a copy are the same memory.
    """
    found: dict[int, BatchSlot] = {}
    for number, parent in enumerate(parents):
        if slots[parent] not in found.values():
            found[number] = slots[parent]
    free = [slot for slot in slots if slot not in found.values()]
    for number, parent in enumerate(parents):
        if number not in found:
            found[number] = slot = free.pop()
            slot.copy_prefix_from(slots[parent], len(slots[parent].tokens))
    return [*(found[number] for number in range(len(parents))), *free]


def _result(engine: LoadedBundle, search: BeamSearch, settings: Settings, stats: Stats, cancelled: bool) -> Result:
    best, begin = search.best, list(search.begin)
    tokens = list(best.tokens[len(begin) :])
    ended = bool(tokens) and tokens[-1] in engine.eos and not settings.ignore_eos
    decoder = StreamDecoder(engine.codec, begin, settings.stop, settings.markers)
    for token in tokens[: len(tokens) - ended]:
        decoder.push([token])
        if decoder.stopped is not None:
            break
    decoder.finish()
    finish: Finish = "cancelled" if cancelled else "stop" if decoder.stopped else "eos" if ended else "length"
    stats.tokens = len(tokens)
    unverified = engine.unverified()
    options = settings.beams
    assert options is not None
    return Result(
        text=decoder.text,
        tokens=tokens,
        finish=finish,
        stats=stats,
        method_requested=None,
        method_used=NAME,
        reason=f"the likeliest of {options.beams} texts at a time: score {float(best.score):.4f}",
        lossless=None if unverified else True,
        exact=None if unverified else True,
        unverified=unverified,
        approximations=list(engine.approximations),
        operators=engine.operators.kind,
        device=engine.device,
        peak_bytes=peak_bytes(),
        stop=decoder.stopped,
    )
