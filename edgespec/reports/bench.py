"""Compare every method of every bundle with plain decoding of the same bundle, in one interleaved run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR, AUTO, METHODS, UNO
from edgespec.engine.engine import Engine
from edgespec.engine.inputs import Prompt
from edgespec.engine.result import Result, of_all
from edgespec.errors import InvalidRequest
from edgespec.planning.weights import group_bytes
from edgespec.reports.measuring import turned

BASELINE = "plain"
RESAMPLES = 2000


@dataclass
class MethodFigures:
    """Measurements of one method."""

    method: str  # its name; ``plain`` is the baseline
    ms_per_token: list[float] = field(default_factory=list)  # one figure per run, without prefill
    ratios: list[float] = field(default_factory=list)  # plain decoding's time over this method's, pair by pair
    results: list[Result] = field(default_factory=list)  # the runs
    same_text: int = 0  # runs whose tokens equal those of strict plain decoding
    extra_bytes: int = 0  # memory beyond plain decoding's: draft weights and KV, or the weights of heads
    bundle: str = ""  # the bundle's folder
    format: str = ""  # of its weights
    weight_bytes: int = 0  # of the target's weights
    # tokens per second of several sequences together, one figure per run; empty = not measured
    batch: list[float] = field(default_factory=list)
    warm_up: bool = True  # what there is comes from the first round, whose times do not count once there are others

    def take(self, result: Result, base_ms: float, same: bool) -> None:
        """Add a run; ``base_ms``: time per token of plain decoding in the same turn."""
        ms = result.stats.decode_ms / result.stats.tokens
        self.results.append(result)
        self.same_text += same
        self.ms_per_token.append(ms)
        self.ratios.append(base_ms / ms)

    def begin(self) -> None:
        """Discard the runs of the first round."""
        self.results, self.ms_per_token, self.ratios, self.same_text, self.warm_up = [], [], [], 0, False

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; the keys are stable."""
        low, high = bootstrap(self.ratios)
        names = ("rounds", "tokens", "drafted", "accepted")
        rounds, tokens, drafted, accepted = (sum(getattr(one.stats, name) for one in self.results) for name in names)
        return {
            "method": self.method,
            "tokens_per_second": 1000 / median(self.ms_per_token),
            "speedup": median(self.ratios),
            "speedup_low": low,
            "speedup_high": high,
            "pairs": len(self.ratios),
            "tokens_per_round": tokens / rounds if rounds else 0.0,
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "lossless": of_all(result.lossless for result in self.results),
            "exact": of_all(result.exact for result in self.results),
            "unverified": list(dict.fromkeys(reason for result in self.results for reason in result.unverified)),
            "same_text": self.same_text,
            "runs": len(self.results),
            "extra_bytes": self.extra_bytes,
            "reason": self.results[-1].reason,
            "bundle": self.bundle,
            "format": self.format,
            "weight_bytes": self.weight_bytes,
            "batch_tokens_per_second": median(self.batch) if self.batch else None,
        }


def bootstrap(values: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Return the percentile interval of the median, by resampling."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = int((1 - share) / 2 * RESAMPLES)
    return medians[edge], medians[-1 - edge]


@dataclass
class _Run:
    """One method of one bundle, and its results; ``base``: the plain decoding that it is compared with."""

    engine: Engine
    settings: Settings
    found: MethodFigures
    base: int
    expected: list[list[int]]


def bench_all(
    entries: Sequence[tuple[Engine, Sequence[str]]],  # of each bundle, and its methods
    prompts: Sequence[Prompt],  # texts or token ids
    settings: Settings,  # sampling, length and gamma of every run
    repeats: int,  # rounds over all prompts, after one that is not timed
    batch: int = 0,  # also time this many sequences together, repeating the prompts if there are fewer; 0 = do not
    progress: Callable[[int, int, str], None] | None = None,  # called with (done, of, what)
    on_stop: Callable[[], None] | None = None,
    on_figures: Callable[[Sequence[MethodFigures]], None] | None = None,
) -> list[MethodFigures]:
    """Measure methods of several bundles, interleaved on every prompt.

    ``on_stop`` is called where Ctrl-C ends it before its time; what was measured until then is returned: of the first
    round, whose times do not count otherwise, if there is nothing else.  ``on_figures`` is called with what there is
    after each run of the first prompt, and then after each prompt that all methods have answered.

    Returns:
        for each bundle its plain decoding, then its methods; those that Ctrl-C left without a run are not there.

    Raises:
        InvalidRequest: token ids for bundles whose tokenizers differ.
        KeyboardInterrupt: Ctrl-C without ``on_stop``, or before anything was timed.
    """
    tokenizers = {engine.codec.vocabulary_sha256() for engine, _ in entries}
    if len(tokenizers) > 1 and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest("these bundles have different tokenizers", "give texts with --prompts FILE")
    runs: list[_Run] = []
    for engine, methods in entries:
        runs += _runs(engine, methods, prompts, settings, len(runs))
    try:
        _measure(runs, prompts, repeats, batch, progress, on_figures)
    except KeyboardInterrupt:
        if on_stop is None or not any(run.found.ratios for run in runs):
            raise
        on_stop()
    for number, run in enumerate(runs):
        run.found.extra_bytes = sum(extra_bytes(run.engine, name) for name in _loaded(run.found))
        if run.base == number:
            run.engine.close()
    return [run.found for run in runs if run.found.ratios]


def _measure(
    runs: Sequence[_Run],
    prompts: Sequence[Prompt],
    repeats: int,
    batch: int,
    progress: Callable[[int, int, str], None] | None,
    on_figures: Callable[[Sequence[MethodFigures]], None] | None,
) -> None:
    """Measure all methods on every prompt; a prompt counts once all have finished it, except in the first round."""
    done, of = count(1), len(runs) * (len(prompts) + bool(batch)) * (repeats + 1)
    together = [prompts[i % len(prompts)] for i in range(batch)]

    def tell(what: str) -> None:
        if progress:
            progress(next(done), of, what)

    def show(now: bool) -> None:
        if on_figures and now:
            on_figures([run.found for run in runs if run.found.ratios])

    for repeat in range(repeats + 1):
        turn = turned(range(len(runs)), repeat)
        for at, prompt in enumerate(prompts):
            results: dict[int, Result] = {}
            for number in turn:
                results[number] = runs[number].engine.generate(prompt, runs[number].settings)
                tell(runs[number].found.method)
                if not repeat:  # plain decoding has the first turn of its bundle in this round
                    _count(runs[number], results, number, at)
                    show(at == 0)
            for number in turn if repeat else ():
                if runs[number].found.warm_up:
                    runs[number].found.begin()
                _count(runs[number], results, number, at)
            show(repeat + at > 0)
        for number in turn if batch else ():
            _decode_together(runs[number], together, bool(repeat))
            tell(f"{runs[number].found.method}, {batch} together")


def _decode_together(run: _Run, prompts: Sequence[Prompt], counts: bool) -> None:
    begun = perf_counter()
    batched = run.engine.generate_batch(prompts, run.settings, batch=len(prompts))
    taken = perf_counter() - begun - sum(result.stats.prefill_ms for result in batched) / 1000
    if counts:
        run.found.batch.append(sum(len(result.tokens) for result in batched) / taken)


def _count(run: _Run, results: dict[int, Result], number: int, at: int) -> None:
    base = results[run.base].stats
    run.found.take(results[number], base.decode_ms / base.tokens, results[number].tokens == run.expected[at])


def _runs(
    engine: Engine, methods: Sequence[str], prompts: Sequence[Prompt], settings: Settings, base: int
) -> Iterator[_Run]:
    """Make the runs of a bundle: plain decoding, which is number ``base``, and its methods."""
    bundle, target = str(engine.bundle.path), engine.bundle.manifest.target
    size = engine.bundle.manifest.files[target.weights].size
    expected = [engine.generate(prompt, settings.changed(method=AR)).tokens for prompt in prompts]
    for name, where in ((BASELINE, engine.plain()), *((name, engine) for name in methods)):
        found = MethodFigures(name, bundle=bundle, format=target.format, weight_bytes=size)
        yield _Run(where, settings.changed(method=AR if name == BASELINE else name), found, base, expected)


def _loaded(found: MethodFigures) -> set[str]:
    """List the methods whose parts its runs may have loaded; for auto, the ones that were in use."""
    if found.method != AUTO:
        return {found.method}
    changes = [change for result in found.results for change in result.stats.switches]
    return {result.method_used for result in found.results}.union(*({at["from"], at["to"]} for at in changes))


def check_output(path: Path, *endings: str) -> None:
    """Check early that a picture or a page can be written.

    Raises:
        InvalidRequest: another ending, or a folder that is not there.
    """
    import matplotlib  # noqa: F401  missing: better now than after the measurement

    if path.suffix.lower() not in endings:
        raise InvalidRequest(f"{path}: expected a name that ends in {endings[0]}")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{path}: there is no folder {path.parent}", "create it first")


def extra_bytes(engine: Engine, method: str) -> int:
    """Return a method's memory beyond plain decoding's: weights and KV of a draft, weights of heads, or an adapter."""
    manifest, target = engine.bundle.manifest, engine.bundle.manifest.target
    if method == UNO and (adapters := getattr(engine.model, "adapters", None)) is not None:
        return int(adapters.draft_bytes)
    draft = manifest.beside(METHODS[method].needs) if method in METHODS else None
    if draft is not None:
        weights = manifest.files[draft.weights].size
        return weights + draft.facts.kv_bytes_per_token * engine.sessions.longest()
    groups = manifest.methods[method].heads if method in manifest.methods else ()
    return sum(group_bytes(target, one, target.layout == "native") for one in target.heads if one.name in groups)
