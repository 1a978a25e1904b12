"""Several sequences together against one after the other, for every method, in one interleaved run.

    python -m benchmarks.batch BUNDLE [--batch 4] [--method speculative] [--prompts FILE] [--fixed 3]

Ratios are of wall time without prefills, over the same prompts: one at a time by plain decoding is 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.common import conditions, ratio, show
from edgespec.cli.prompts import read_prompts
from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batch", type=int, action="append", dest="widths", default=[])
    parser.add_argument("--method", action="append", dest="methods", default=[])
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fixed", type=int, help="always this many guesses, as well as adaptive control")
    arguments = parser.parse_args()
    engine = load(arguments.bundle, threads=arguments.threads, operators="native", check=False)
    widths = arguments.widths or [4]
    prompts = read_prompts(engine, arguments.prompts, max(widths))
    prompts = [prompts[i % len(prompts)] for i in range(max(widths))]
    base = Settings(max_new_tokens=arguments.new, ignore_eos=True)
    wanted: dict[str, Settings] = {"ar": base.changed(method="ar")}
    for method in arguments.methods or [name for name in engine.methods if name != "ar"]:
        wanted[method] = base.changed(method=method)
        if arguments.fixed:
            wanted[f"{method}, {arguments.fixed} guesses"] = base.changed(
                method=method, gamma=arguments.fixed, adaptive=False
            )
    runs: dict[str, tuple[Settings, int]] = {}
    for name, settings in wanted.items():
        runs |= {f"{name}, {width} together": (settings, width) for width in (1, *widths)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    seen: dict[str, dict[str, Any]] = {}
    texts: list[list[int]] | None = None
    for repeat in range(arguments.repeats + 1):
        for name in list(runs)[:: 1 if repeat % 2 else -1]:
            settings, width = runs[name]
            start = perf_counter()
            results = engine.generate_batch(prompts, settings, batch=width)
            taken = 1000 * (perf_counter() - start) - sum(result.stats.prefill_ms for result in results)
            texts = texts or [result.tokens for result in results]
            if repeat:
                times[name].append(taken)
            drafted = sum(result.stats.drafted for result in results)
            rounds = sum(result.stats.rounds for result in results)
            tokens = sum(result.stats.tokens for result in results)
            seen[name] = {
                "tokens_per_second": round(1000 * tokens / taken, 1),
                "tokens_per_round": round(tokens / rounds, 2),
                "acceptance": round(sum(result.stats.accepted for result in results) / drafted, 2) if drafted else None,
                "work_per_token": round(sum(r.stats.work for r in results) / tokens, 2),
                "same_texts": [result.tokens for result in results] == texts,
            }
    for name, found in seen.items():
        width = runs[name][1]
        found["against_one_plain"] = ratio(times["ar, 1 together"], times[name])
        found["against_plain_together"] = ratio(times[f"ar, {width} together"], times[name])
    show(conditions(bundle=arguments.bundle.name, threads=engine.model.threads, new=arguments.new) | {"runs": seen})


if __name__ == "__main__":
    main()
