"""Predicted against measured speed-ups of every method, on prompts that the prediction has not seen.

    python -m benchmarks.prediction BUNDLE... (--prompts FILE | --own-prompts 12) [--new 96] [--repeats 3] [--json]

For each bundle: a profile is made right before (on the bundle's golden prompts, or with ``--calibrate-on own`` on other
texts of its own), then every method is measured beside plain decoding (medians of interleaved pairs).  Predictions by:
*calibrated*, the profile as it is; *formula*, its passes and drafts with the trials' or the manifest's acceptance but
without the trials' times; *scaled*, the profile of the bundle before it on the command line; *exported*, the manifest.

``--own-prompts N`` draws texts from the model itself at temperature 1 with given seeds and cuts their beginnings: N to
measure on and, from other seeds, N to calibrate on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import conditions, show
from edgespec.cli.prompts import read_prompts
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine, given_tokens
from edgespec.engine.loading import load
from edgespec.formulas.cost import WORTH
from edgespec.planning.prediction import speed_of
from edgespec.planning.profiles import Profile
from edgespec.reports.bench import BASELINE, bench_all
from edgespec.reports.calibrate import SECONDS, calibrate
from edgespec.runtimes.options import LoadOptions, RunOptions

OWN_LENGTHS = (8, 16, 24)  # tokens of a text's beginning
DRAWN = 64  # tokens drawn of a text
PLAIN = "ar"
BASES = ("calibrated", "formula", "scaled", "exported")


@dataclass(frozen=True)
class Row:
    """One method of one bundle: its predictions by basis, and what was measured."""

    bundle: str
    method: str
    predicted: dict[str, float]
    measured: float
    low: float
    high: float
    tokens_per_round: float

    def error(self, basis: str = "calibrated") -> float:
        """Predicted over measured, less 1."""
        return self.predicted[basis] / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--own-prompts", type=int, default=0)
    parser.add_argument("--calibrate-on", choices=["golden", "own"], default="golden")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, help="deepest pass of the calibration")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--method", action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    before: Profile | None = None
    for path in arguments.bundles:
        engine = load(path, threads=arguments.threads, operators=arguments.operators, check=False, budget="off")
        if arguments.own_prompts:
            drawn = own_prompts(engine, 2 * arguments.own_prompts, arguments.seed)
            prompts, others = drawn[: arguments.own_prompts], drawn[arguments.own_prompts :]
        else:
            prompts = [list(engine.codec.encode(p)) if isinstance(p, str) else given_tokens(p)
                       for p in read_prompts(engine, arguments.prompts, arguments.limit)]  # fmt: skip
            others = []
        options = LoadOptions(threads=arguments.threads, context=arguments.context, operators=arguments.operators)
        calibrate_on = others if arguments.calibrate_on == "own" else ()
        profile = calibrate(engine.bundle, options, seconds=arguments.seconds, prompts=calibrate_on)
        rows += compare(engine, profile, prompts, arguments.new, arguments.repeats, before, arguments.method)
        before = profile
        engine.close()
    if arguments.json:
        show(conditions() | {"rows": [asdict(row) for row in rows], "summary": summary(rows)})
    else:
        print(table(rows))
        for name, figure in summary(rows).items():
            print(f"{name}: {figure}")


def own_prompts(engine: Engine, count: int, seed: int, draw: int = DRAWN) -> list[list[int]]:
    """Beginnings of texts that the model draws from itself, seeded: the same in every run."""
    manifest = engine.bundle.manifest
    golden = manifest.golden[0].prompt[0] if manifest.golden else 0
    start = [golden if manifest.tokenizer.bos is None else manifest.tokenizer.bos]
    found = []
    for number in range(count):
        result = engine.generate(
            start, method=PLAIN, max_new_tokens=draw, temperature=1.0, seed=seed + number, acceptance="coupled"
        )
        found.append([*start, *result.tokens[: OWN_LENGTHS[number % len(OWN_LENGTHS)]]])
    return found


def compare(
    engine: Engine,
    profile: Profile,
    prompts: Sequence[list[int]],
    new: int,
    repeats: int,
    other: Profile | None = None,
    methods: Sequence[str] | None = None,
) -> list[Row]:
    """Predict, then measure."""
    manifest, name = engine.bundle.manifest, engine.bundle.path.resolve().name
    depth = mean(len(prompt) for prompt in prompts) + new / 2
    wanted = list(methods or [method for method in engine.methods if method != PLAIN])
    predictions: dict[str, dict[str, float]] = {}
    for method in wanted:
        use = RunOptions(method, engine.operators.kind, engine.context, threads=engine.model.threads)
        profiles = {"calibrated": profile, "formula": without_times(profile, method), "exported": None}
        if other is not None:
            profiles["scaled"] = other
        predictions[method] = {
            basis: speed_of(manifest, use, known, depth=depth).speedup for basis, known in profiles.items()
        }
    settings = Settings(max_new_tokens=new, ignore_eos=True)
    figures = bench_all([(engine, wanted)], prompts, settings, repeats)
    found = []
    for figure in figures:
        row = figure.as_dict()
        if row["method"] != BASELINE:
            numbers = row["speedup"], row["speedup_low"], row["speedup_high"], row["tokens_per_round"]
            found.append(Row(name, row["method"], predictions[row["method"]], *numbers))
    return found


def without_times(profile: Profile, method: str) -> Profile:
    """Give the profile as if the method had not been tried: formulas take over."""
    trials = {name: trial for name, trial in profile.trials.items() if name != method}
    return profile.model_copy(update={"trials": trials})


def regret(rows: Iterable[Row], pick: Callable[[Sequence[Row]], str] | None = None) -> dict[str, float]:
    """Give what following predictions costs, bundle by bundle: 0.03 = 3 % slower than the method that was fastest.

    Args:
        rows: what was compared; plain decoding, 1.0, is among the candidates of each bundle.
        pick: the method that a planner takes; None = ``best_predicted``.
    """
    found = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.bundle, []).append(row)
    for bundle, candidates in groups.items():
        measured = {PLAIN: 1.0} | {row.method: row.measured for row in candidates}
        found[bundle] = 1 - measured[(pick or best_predicted)(candidates)] / max(measured.values())
    return found


def best_predicted(rows: Sequence[Row], basis: str = "calibrated") -> str:
    """Give the method with the best prediction, where that is clearly above plain decoding's."""
    best = max(rows, key=lambda row: row.predicted[basis])
    return best.method if best.predicted[basis] >= WORTH else PLAIN


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors by basis, and the regret of picking by each."""
    found: dict[str, Any] = {}
    for basis in BASES:
        known = [row for row in rows if basis in row.predicted]
        if not known:
            continue
        errors = [abs(row.error(basis)) for row in known]
        lost = regret(known, lambda group, basis=basis: best_predicted(group, basis))  # type: ignore[misc]
        found[basis] = {
            "mean_error": round(mean(errors), 3),
            "largest_error": round(max(errors), 3),
            "within_15_percent": f"{sum(error <= 0.15 for error in errors)}/{len(errors)}",
            "mean_regret": round(mean(lost.values()), 3),
        }
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    bases = [basis for basis in BASES if any(basis in row.predicted for row in rows)]
    lines = [
        f"| bundle | method | measured | tokens/round | {' | '.join(bases)} | error |",
        f"|---|---|---|---|{'---|' * len(bases)}---|",
    ]
    for row in rows:
        cells = [f"{row.predicted[basis]:.2f}" if basis in row.predicted else "" for basis in bases]
        lines.append(
            f"| {row.bundle} | `{row.method}` | {row.measured:.2f} ({row.low:.2f} - {row.high:.2f}) | "
            f"{row.tokens_per_round:.2f} | {' | '.join(cells)} | {row.error():+.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
