"""Methods in several formats of one model, against the fastest plain decoding among all of them.

    python -m benchmarks.methods BUNDLE-int4 BUNDLE-w8a8 ... [--method speculative] [--gamma 2 --gamma 4]

Formats and methods are chosen together: a format whose rows are cheap may win though its single step is slower.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import conditions, ratio, show
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--method", action="append", dest="methods", default=[])
    parser.add_argument("--gamma", action="append", dest="gammas", type=int, default=[])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    engines: dict[str, Engine] = {}
    runs: dict[str, tuple[Engine, Settings]] = {}
    base = Settings(max_new_tokens=arguments.new, ignore_eos=True)
    for path in arguments.bundles:
        bundle = Bundle.open(path, check=False)
        form = bundle.manifest.target.format
        options = LoadOptions(threads=arguments.threads, operators=arguments.operators, budget="off")
        engine = engines[form] = Engine(bundle, options)
        runs[f"{form} plain"] = engine.plain(), base.changed(method="ar")
        for method in arguments.methods or ["speculative"]:
            if method not in engine.methods:
                continue
            runs[f"{form} {method}"] = engine, base.changed(method=method)
            for gamma in arguments.gammas:
                fixed = base.changed(method=method, gamma=gamma, adaptive=False)
                runs[f"{form} {method} gamma {gamma}"] = engine, fixed
    prompts = [vector.prompt for vector in next(iter(engines.values())).bundle.manifest.golden][: arguments.prompts]
    if not prompts:
        codec = next(iter(engines.values())).codec
        prompts = [
            codec.encode(text)
            for text in ("Once upon a time there was", "def main(path):", "The harbour was", "1. Peel")
        ]
    times: dict[str, list[float]] = {name: [] for name in runs}
    seen: dict[str, list[Any]] = {name: [] for name in runs}
    for repeat in range(arguments.repeats + 1):
        for at, prompt in enumerate(prompts):
            order = list(runs)[:: 1 if (repeat + at) % 2 else -1]
            for name in order:
                engine, settings = runs[name]
                result = engine.generate(prompt, settings)
                if repeat:
                    times[name].append(result.stats.decode_ms / result.stats.tokens)
                    seen[name].append(result)
    best = min((name for name in runs if name.endswith(" plain")), key=lambda name: median(times[name]))
    rows = {
        name: {
            "ms_per_token": round(median(times[name]), 2),
            "speedup": ratio(times[best], times[name]),
            "tokens_per_round": round(
                sum(r.stats.tokens for r in seen[name]) / sum(r.stats.rounds for r in seen[name]), 2
            ),
            "acceptance_rate": round(
                sum(r.stats.accepted for r in seen[name]) / max(1, sum(r.stats.drafted for r in seen[name])), 3
            ),
        }
        for name in runs
    }
    show(conditions(threads=arguments.threads, new_tokens=arguments.new, baseline=best) | {"runs": rows})


if __name__ == "__main__":
    main()
