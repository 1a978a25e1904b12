"""Measure builtin:reader on held-out print, by format and method: error rates, tokens per pass, speed, equal texts.

    edgespec export builtin:reader --method speculative --draft builtin:reader-draft -o reader
    python -m benchmarks.reader reader --text tinyshakespeare.txt --lines 1 12
    python -m benchmarks.reader reader --text tinyshakespeare.txt --lines 12 --by-line

Pages are those of ``tools/printed.py``, of the text's last tenth, which the model has not seen.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import ratio
from edgespec import Image, load
from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from tools.printed import Printer, parts
from tools.train_loop import error_rate

COLUMNS = 20  # of 16 pixels
HEAD = ("format", "lines", "method", "errors", "whole", "tokens/pass", "accepted", "speed", "same text")


@dataclass(frozen=True)
class Reading:
    """The texts that a method read from a page, in one image or in one per line."""

    results: list[Result]

    @property
    def text(self) -> str:
        return "\n".join(one.text for one in self.results)

    @property
    def tokens(self) -> list[list[int]]:
        return [list(one.tokens) for one in self.results]

    def sum(self, name: str) -> float:
        """Add up a figure of ``Stats``."""
        return sum(getattr(one.stats, name) for one in self.results)


def read(engine: Engine, pages: list[list[Image]], methods: list[str]) -> dict[str, list[Reading]]:
    """Read pages one by one, greedily, with interleaved methods; every method has read the first one before."""
    found: dict[str, list[Reading]] = {method: [] for method in methods}
    for number, page in enumerate([pages[0], *pages]):
        asked = [[{"role": "user", "content": [{"type": "image", "image": picture}]}] for picture in page]
        for method in methods[:: 1 if number % 2 else -1]:
            made = [engine.chat(one, method=method, temperature=0.0, fallback=False) for one in asked]
            found[method] += [Reading(made)] if number else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="its last tenth is printed")
    parser.add_argument("--lines", type=int, nargs="+", default=[1], help="of a page")
    parser.add_argument("--by-line", action="store_true", help="cut a page into lines, a picture and a request each")
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    words = parts(args.text.read_text("utf-8"))[1]
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for bundle in args.bundles:
        with load(bundle, threads=args.threads) as engine:
            for lines in args.lines:
                printer = Printer(f"held out {COLUMNS} {lines}")
                made = [printer.page(words, COLUMNS, lines, plain=True) for _ in range(args.pages)]
                pages = [[Image.of(one) for one in np.split(page, lines if args.by_line else 1)] for page, _ in made]
                results = read(engine, pages, ["ar", *(name for name in engine.methods if name != "ar")])
                for method, found in results.items():
                    row = figures(found, results["ar"], [text for _, text in made])
                    row = (engine.bundle.manifest.target.format, str(lines), method, *row)
                    print("| " + " | ".join(row) + " |", flush=True)


def figures(found: list[Reading], plain: list[Reading], said: list[str]) -> tuple[str, ...]:
    """Return a method's cells after its name."""
    drafted = sum(one.sum("drafted") for one in found)
    faster = ratio([one.sum("decode_ms") for one in plain], [one.sum("decode_ms") for one in found])
    wrong = error_rate([list(one.text) for one in found], list(map(list, said)))
    return (
        f"{wrong:.4f}",
        f"{sum(one.text == text for one, text in zip(found, said, strict=True)) / len(said):.2f}",
        f"{sum(one.sum('tokens') for one in found) / sum(one.sum('rounds') for one in found):.2f}",
        f"{sum(one.sum('accepted') for one in found) / drafted:.2f}" if drafted else "",
        "" if found is plain else f"{faster['ratio']}x ({faster['low']} - {faster['high']})",
        f"{sum(a.tokens == b.tokens for a, b in zip(found, plain, strict=True))}/{len(said)}",
    )


if __name__ == "__main__":
    main()
