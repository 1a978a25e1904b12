"""Draw the home page's picture: tokens per second of the first command, as docs/dev/measurements.md has them.

python tools/make_speed.py -o docs/speed.svg
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

MEASUREMENTS = Path(__file__).resolve().parents[1] / "docs/dev/measurements.md"
NAMES = {"plain": "plain decoding", "ngram": "n-grams", "speculative": "a small draft model"}
LEFT, WIDTH, BAR, GAP, TOP = 200, 300, 34, 14, 58
STYLE = """<style>
text { font: 15px system-ui, sans-serif; fill: #222 } .note { fill: #555; font-size: 13px }
.back { fill: #f4f6fa } .bar { fill: #4c6ef5 } .plain { fill: #adb5bd }
</style>"""
NOTE = "builtin:shakespeare-73m (synthetic size), int4, 2 cores of an Intel Xeon"


def measured(page: str) -> list[tuple[str, float, str]]:
    """Read method, tokens per second and speed-up from the section of the first command."""
    section = page.split("## The first command")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `?(\w+)`? \| ([\d.]+) \| (\S+)", section, re.M)
    return [(method, float(speed), ratio) for method, speed, ratio in rows if method in NAMES]


def picture(rows: list[tuple[str, float, str]]) -> str:
    """Draw one bar per method."""
    most = max(speed for _, speed, _ in rows)
    height = TOP + len(rows) * (BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" role="img">{STYLE}',
        '<rect class="back" width="100%" height="100%" rx="8"/>',
        '<text x="20" y="34">Tokens per second, the same text every time</text>',
    ]
    for at, (method, speed, ratio) in enumerate(rows):
        y, length = TOP + at * (BAR + GAP), WIDTH * speed / most
        kind, note = ("plain", "") if method == "plain" else ("bar", f" ({ratio})")
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 22}" text-anchor="end">{NAMES[method]}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" rx="4"/>',
            f'<text x="{LEFT + length + 10:.0f}" y="{y + 22}">{speed:.0f}{note}</text>',
        ]
    return "\n".join([*parts, f'<text class="note" x="20" y="{height - 14}">{NOTE}</text>', "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.write_text(picture(measured(MEASUREMENTS.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
