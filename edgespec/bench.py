"""Every method of a bundle against plain decoding, in one interleaved run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from edgespec.engine import Engine, Prompt
from edgespec.errors import InvalidRequest
from edgespec.result import Result
from edgespec.settings import Settings

BASELINE = "plain"
RESAMPLES = 2000


@dataclass
class MethodFigures:
    """What was measured of one method.

    Attributes:
        method: its name; ``plain`` is the baseline.
        ms_per_token: one figure per run, prefill apart.
        ratios: plain decoding's time over this method's, pair by pair.
        results: the runs.
        same_text: runs whose tokens equal those of strict plain decoding.
        extra_bytes: memory beyond plain decoding's: draft weights and KV.
    """

    method: str
    ms_per_token: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    same_text: int = 0
    extra_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        low, high = bootstrap(self.ratios)
        rounds = sum(result.stats.rounds for result in self.results)
        tokens = sum(result.stats.tokens for result in self.results)
        drafted = sum(result.stats.drafted for result in self.results)
        accepted = sum(result.stats.accepted for result in self.results)
        return {
            "method": self.method,
            "tokens_per_second": 1000 / median(self.ms_per_token),
            "speedup": median(self.ratios),
            "speedup_low": low,
            "speedup_high": high,
            "pairs": len(self.ratios),
            "tokens_per_round": tokens / rounds if rounds else 0.0,
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "lossless": all(result.lossless for result in self.results),
            "exact": all(result.exact for result in self.results),
            "same_text": self.same_text,
            "runs": len(self.results),
            "extra_bytes": self.extra_bytes,
            "reason": self.results[-1].reason,
        }


def bootstrap(values: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the median by resampling."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = int((1 - share) / 2 * RESAMPLES)
    return medians[edge], medians[-1 - edge]


def bench(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: Settings,
    methods: Sequence[str],
    repeats: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[MethodFigures]:
    """Measure methods against the fastest plain decoding of the same bundle.

    The baseline runs the bundle's plain graph (no gates, no padding) in a session of its own.
    Baseline and methods take turns on every prompt, so that a slow moment of the machine hits all of them; a ratio is
    made of neighbours in time.

    Args:
        engine: the loaded bundle.
        prompts: texts or token ids.
        settings: sampling, length and gamma of every run.
        methods: which methods.
        repeats: rounds over all prompts, after one that is not timed.
        progress: called with (done, of, what).
    """
    native = engine.operators.kind == "native"  # one graph: its plain decoding is the fastest
    share = engine if native or not engine.strict else None
    plain = Engine(
        engine.bundle,
        threads=engine.model.threads,
        context=engine.context,
        strict=False,
        operators=engine.operators.kind,
        graph="native" if native else "plain",
        share=share,
    )
    runs: list[tuple[str, Engine, Settings]] = [(BASELINE, plain, settings.changed(method="ar"))]
    runs += [(name, engine, settings.changed(method=name)) for name in methods]
    figures = {name: MethodFigures(name) for name, _, _ in runs}
    expected = [engine.generate(prompt, settings.changed(method="ar")).tokens for prompt in prompts]
    done, of = 0, len(runs) * len(prompts) * (repeats + 1)
    for repeat in range(repeats + 1):
        for at, prompt in enumerate(prompts):
            turn = runs[repeat % len(runs) :] + runs[: repeat % len(runs)]
            times: dict[str, float] = {}
            for name, where, what in turn:
                result = where.generate(prompt, what)
                times[name] = result.stats.decode_ms / result.stats.tokens
                if repeat:
                    found = figures[name]
                    found.results.append(result)
                    found.same_text += result.tokens == expected[at]
                done += 1
                if progress:
                    progress(done, of, name)
            if repeat:
                for name, ms in times.items():
                    figures[name].ms_per_token.append(ms)
                    figures[name].ratios.append(times[BASELINE] / ms)
    if "speculative" in figures:
        figures["speculative"].extra_bytes = _draft_bytes(engine)
    plain.close()
    return list(figures.values())


def check_plot(path: Path) -> None:
    """Refuse early what ``plot`` could not write.

    Raises:
        InvalidRequest: not a PNG, or a folder that is not there.
    """
    import matplotlib  # noqa: F401  missing: better now than after the measurement

    if path.suffix.lower() != ".png":
        raise InvalidRequest(f"{path}: expected a name that ends in .png")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{path}: there is no folder {path.parent}", "create it first")


def plot(figures: Sequence[MethodFigures], path: Path, title: str) -> None:
    """Bars of the speed-ups with their intervals, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [figure.as_dict() for figure in figures]
    figure, axes = pyplot.subplots(figsize=(7, 0.6 * len(rows) + 1.4))
    names = [row["method"] for row in rows]
    speeds = [row["speedup"] for row in rows]
    errors = [
        [row["speedup"] - row["speedup_low"] for row in rows],
        [row["speedup_high"] - row["speedup"] for row in rows],
    ]
    axes.barh(names, speeds, xerr=errors, color=["#9aa5b1" if name == BASELINE else "#3b7dd8" for name in names])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("speed over plain decoding (median, 95 % interval)")
    axes.set_title(title, parse_math=False)  # a $ in a name is a $
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draft_bytes(engine: Engine) -> int:
    part = engine.bundle.manifest.draft
    if part is None:
        return 0
    weights = engine.bundle.manifest.files[part.weights].size
    return weights + part.facts.kv_bytes_per_token * engine.lanes.longest()
