"""Compare passes of 1 to 32 rows with other runtimes, interleaved, each in a separate process.

    python -m benchmarks.rivals.files llama-3.2-1b FOLDER
    python -m benchmarks.rivals FOLDER --rival "llama.cpp=./llama FOLDER/model.gguf {threads} {context}"

A rival is a command that reads lines "DEPTH ROWS" and answers with milliseconds, after a first line "ready": those of
benchmarks/rivals/worker.py, started with the interpreter of an environment that has the runtime, or llama.cpp of this
folder, compiled against the library:

    g++ -O2 -std=c++17 benchmarks/rivals/llama.cpp -I LLAMA/include -I LLAMA/ggml/include LIBRARIES -fopenmp -o llama

It prints milliseconds of each (median of all turns), and those of each rival over ours of the same turns, with an
interval of 95 %.  Weights are random, so texts are not compared.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

from benchmarks.common import conditions, ratio, show

PROMPT = 512  # tokens of a prefill


class Worker:
    """A runtime in a separate process."""

    def __init__(self, command: str, threads: int, context: int) -> None:
        words = shlex.split(command.format(threads=threads, context=context))
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while self.answer() != "ready":  # what else a runtime says while it loads
            pass

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args!r} ended")
        return line.strip()

    def __call__(self, depth: int, rows: int) -> float:
        """Milliseconds of a pass."""
        return float(self.ask(f"{depth} {rows}"))

    def ask(self, line: str) -> str:
        """Send a line, and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        found = self.answer()
        sleep(0.05)  # threads that spin after a pass stop
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what benchmarks.rivals.files wrote, or a bundle")
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=8448)
    parser.add_argument("--depths", default="200")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--attention", default="", help="our keys and values, e.g. int8")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="of a cell, after which three turns are enough")
    parser.add_argument("--prefill", action="store_true", help=f"also {PROMPT} tokens at once, three turns")
    arguments = parser.parse_args()
    bundle = next(path for path in (arguments.folder / "bundle", arguments.folder) if path.exists())
    ours = f"{shlex.quote(sys.executable)} -m benchmarks.rivals.worker edgespec {shlex.quote(str(bundle))}"
    commands = {"edgespec": f"{ours},{arguments.attention} {{threads}} {{context}}"}
    commands |= dict(rival.split("=", 1) for rival in arguments.rival)
    workers = {name: Worker(command, arguments.threads, arguments.context) for name, command in commands.items()}
    cells = [(int(depth), int(n)) for depth in arguments.depths.split(",") for n in arguments.rows.split(",")]
    turns = arguments.pairs, arguments.seconds
    found = {f"depth {depth}, {n} rows": _cell(workers, depth, n, *turns) for depth, n in cells}
    if arguments.prefill:
        found[f"prefill {PROMPT}"] = _cell(workers, 0, PROMPT, 3, 0)
    for worker in workers.values():
        worker.process.communicate()  # ends at the end of its input
    show(conditions(folder=arguments.folder.name, threads=arguments.threads) | {"passes": found})


def _cell(workers: dict[str, Worker], depth: int, rows: int, pairs: int, seconds: float) -> dict[str, Any]:
    """Every turn, all runtimes one after the other; the first turn does not count."""
    end = monotonic() + seconds
    times: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(pairs + 1):
        if turn > 3 and monotonic() > end:
            break
        for name in list(workers)[:: 1 if turn % 2 else -1]:
            taken = workers[name](depth, rows)
            if turn:
                times[name].append(taken)
    over = {name: ratio(ms, times["edgespec"]) for name, ms in times.items() if name != "edgespec"}
    return {"ms": {name: round(median(ms), 2) for name, ms in times.items()}, "over_edgespec": over}


if __name__ == "__main__":
    main()
