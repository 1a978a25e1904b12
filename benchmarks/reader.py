"""What builtin:reader reads of held-out print, by format and method: error rates, tokens a pass, speed, the same text.

    edgespec export builtin:reader --method speculative --draft builtin:reader-draft -o reader
    python -m benchmarks.reader reader --text tinyshakespeare.txt --lines 1 4 --markdown

Pages are those of ``tools/printed.py``, of the text's last tenth, which the model has not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import ratio
from edgespec import Image, load
from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from tools.printed import Printer, parts
from tools.train_loop import error_rate

COLUMNS = 20  # of 16 pixels
HEAD = ("format", "lines", "method", "errors", "whole", "tokens/pass", "accepted", "speed", "same text")


def read(engine: Engine, pages: list[Image], methods: list[str]) -> dict[str, list[Result]]:
    """Read pages one by one, greedily, by methods in turns; every method has read the first one before."""
    found: dict[str, list[Result]] = {method: [] for method in methods}
    for number, page in enumerate([pages[0], *pages]):
        asked = [{"role": "user", "content": [{"type": "image", "image": page}]}]
        for method in methods[:: 1 if number % 2 else -1]:
            made = engine.chat(asked, method=method, temperature=0.0, fallback=False)
            found[method] += [made] if number else []
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="its last tenth is printed")
    parser.add_argument("--lines", type=int, nargs="+", default=[1], help="of a page")
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
                pages, said = [Image.of(page) for page, _ in made], [text for _, text in made]
                results = read(engine, pages, ["ar", *(name for name in engine.methods if name != "ar")])
                plain = results["ar"]
                before = [one.stats.decode_ms for one in plain]
                for method, found in results.items():
                    stats = [one.stats for one in found]
                    drafted = sum(one.drafted for one in stats)
                    faster = ratio(before, [one.decode_ms for one in stats])
                    row = (
                        engine.bundle.manifest.target.format,
                        lines,
                        method,
                        f"{error_rate([list(one.text) for one in found], [list(one) for one in said]):.4f}",
                        f"{sum(one.text == text for one, text in zip(found, said, strict=True)) / len(said):.2f}",
                        f"{sum(one.tokens for one in stats) / sum(one.rounds for one in stats):.2f}",
                        f"{sum(one.accepted for one in stats) / drafted:.2f}" if drafted else "",
                        "" if method == "ar" else f"{faster['ratio']}x ({faster['low']} - {faster['high']})",
                        f"{sum(a.tokens == b.tokens for a, b in zip(found, plain, strict=True))}/{len(said)}",
                    )
                    print("| " + " | ".join(map(str, row)) + " |", flush=True)


if __name__ == "__main__":
    main()
