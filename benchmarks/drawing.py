"""Speed of each method against plain guided decoding on builtin:glyphs, exact and relaxed, and what is legible.

    edgespec export builtin:glyphs --method self-spec --method speculative --draft builtin:glyphs-draft -o glyphs
    python -m benchmarks.drawing glyphs --letters 20

A letter is right where, of all glyphs that were trained on, one of it has the fewest wrong pixels (needs matplotlib's
fonts).  Processor time of one thread; methods take turns, picture by picture.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import numpy as np

from edgespec.engine.loading import load
from edgespec.runtimes.images.drawn import Pixels
from tools.train_glyphs import LETTERS, SIZES, Glyphs, patches


class Reader:
    """Says which letter a picture shows."""

    def __init__(self) -> None:
        glyphs = Glyphs(SIZES)
        self._known = glyphs.patches.reshape(len(glyphs.what), -1, glyphs.patches[0, 0].size)  # [glyphs, each, numbers]
        self._letters = [letter for letter, _, _ in glyphs.what]

    def read(self, pixels: Pixels) -> str:
        """Find the nearest glyph."""
        own = patches(pixels[None, ..., 0])[0].reshape(-1)
        return self._letters[int((np.abs(self._known - own).mean(-1)).min(1).argmin())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--letters", type=int, default=20)
    parser.add_argument("--scale", type=float, help="of guidance; else the bundle's")
    given = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, int, bool, list[int]]]] = defaultdict(list)
    reader, letters = Reader(), LETTERS[:: max(1, len(LETTERS) // given.letters)]
    with load(given.bundle, threads=1) as engine:
        cells = [(method, accept) for method in (*engine.methods, "auto") for accept in ("exact", "lantern")]
        cells = [cell for cell in cells if cell != ("ar", "lantern")]
        for turn in range(-1, 2):  # the first one warms up
            for seed, letter in enumerate(letters):
                for method, accept in cells:
                    how: dict[str, Any] = {"method": method, "accept": accept, "seed": seed + 100 * max(turn, 0)}
                    if given.scale is not None:
                        how["guidance_scale"] = given.scale
                    start = time.process_time()
                    drawing = engine.draw(letter, acceptance="coupled", **how)
                    took = time.process_time() - start
                    if turn >= 0:
                        stats, right = drawing.result.stats, reader.read(drawing.pixels) == letter
                        found[method, accept].append((took, stats.rounds, right, drawing.result.tokens))
    plain = found["ar", "exact"]
    for (method, accept), rows in found.items():
        pairs = list(zip(plain, rows, strict=True))
        told: dict[str, Any] = {
            "ms a picture": 1000 * float(np.median([one[0] for one in rows])),
            "speed": float(np.median([before[0] / one[0] for before, one in pairs])),
            "codes a pass": sum(len(one[3]) for one in rows) / sum(one[1] for one in rows),
            "read": float(np.mean([one[2] for one in rows])),
            "as plain": float(np.mean([before[3] == one[3] for before, one in pairs])),
        }
        print(json.dumps({"method": method, "accept": accept} | {name: round(one, 2) for name, one in told.items()}))


if __name__ == "__main__":
    main()
