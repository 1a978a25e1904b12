"""Methods in several formats of one model, against the fastest plain decoding among all of them.

    python -m benchmarks.methods BUNDLE-int4 BUNDLE-w8a8 ... [--method speculative] [--gamma 2 --gamma 4]
    python -m benchmarks.methods BUNDLE --method eagle --run eagle:branch=3,2,1 --run medusa:nodes=8 --prompt-file FILE

Formats and methods are chosen together: a format whose rows are cheap may win though its single step is slower.
``--run`` is a method with its settings, ``gamma`` or those of ``edgespec run --set``; it drafts in every round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import conditions, ratio, show
from edgespec.cli.method_settings import apply, read_setting
from edgespec.cli.prompts import read_prompt_file
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.inputs import Prompt
from edgespec.engine.result import Result
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions

OPENINGS = ("Once upon a time there was", "def main(path):", "The harbour was", "1. Peel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--method", action="append", dest="methods", default=[])
    parser.add_argument("--gamma", action="append", dest="gammas", type=int, default=[])
    parser.add_argument("--run", action="append", dest="runs", default=[], metavar="METHOD:NAME=VALUE:..")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    engines: dict[str, Engine] = {}
    runs: dict[str, tuple[Engine, Settings]] = {}
    missing: dict[str, str] = {}  # what is wanted, and its method while no bundle has it
    base = Settings(max_new_tokens=arguments.new, ignore_eos=True).changed(temperature=arguments.temperature, seed=1)
    for path in arguments.bundles:
        bundle = Bundle.open(path, check=False)
        form = bundle.manifest.target.format
        options = LoadOptions(threads=arguments.threads, operators=arguments.operators, budget="off")
        engine = engines[form] = Engine(bundle, options)
        runs[f"{form} plain"] = engine.plain(), base.changed(method="ar")
        for name, settings in _wanted(arguments, base):
            missing.setdefault(name, settings.method or "")
            if settings.method in engine.methods:
                runs[f"{form} {name}"] = engine, settings
                missing[name] = ""
    if lost := [f"{name}: no bundle has method {method!r}" for name, method in missing.items() if method]:
        sys.exit("\n".join(lost))
    seen = _results(runs, _prompts(arguments, next(iter(engines.values()))), arguments.repeats)
    times = {name: [result.stats.decode_ms / result.stats.tokens for result in found] for name, found in seen.items()}
    best = min((name for name in runs if name.endswith(" plain")), key=lambda name: median(times[name]))
    rows = {
        name: {
            "ms_per_token": round(median(times[name]), 2),
            "speedup": ratio(times[best], times[name]),
            "tokens_per_round": round(sum(r.stats.tokens for r in found) / sum(r.stats.rounds for r in found), 2),
            "acceptance_rate": round(
                sum(r.stats.accepted for r in found) / max(1, sum(r.stats.drafted for r in found)), 3
            ),
            "same_text": sum(
                mine.tokens == plain.tokens for mine, plain in zip(found, seen[f"{name.split()[0]} plain"], strict=True)
            ),
            "texts": len(found),
        }
        for name, found in seen.items()
    }
    show(conditions(threads=arguments.threads, new_tokens=arguments.new, baseline=best) | {"runs": rows})


def _wanted(arguments: argparse.Namespace, base: Settings) -> Iterator[tuple[str, Settings]]:
    """Give what is compared with plain decoding: a name and its settings."""
    for method in arguments.methods or ([] if arguments.runs else ["speculative"]):
        yield method, base.changed(method=method)
        for gamma in arguments.gammas:
            yield f"{method} gamma {gamma}", base.changed(method=method, gamma=gamma, adaptive=False)
    for run in arguments.runs:
        yield run, read_run(run, base)


def read_run(run: str, base: Settings) -> Settings:
    """Read ``METHOD:NAME=VALUE:..``: settings that guess in every round."""
    method, *items = run.split(":")
    try:
        return apply(base.changed(method=method, adaptive=False), dict(_setting(item) for item in items))
    except (ValueError, InvalidRequest) as error:
        sys.exit(f"--run {run}: {error}")


def _setting(item: str) -> tuple[str, Any]:
    """Read ``gamma=N``, a separate option of edgespec run, or a setting of ``--set``."""
    name, _, text = item.partition("=")
    return ("gamma", int(text)) if name == "gamma" else read_setting(item)


def _prompts(arguments: argparse.Namespace, engine: Engine) -> list[Prompt]:
    """Those of the file, of the bundle's golden vectors, or openings of texts."""
    golden: list[Prompt] = [vector.prompt for vector in engine.bundle.manifest.golden]
    if arguments.prompt_file:
        golden = list(read_prompt_file(arguments.prompt_file))
    return (golden or [engine.codec.encode(text) for text in OPENINGS])[: arguments.prompts]


def _results(runs: dict[str, tuple[Engine, Settings]], prompts: list[Prompt], repeats: int) -> dict[str, list[Result]]:
    """Give what each run wrote, all of them taking turns; the first repeat only warms up."""
    seen: dict[str, list[Result]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for at, prompt in enumerate(prompts):
            for name in list(runs)[:: 1 if (repeat + at) % 2 else -1]:
                engine, settings = runs[name]
                result = engine.generate(prompt, settings)
                if repeat:
                    seen[name].append(result)
    return seen


if __name__ == "__main__":
    main()
