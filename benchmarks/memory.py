"""Predicted against measured memory: every cell in a fresh process, one after the other.

    python -m benchmarks.memory BUNDLE [BUNDLE...] [--contexts 512,4096,16384] [--methods ar,ngram,medusa]
                                [--operators native] [--json]

Prints a Markdown table; with ``--json`` all figures.  A cell loads the bundle, drafts with a fixed number of guesses,
and fills the context (``benchmarks.memory_cell``).  What is measured: the most resident memory of ``load`` and of the
whole run (VmHWM), and private memory and that of files at the end (RssAnon, RssFile).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import conditions, show
from edgespec.planning.footprint import Memory, memory_of, process_bytes
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.options import RunOptions

COMPARED = ("peak", "loaded", "private", "file")


def measure(bundle: Path, use: RunOptions, prefill: bool = False) -> dict[str, Any]:
    """Give the figures of a cell."""
    command = [sys.executable, "-m", "benchmarks.memory_cell", str(bundle), use.method, str(use.context)]
    command += ["--operators", use.operators, "--gamma", str(use.gamma), "--threads", str(use.threads), "--maps"]
    command += ["--attention", use.attention] if use.attention else []
    command += ["--batch", str(use.batch)] if use.batch > 1 else []
    command += [] if use.greedy else ["--sampled"]
    command += ["--prefill"] if prefill else []
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if ran.returncode:
        raise SystemExit(f"{bundle.name} {use.method} {use.context}: {ran.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(ran.stdout)
    return figures


def compare(predicted: Memory, measured: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By figure: bytes predicted and measured, and the relative error."""
    end = measured["end"]
    seen = {"peak": end["peak"], "loaded": measured["loaded"]["peak"], "private": end["private"], "file": end["file"]}
    found = {}
    for name in COMPARED:
        guess: int = getattr(predicted, name)
        found[name] = {"predicted": guess, "measured": seen[name], "error": round(guess / seen[name] - 1, 4)}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: MiB predicted / measured, and the error of the peak and of loading."""
    lines = ["| bundle | operators | method | context | peak | error | of load | error | private | file |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        cells = [row["bundle"], row["operators"], row["method"], str(row["context"])]
        for name in COMPARED:
            one = row["figures"][name]
            cells.append(f"{one['predicted'] / 2**20:.0f} / {one['measured'] / 2**20:.0f}")
            cells += [f"{one['error']:+.1%}"] if name in ("peak", "loaded") else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument(
        "--methods", help="default: ar, ngram, self-spec, speculative, medusa, as far as they are there"
    )
    parser.add_argument("--operators", choices=["native", "stock"], default="native")
    parser.add_argument("--attention")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--prefill", action="store_true", help="run the prefill instead of imitating it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    process = process_bytes()
    wanted = (arguments.methods or "ar,ngram,self-spec,speculative,medusa").split(",")
    rows: list[dict[str, Any]] = []
    for bundle in arguments.bundles:
        manifest = read_manifest(bundle)
        for method in [name for name in wanted if name in manifest.methods]:
            for context in (int(part) for part in arguments.contexts.split(",")):
                use = RunOptions(method, arguments.operators, context, arguments.attention, arguments.gamma,
                                 arguments.batch, arguments.threads, greedy=not arguments.sampled)  # fmt: skip
                measured = measure(bundle, use, arguments.prefill)
                predicted = memory_of(manifest, use, process)
                rows.append({"bundle": bundle.name, "operators": use.operators, "method": method, "context": context,
                             "figures": compare(predicted, measured), "measured": measured,
                             "parts": predicted.as_dict()["parts"]})  # fmt: skip
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    if arguments.json:
        show({"conditions": conditions(), "process": process, "cells": rows})
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
