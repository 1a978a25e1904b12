"""Reduce the rows of an image below a model's default: smaller images, or fewer tiles."""

from __future__ import annotations

from math import isqrt
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import (
    Gemma4Pixels,
    Idefics3Pixels,
    ImagePart,
    InternVlPixels,
    Lfm2VlPixels,
    Qwen2VlPixels,
)

OPTION = "--max-image-tokens"
APART = 4  # most over least rows: sides are rounded up where a picture is made larger


def limited(image: ImagePart | None, rows: int | None) -> ImagePart | None:
    """Limit an image to ``rows`` rows of the decoder; None = the model's own limit.

    Raises:
        InvalidRequest: a text-only model, or one whose images always have more rows.
    """
    if rows is None:
        return image
    if image is None:
        raise InvalidRequest(f"{OPTION} {rows}: this model reads no images", f"leave {OPTION} out")
    how, least = image.processor, image.max_rows
    if isinstance(how, Idefics3Pixels | InternVlPixels):
        least = _of_tile(image)
    elif isinstance(how, Lfm2VlPixels | Qwen2VlPixels | Gemma4Pixels):
        least = 1
    if rows < least:
        raise InvalidRequest(f"{OPTION} {rows}: an image of this model has at least {least} rows", f"{OPTION} {least}")
    if rows >= image.max_rows:
        return image
    changes, most = _changes(image, rows)
    return image.model_copy(update={"processor": how.model_copy(update=changes), "max_rows": most, "proof": []})


def _of_tile(image: ImagePart) -> int:
    """Return the rows of a tile."""
    processor = image.processor
    assert isinstance(processor, Idefics3Pixels | InternVlPixels | Lfm2VlPixels)
    side: int = processor.tile // processor.patch // image.merge.factor
    return side * side


def _changes(image: ImagePart, rows: int) -> tuple[dict[str, Any], int]:
    """Find the changes of the processor, and the rows of its largest image with them."""
    how = image.processor
    if isinstance(how, Qwen2VlPixels):
        most = rows * (how.patch * image.merge.factor) ** 2
        return {"max_pixels": most, "min_pixels": min(how.min_pixels, most // APART)}, rows
    if isinstance(how, Gemma4Pixels):
        return {"max_tokens": rows}, rows
    tile = _of_tile(image)
    if isinstance(how, InternVlPixels):
        tiles = rows // tile - 1
        if tiles < max(how.tiles[0], 2) or not how.split:
            return {"split": False}, tile
        return {"tiles": (how.tiles[0], min(how.tiles[1], tiles))}, tile * (1 + min(how.tiles[1], tiles))
    if isinstance(how, Idefics3Pixels):
        side = isqrt(max(rows // tile - 1, 0))  # tiles of a side, without the whole image
        if side < 2:  # one tile is the whole
            return {"split": False}, tile
        return {"longest": side * how.tile}, tile * (side * side + 1)
    assert isinstance(how, Lfm2VlPixels)
    tokens = min(how.tokens[0], max(rows // APART, 1)), min(how.tokens[1], rows)
    tiles = (rows - tokens[1]) // tile if how.split else 0
    if tiles < max(how.tiles[0], 2):
        return {"tokens": tokens, "split": False}, tokens[1]
    return {"tokens": tokens, "tiles": (how.tiles[0], min(how.tiles[1], tiles))}, tokens[1] + tile * tiles
