"""``python -m tests.fuzz``: mutants by the thousand, or the cases that failed once."""

from __future__ import annotations

import argparse
import gc
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

from tests.fuzz.cases import Case, cases, make_case
from tests.fuzz.judge import BAD, CLASSES, Verdict, verdict_of
from tests.fuzz.seeds import Change, make_seeds, mutant


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many")
    parser.add_argument("--count", type=int, default=1 << 60, help="stop after so many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of all mutations: mutant N of a seed is always the same")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--only", choices=("bundle", "source"), help="what is mutated; default: both")
    parser.add_argument("--all", action="store_true", help="say of each how it ended, not only of those that end badly")
    parser.add_argument("--keep", type=Path, help="folder where mutants that end badly are kept")
    parser.add_argument("--cases", action="store_true", help="first replay what failed once (tests/fuzz/cases)")
    parser.add_argument("--log", type=Path, help="a line of JSON for each")
    options = parser.parse_args()
    import_all()
    counts: Counter[tuple[str, str]] = Counter()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="edgespec-fuzz-") as name:
        bench = Bench(Path(name))
        if options.cases:
            wrong = [f"{case['seed']}, {case['what']}: {found}" for case in cases() if (found := bench.differs(case))]
            say(json.dumps({"cases": len(list(cases())), "wrong": wrong}))
        number = options.first
        while number < options.first + options.count and time.monotonic() < end:
            rng = Random(options.seed << 32 | number)
            kind = options.only or rng.choice(("bundle", "bundle", "bundle", "bundle", "source"))
            seed = rng.choice(bench.seeds[kind])
            done, verdict = bench.judged(kind, seed, rng)
            counts[kind, verdict.kind] += 1
            line = {
                "number": number, "seed": f"{kind} {seed.name}", "done": [(what, how[:200]) for what, how in done],
                "ended": verdict.kind, "as": verdict.detail.replace(name, ""),
            }  # fmt: skip
            if options.all or verdict.kind in BAD:
                say(json.dumps(line))
            if options.log:
                with options.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(line) + "\n")
            if options.keep and verdict.kind in BAD:
                shutil.copytree(bench.mutant, options.keep / f"{kind}-{options.seed}-{number}", symlinks=True)
            number += 1
    say(json.dumps({kind: {name: counts[kind, name] for name in CLASSES} for kind in ("bundle", "source")}))
    return int(any(counts[kind, name] for kind, name in counts if name in BAD))


class Bench:
    """Seeds, and a place where their mutants are judged.

    A seed is used as it is before its first mutant; what that leaves in the cache stays there, what a mutant adds is
    removed.

    Args:
        work: folder for all of it.

    Attributes:
        seeds: bundles and sources.
        mutant: folder of the last mutant.
    """

    def __init__(self, work: Path) -> None:
        self._cache = work / "cache"
        os.environ["EDGESPEC_CACHE"] = str(self._cache)
        self.mutant = work / "mutant"
        self.seeds = make_seeds(work / "seeds")
        self._sound: set[Path] = set()
        self._kept: set[Path] = set()

    def judged(self, kind: str, seed: Path, rng: Random) -> tuple[list[Change], Verdict]:
        """Give what was done to make a mutant of a seed, and how using it ended."""
        self._clear()
        if seed not in self._sound:
            shutil.copytree(seed, self.mutant)
            if (verdict := verdict_of(kind, self.mutant)).kind != "ran":
                raise SystemExit(f"{seed.name}: not even the seed runs: {verdict}")
            self._sound.add(seed)
            self._kept = set(self._cache.glob("*/*"))
            self._clear()
        done = mutant(seed, self.mutant, rng)
        verdict = verdict_of(kind, self.mutant)
        for path in set(self._cache.glob("*/*")) - self._kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return done, verdict

    def differs(self, case: Case) -> str:
        """How using a kept case ends, if otherwise than it says."""
        self._clear()
        kind, name = case["seed"].split()
        make_case(case, next(seed for seed in self.seeds[kind] if seed.name == name), self.mutant)
        verdict = verdict_of(kind, self.mutant)
        says = case["says"]
        fine = verdict.kind == "ran" if says is None else verdict.kind == "clean" and says in verdict.detail
        return "" if fine else f"{verdict.kind} {verdict.detail}"

    def _clear(self) -> None:
        shutil.rmtree(self.mutant, ignore_errors=True)


def import_all() -> None:
    """Import what children would import one by one."""
    for room in ("cli", "engine", "drafters", "control", "planning", "export", "runtimes"):
        package = importlib.import_module(f"edgespec.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"edgespec.{room}."):
            if not found.name.startswith("edgespec.export.training"):  # torch
                importlib.import_module(found.name)
    for name in (
        *("onnxruntime", "tokenizers", "jinja2.sandbox", "safetensors.numpy", "optuna"),
        *("rich.table", "rich.markup", "rich.theme", "rich.styled", "rich.panel", "rich.columns"),
    ):
        importlib.import_module(name)
    gc.freeze()  # what children share is not looked at in each of them


def say(text: str) -> None:
    """Print a progress line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
