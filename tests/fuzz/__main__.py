"""``python -m tests.fuzz``: mutants by the thousand, or the cases that failed once."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.judge import CLASSES, verdict_of
from tests.fuzz.seeds import make_seeds, mutant

BAD = ("traceback", "hang", "memory", "crash")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many")
    parser.add_argument("--count", type=int, default=1 << 60, help="stop after so many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of all mutations: mutant N of a seed is always the same")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--only", choices=("bundle", "source"), help="what is mutated; default: both")
    parser.add_argument("--all", action="store_true", help="say of each how it ended, not only of those that end badly")
    parser.add_argument("--keep", type=Path, help="folder where mutants that end badly are kept")
    parser.add_argument("--log", type=Path, help="a line of JSON for each that ends badly")
    options = parser.parse_args()
    import_all()
    counts: Counter[tuple[str, str]] = Counter()
    places: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="edgespec-fuzz-") as name:
        work = Path(name)
        os.environ["EDGESPEC_CACHE"] = str(work / "cache")
        seeds = make_seeds(work / "seeds")
        for kind, folders in seeds.items():
            for folder in folders:
                if (verdict := verdict_of(kind, folder)).kind != "ran":
                    raise SystemExit(f"{folder.name}: not even the seed runs: {verdict}")
                shutil.rmtree(folder.with_suffix(".bundle"), ignore_errors=True)
        number = options.first
        while number < options.first + options.count and time.monotonic() < end:
            rng = Random(options.seed << 32 | number)
            kind = options.only or rng.choice(("bundle", "bundle", "source"))
            folder = work / "mutant"
            done = mutant(rng.choice(seeds[kind]), folder, rng)
            verdict = verdict_of(kind, folder)
            counts[kind, verdict.kind] += 1
            if verdict.kind in BAD or options.all:
                places[f"{verdict.kind} {verdict.detail.split(':')[0]}"] += 1
                line = {"number": number, "kind": kind, "done": done[:300], "ended": verdict.kind, "as": verdict.detail}
                say(json.dumps(line))
                if options.log:
                    with options.log.open("a", encoding="utf-8") as log:
                        log.write(json.dumps(line) + "\n")
                if options.keep and verdict.kind in BAD:
                    shutil.copytree(folder, options.keep / f"{kind}-{options.seed}-{number}", symlinks=True)
            for path in (folder, folder.with_suffix(".bundle"), work / "cache"):
                shutil.rmtree(path, ignore_errors=True)
            number += 1
    report = {kind: {name: counts[kind, name] for name in CLASSES} for kind in ("bundle", "source")}
    say(json.dumps(report))
    for place, count in places.most_common():
        say(f"{count:6d}  {place}")
    return int(any(counts[kind, name] for kind, name in counts if name in BAD))


def import_all() -> None:
    """What children would import one by one."""
    for room in ("cli", "engine", "drafters", "control", "planning", "export", "runtimes"):
        package = importlib.import_module(f"edgespec.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"edgespec.{room}."):
            if not found.name.startswith("edgespec.export.training"):  # torch
                importlib.import_module(found.name)
    for name in ("onnxruntime", "tokenizers", "jinja2.sandbox", "rich.table", "safetensors.numpy", "optuna"):
        importlib.import_module(name)


def say(text: str) -> None:
    """A line for whoever watches."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
