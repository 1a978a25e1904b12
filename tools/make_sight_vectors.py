"""Vectors of pictures: how they are cut, what stands for them in a text, and some numbers of what towers read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.images.image import proof_picture
from edgespec.runtimes.images.processing import process

EVERY = 401  # numbers, of which one is kept
SIZES = ((1, 1), (9, 31), (50, 70), (64, 64), (80, 100), (150, 44), (301, 97))
WORDS = {"placeholder": "<image>", "token": "<image>", "id": 4, "begin": "[", "end": "]", "tile": "<{row},{column}>",
         "line": "\n", "whole": "<whole>"}  # fmt: skip
NORMAL = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "idefics3", "patch": 8, "longest": 192, "tile": 64, "resample": "lanczos"},
    {"kind": "idefics3", "patch": 12, "longest": 150, "tile": 72, "split": False, "resample": "bicubic", **NORMAL},
    {"kind": "lfm2-vl", "patch": 8, "tile": 64, "tiles": (2, 10), "tokens": (4, 16)},
    {"kind": "lfm2-vl", "patch": 8, "tile": 512, "tiles": (1, 1), "tokens": (1, 256), "split": False,
     "resample": "bicubic"},
    {"kind": "internvl", "patch": 8, "tile": 64, "tiles": (1, 6), **NORMAL},
)  # fmt: skip


def pictures() -> Iterator[dict[str, Any]]:
    """Cut pictures of odd sizes."""
    for how in KINDS:
        part = ImagePart.model_validate(
            {"processor": how, "prompt_template": WORDS, "merge": {"how": "blocks", "factor": 2}, "max_rows": 1024}
        )
        cut = {}
        for height, width in SIZES:
            found = process(proof_picture((height, width)).pixels, part)
            numbers = [float(one) for piece in found.pieces for one in piece.patches.ravel()[::EVERY]]
            cut[f"{height} {width}"] = {
                "text": found.text, "grids": [piece.grid for piece in found.pieces],
                "numbers": [round(one, 6) for one in numbers],
            }  # fmt: skip
        yield {"part": part.model_dump(mode="json", exclude_defaults=True), "pictures": cut}
