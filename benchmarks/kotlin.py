"""Compare Kotlin's binding on a JVM with Python: speed, memory and garbage.

    python -m benchmarks.kotlin BUNDLE            # tokens per second, load time, PSS, allocated bytes
    python -m benchmarks.kotlin BUNDLE --turns 60 # milliseconds a token of open engines that decode in turn

Launches one after another tell less than turns: their times differ by more than the two sides do.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from edgespec import load
from edgespec.reports.bench import bootstrap
from edgespec.runtimes.ort.native_library import native_library
from tests.support import jvm

WARM_TURNS = 8  # the JVM compiles what runs often
PROMPT = [2 + at % 29 for at in range(32)]


def serve(bundle: str, method: str, tokens: int) -> dict[str, float]:
    """Load a bundle and decode: the figures of the Kotlin side, except garbage."""
    start = perf_counter()
    engine = load(bundle, threads=2, operators="native", check=False)
    loaded = perf_counter()
    settings: dict[str, Any] = {"method": method, "ignore_eos": True}
    engine.generate(PROMPT, max_new_tokens=1, **settings)
    first = perf_counter()
    engine.generate(PROMPT, max_new_tokens=tokens, **settings)
    begun = perf_counter()
    result = engine.generate(PROMPT, max_new_tokens=tokens, **settings)
    ms = 1000 * (perf_counter() - begun) - result.stats.prefill_ms
    found = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text("utf-8"), re.MULTILINE)
    assert found
    engine.close()
    again = perf_counter()
    load(bundle, threads=2, operators="native", check=False).close()
    return {"load_ms": 1000 * (loaded - start), "first_ms": 1000 * (first - loaded), "ms_per_token": ms / tokens,
            "pss_mib": int(found[1]) / 1024, "load_again_ms": 1000 * (perf_counter() - again)}  # fmt: skip


def answer(bundle: str, method: str, tokens: int) -> None:
    """Keep an engine open and decode at every line of standard input; print the milliseconds a token of each time."""
    with load(bundle, threads=2, operators="native", check=False) as engine:
        for _ in sys.stdin:
            begun = perf_counter()
            result = engine.generate(PROMPT, max_new_tokens=tokens, method=method, ignore_eos=True)
            sys.stdout.write(f"{(1000 * (perf_counter() - begun) - result.stats.prefill_ms) / tokens}\n")
            sys.stdout.flush()


def in_turns(commands: dict[str, list[str]], turns: int, classes: str) -> None:
    """Let open engines decode one after another; print medians, and the ratio of each turn with its interval."""
    figures: dict[str, list[float]] = {name: [] for name in commands}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=jvm.environment(classes)
                )
            )
            for name, command in commands.items()
        }
        for turn in range(-WARM_TURNS, turns):
            for name in sorted(commands, reverse=turn % 2 == 0):  # neither is always the first
                given, said = processes[name].stdin, processes[name].stdout
                assert given
                assert said
                given.write("\n")
                given.flush()
                took = float(said.readline())
                if turn >= 0:
                    figures[name].append(took)
    for name, took_all in figures.items():
        sys.stdout.write(f"{name}: {median(took_all):.3f} ms a token, at best {min(took_all):.3f}\n")
    for name in figures.keys() - {"kotlin"}:
        ratios = [one / other for one, other in zip(figures["kotlin"], figures[name], strict=True)]
        low, high = bootstrap(ratios)
        sys.stdout.write(f"kotlin takes {median(ratios):.3f} of the time of {name} ({low:.3f} to {high:.3f})\n")


def main() -> None:
    """Run both sides, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--method", default="ar")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--turns", type=int, help="open engines that decode in turn, this often")
    parser.add_argument("--classes", help="class path, where it is built already")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one and given.turns:
        answer(given.bundle, given.method, given.tokens)
        return
    if given.one:
        sys.stdout.write(json.dumps(serve(given.bundle, given.method, given.tokens)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        classes = given.classes or jvm.classpath(Path(scratch) / "built")
        library = str(native_library().path)
        # a small heap at first: otherwise it holds megabytes of garbage that was never collected
        alone = ["java", "-Xms8m", "-Xmx512m", "-XX:+UseSerialGC", "dev.edgespec.support.SpeedKt"]
        java = [*alone, given.bundle, library, given.method, str(given.tokens)]
        python = [sys.executable, "-m", "benchmarks.kotlin", *sys.argv[1:], "--one"]
        commands = {"kotlin": java, "an empty JVM": alone, "python": python}
        if given.turns:
            del commands["an empty JVM"]
            told = {name: command if name == "python" else [*command, "turns"] for name, command in commands.items()}
            in_turns(told, given.turns, classes)
            return
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in range(given.launches):
            for name, command in commands.items():
                run = subprocess.run(command, capture_output=True, text=True, check=True, env=jvm.environment(classes))
                said = run.stdout
                figures[name].append(json.loads(said.splitlines()[-1]))
    for name, runs in figures.items():
        middle = {key: round(median(run[key] for run in runs), 2) for key in runs[0]}
        sys.stdout.write(f"{name}: {json.dumps(middle)}\n")


if __name__ == "__main__":
    main()
