"""What a plan's pick loses against the best that would have fitted, over budgets, contexts and kinds of prompts.

    python -m benchmarks.plans BUNDLE... [--new 64] [--repeats 2] [--calibrate-on golden] [--json]

The bundles are one model in several formats.  Each is calibrated on other texts of the kind (``edgespec calibrate
--prompts``) or, with ``--calibrate-on golden``, on the bundle's own prompts whatever the kind.  Then every method of
every bundle, and method auto, is measured beside plain decoding, interleaved, on four kinds of prompts: beginnings of
the model's texts, long ones, texts that repeat themselves, and random tokens.  For every context, and budgets at which
something more fits, the pick's measured tokens a second are compared with those of the best candidate that fits:
regret = 1 - pick / best.  The plan sees nothing of the prompts that are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import conditions, show
from benchmarks.prediction import PLAIN, own_prompts
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.planning.plan import Option, PlanRequest, make_plan
from edgespec.planning.profiles import Profile
from edgespec.reports.bench import BASELINE, bench_all
from edgespec.reports.calibrate import calibrate
from edgespec.runtimes.options import LoadOptions

CONTEXTS = (512, 4096, 16384)
BUDGETS = 6  # of each context
LONG, SHORT = 400, 24  # tokens
AUTO = "auto"
Rates = dict[tuple[str, str], float]  # (bundle, method) -> measured tokens a second


@dataclass(frozen=True)
class Cell:
    """One pick: ``regret`` of the planned method, ``auto`` of method auto on the planned bundle."""

    prompts: str
    context: int
    budget: int
    pick: str
    best: str
    regret: float
    auto: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--calibrate-on", choices=["kind", "golden"], default="kind")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    engines = [load(path, check=False, budget="off") for path in arguments.bundles]
    golden = arguments.calibrate_on == "golden"
    cells, profiles = [], calibrated(engines, arguments.seconds) if golden else []
    for name, prompts in kinds(engines[0], 2 * arguments.prompts).items():
        seen, unseen = prompts[: arguments.prompts], prompts[arguments.prompts :]
        profiles = profiles if golden else calibrated(engines, arguments.seconds, seen)
        cells += regrets(name, engines, profiles, measured(engines, unseen, arguments.new, arguments.repeats))
    summary = {
        "cells": len(cells),
        "mean_regret": round(mean(cell.regret for cell in cells), 4),
        "mean_regret_auto": round(mean(cell.auto for cell in cells), 4),
    }
    if arguments.json:
        show(conditions() | summary | {"rows": [asdict(cell) for cell in cells]})
        return
    for kind in dict.fromkeys(cell.prompts for cell in cells):
        of_it = [cell for cell in cells if cell.prompts == kind]
        print(f"{kind}: pick {mean(cell.regret for cell in of_it):.1%}, auto {mean(cell.auto for cell in of_it):.1%}")
        for cell in of_it:
            print(
                f"  {cell.context:6} {cell.budget >> 20:6} MiB  {cell.pick:32} best {cell.best:32} {cell.regret:6.1%}"
            )
    print(summary)


def calibrated(engines: Sequence[Engine], seconds: float, prompts: Sequence[list[int]] = ()) -> list[Profile]:
    """Profiles of all bundles, on these prompts or on the bundles' own."""
    return [calibrate(engine.bundle, seconds=seconds, prompts=prompts) for engine in engines]


def kinds(engine: Engine, count: int) -> dict[str, list[list[int]]]:
    """Prompts of four kinds, as tokens."""
    texts = own_prompts(engine, count, 100)
    long = [_written(engine, text, LONG) for text in texts]
    repeated = [[*text[: LONG // 2], *text[: LONG // 2], *text[:SHORT]] for text in long]
    draw = np.random.default_rng(0)
    random = [draw.integers(3, engine.bundle.manifest.target.facts.vocab, SHORT).tolist() for _ in range(count)]
    return {"own": texts, "long": long, "repeated": repeated, "random": random}


def _written(engine: Engine, prompt: Sequence[int], tokens: int) -> list[int]:
    """Make a text drawn at temperature 1, seeded."""
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "acceptance": "coupled", "ignore_eos": True}
    result = engine.generate(prompt, method=PLAIN, max_new_tokens=tokens, **how)
    return [*prompt, *result.tokens]


def measured(engines: Sequence[Engine], prompts: Sequence[list[int]], new: int, repeats: int) -> Rates:
    """Tokens a second of every method of every bundle, all taking turns."""
    entries = [(engine, [*(name for name in engine.methods if name != PLAIN), AUTO]) for engine in engines]
    figures = bench_all(entries, prompts, Settings(max_new_tokens=new, ignore_eos=True), repeats)
    rows = [figure.as_dict() for figure in figures]
    return {
        (row["bundle"], PLAIN if row["method"] == BASELINE else row["method"]): row["tokens_per_second"] for row in rows
    }


def regrets(kind: str, engines: Sequence[Engine], profiles: Sequence[Profile], rates: Rates) -> list[Cell]:
    """Make a cell for every context and budget."""
    options = [
        Option(engine.bundle.manifest, str(engine.bundle.path), profile=profile)
        for engine, profile in zip(engines, profiles, strict=True)
    ]
    found = []
    for context in CONTEXTS:
        if context > engines[0].bundle.manifest.target.facts.context:
            continue
        load = LoadOptions(context=context, threads=engines[0].run.threads)
        every = make_plan(options, PlanRequest(1 << 50, load=load)).candidates
        peaks = sorted({one.memory.peak for one in every if not one.approximates})
        for budget in peaks[:: max(1, len(peaks) // BUDGETS)]:
            plan = make_plan(options, PlanRequest(budget, load=load))
            assert plan.pick is not None
            fits = [(one.option.name, one.use.method) for one in plan.candidates if one.fits and not one.approximates]
            best = max(fits, key=lambda which: rates[which])
            pick = plan.pick.option.name, plan.pick.use.method
            shown = [f"{Path(bundle).name} {method}" for bundle, method in (pick, best)]
            regret, auto = (1 - rates[which] / rates[best] for which in (pick, (pick[0], AUTO)))
            found.append(Cell(kind, context, budget, shown[0], shown[1], regret, auto))
    return found


if __name__ == "__main__":
    main()
