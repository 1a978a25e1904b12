"""Turn an image into the input of a vision tower, as transformers' processors do, with only Pillow and numpy.

Every kind resizes an image (or tiles of it), converts its pixels to numbers, and cuts it into square patches in raster
order.  A patch's columns are its pixels in image order, (row, column, channel).

Sources of the sizes: Idefics 3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299); LFM2-VL (arXiv 2511.23404);
Gemma 3 (arXiv 2503.19786); Qwen2-VL (arXiv 2409.12191).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError, InvalidRequest, install_hint
from edgespec.runtimes.files.images import (
    Gemma3Pixels,
    Gemma4Pixels,
    Idefics3Pixels,
    ImagePart,
    InternVlPixels,
    Lfm2VlPixels,
    Pixels,
    PositionEmbeddingPart,
    Qwen2VlPixels,
)

Picture = NDArray[np.uint8]  # [height, width, 3]
Floats = NDArray[np.float32]
Size = tuple[int, int]  # height, width
LONGEST = 4096  # pixels of a side that Idefics 3 resizes to at most
MOST_RATIO = 200  # of the sides of a picture that Qwen's models read


@dataclass(frozen=True, eq=False)
class Piece:
    """Input of one pass of the tower."""

    patches: Floats  # float32 [rows * columns, patch * patch * 3]
    grid: Size  # rows and columns of patches


@dataclass(frozen=True, eq=False)
class Processed:
    """The inputs of a model for one image."""

    pieces: list[Piece]  # in the order of their rows in the text
    text: str  # what stands for it, with ``words.token`` once for each row


def process(pixels: Picture, part: ImagePart) -> Processed:
    """Cut a picture, red, green and blue, as the model's processor does.

    Raises:
        InvalidRequest: a picture too narrow for the model, or Pillow is not installed.
    """
    how = part.processor
    if isinstance(how, Idefics3Pixels):
        return _idefics3(pixels, how, part)
    if isinstance(how, Lfm2VlPixels):
        return _lfm2_vl(pixels, how, part)
    if isinstance(how, InternVlPixels):
        return _internvl(pixels, how, part)
    if isinstance(how, Gemma3Pixels):
        return _processed([resized(pixels, (how.size, how.size), how)], part)
    if isinstance(how, Gemma4Pixels):
        size = _gemma4_size(pixels.shape[0], pixels.shape[1], how, part.merge.factor)
        return _processed([resized(pixels, size, how)], part)
    return _processed([_within(pixels, how, part)], part)


def merged(rows: Floats, grid: Size, part: ImagePart) -> Floats:  # [T, width] -> [R, columns]
    """Make one row of each square of a tower's rows, as the projector reads them."""
    (height, width), factor = grid, part.merge.factor
    blocks = rows[part.merge.lead :].reshape(height // factor, factor, width // factor, factor, -1).swapaxes(1, 2)
    count = height * width // factor**2
    if part.merge.how == "average":
        return np.asarray(blocks.reshape(count, factor * factor, -1).mean(1, dtype=np.float32))
    return np.ascontiguousarray(blocks.reshape(count, -1))


def merged_grid(grid: Size, part: ImagePart) -> Size:
    """Rows and columns that a piece's rows have after merging."""
    return grid[0] // part.merge.factor, grid[1] // part.merge.factor


def read_places(folder: Path, part: ImagePart) -> Floats | None:  # [side * side, width]
    """Read the learnt positions of a tower that resamples them; None = it does not.

    Raises:
        BundleError: the file has another size than the manifest says.
    """
    if (places := part.position_embedding) is None:
        return None
    file, count = folder / places.file, places.rows * places.width
    found = np.fromfile(file, "<f4", count + 1)
    if len(found) != count:
        raise BundleError(f"{file}: {file.stat().st_size} bytes, expected {4 * count} of positions", "export it again")
    return found.reshape(-1, places.width)


def tower_rows(piece: Piece, part: ImagePart, places: Floats | None) -> Floats:  # [T, columns]
    """Append the positions of a piece's patches if a tower reads both, or put empty rows in front."""
    if part.merge.lead:
        return np.pad(piece.patches, ((part.merge.lead, 0), (0, 0)))
    if part.position_embedding is None or places is None:
        return piece.patches
    return np.concatenate([piece.patches, resampled(places, piece.grid, part.position_embedding)], 1)


def resampled(
    places: Floats, grid: Size, part: PositionEmbeddingPart
) -> Floats:  # [side * side, width] -> [rows * columns, width]
    """Resample learnt positions to a grid of patches, or add those of lines and columns."""
    if part.how == "axes":
        found = places[part.side :][: grid[0], None] + places[: grid[1]]
        return np.ascontiguousarray(found.reshape(grid[0] * grid[1], -1))
    rows, columns = (_weights(size, part) for size in grid)  # [size, side]
    found = rows @ places.reshape(part.side, -1)  # [rows, side * width]
    found = columns @ found.reshape(grid[0], part.side, -1)  # [rows, columns, width]
    return np.ascontiguousarray(found.reshape(grid[0] * grid[1], -1))


def _weights(size: int, part: PositionEmbeddingPart) -> Floats:  # [size, side]
    """Return the weights of each learnt position for the places of a side."""
    at, source = np.arange(size, dtype=np.float32), np.arange(part.side, dtype=np.float32)
    if part.how == "corners":
        step = np.float32((part.side - 1) / (size - 1)) if size > 1 else np.float32(0)
        return np.maximum(np.float32(1) - np.abs(source - (at * step)[:, None]), np.float32(0))
    scale = np.float32(part.side) / np.float32(size)
    centers = (at + np.float32(0.5)) * scale - np.float32(0.5)
    found = np.maximum(1 - np.abs(source - centers[:, None]) / np.maximum(scale, np.float32(1)), np.float32(0))
    return np.asarray(found / found.sum(-1, keepdims=True), np.float32)


Encode = Callable[[int, Floats, Any], Floats]  # number of a side (tower, projectors), rows, lines and columns -> rows


def piece_rows(piece: Piece, part: ImagePart, places: Floats | None, encode: Encode) -> Floats:
    """Compute a piece's rows of the decoder by a tower and its projectors -> [R, width * (1 + taps)].

    Args:
        piece: of an image.
        part: of the model.
        places: its learnt positions, of ``read_places``.
        encode: computes rows of a side: 0 = the tower, which gets the positions of its patches, int64 [2, T]; 1 and
            more = the projectors, which get None.
    """
    inside = np.stack(np.divmod(np.arange(len(piece.patches)), piece.grid[1]))
    inside = np.pad(inside, ((0, 0), (part.merge.lead, 0)))
    each = np.split(encode(0, tower_rows(piece, part, places), inside), 1 + len(part.deepstack_layers), axis=1)
    return np.concatenate([encode(1 + at, merged(one, piece.grid, part), None) for at, one in enumerate(each)], axis=1)


# -- pixels ------------------------------------------------------------------------------------------------------------


def resized(pixels: Picture, size: Size, how: Pixels) -> Picture:
    """Resize a picture [height, width, 3] as Pillow does, levels of 8 bits."""
    if pixels.shape[:2] == size:
        return pixels
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidRequest("images need Pillow, which is not installed", install_hint("images")) from error
    resample = Image.Resampling[how.resample.upper()]
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], resample))


def patches(pixels: Picture, how: Pixels) -> Piece:
    """Cut a picture whose sides are multiples of a patch's into patches of numbers."""
    size = how.patch
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    cut = pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(rows * columns, size * size, 3)
    levels = (np.arange(256, dtype=np.float64) * how.rescale).astype(np.float32)
    found = np.empty(cut.shape, np.float32)
    for channel, (mean, std) in enumerate(zip(how.mean, how.std, strict=True)):
        found[..., channel] = ((levels - np.float32(mean)) / np.float32(std))[cut[..., channel]]
    return Piece(found.reshape(rows * columns, -1), (rows, columns))


def _processed(pictures: list[Picture], part: ImagePart, words: Callable[[list[str]], str] | None = None) -> Processed:
    """Cut pictures into patches, and write their text; ``words``: of the rows of each piece, if more than those."""
    pieces = [patches(each, part.processor) for each in pictures]
    rows = [part.prompt_template.token * math.prod(merged_grid(piece.grid, part)) for piece in pieces]
    inner = "".join(rows) if words is None else words(rows)
    return Processed(pieces, f"{part.prompt_template.begin}{inner}{part.prompt_template.end}")


def _tiles(pixels: Picture, tile: int) -> list[Picture]:
    """Cut a picture whose sides are multiples of a tile's into tiles, line by line."""
    height, width = pixels.shape[:2]
    return [pixels[y : y + tile, x : x + tile] for y in range(0, height, tile) for x in range(0, width, tile)]


def _tiled(rows: list[str], columns: int, part: ImagePart) -> str:
    """Write the rows of tiles, line by line, each after its number."""
    lines = [rows[at : at + columns] for at in range(0, len(rows), columns)]
    words = part.prompt_template
    return "".join(
        "".join(words.tile.format(row=y + 1, column=x + 1) + own for x, own in enumerate(line)) + words.line
        for y, line in enumerate(lines)
    )


# -- kinds -------------------------------------------------------------------------------------------------------------


def _idefics3(pixels: Picture, how: Idefics3Pixels, part: ImagePart) -> Processed:
    """Resize the longer side to ``longest``, then both sides to multiples of a tile's side, and cut it into tiles."""
    pixels = resized(pixels, _idefics3_size(pixels.shape[0], pixels.shape[1], how.longest), how)
    if how.split:
        pixels = resized(pixels, _in_tiles(pixels.shape[0], pixels.shape[1], how.tile), how)
    whole = resized(pixels, (how.tile, how.tile), how)
    if not how.split or pixels.shape[:2] == whole.shape[:2]:
        return _processed([whole], part, lambda rows: part.prompt_template.whole + rows[0])
    columns = pixels.shape[1] // how.tile

    def words(rows: list[str]) -> str:
        return _tiled(rows[:-1], columns, part) + part.prompt_template.line + part.prompt_template.whole + rows[-1]

    return _processed([*_tiles(pixels, how.tile), whole], part, words)


def _idefics3_size(height: int, width: int, longest: int) -> Size:
    """Scale sides so that the longer one is ``longest`` and the other one even, then none beyond ``LONGEST``."""
    size = _scaled(height, width, longest)
    size = size[0] + (size[0] % 2 if width >= height else 0), size[1] + (size[1] % 2 if height > width else 0)
    size = max(size[0], 1), max(size[1], 1)
    return _scaled(*size, LONGEST) if max(size) > LONGEST else size


def _scaled(height: int, width: int, longest: int) -> Size:
    """Scale sides so that the longer one is ``longest``."""
    ratio = width / height
    return (int(longest / ratio), longest) if width >= height else (longest, int(longest * ratio))


def _in_tiles(height: int, width: int, tile: int) -> Size:
    """Make both sides multiples of a tile's, the longer one first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile


def _lfm2_vl(pixels: Picture, how: Lfm2VlPixels, part: ImagePart) -> Processed:
    """Resize a picture to multiples of merged patches; large ones are cut into tiles as well."""
    height, width = pixels.shape[:2]
    unit = how.patch * part.merge.factor
    least, most = (tokens * unit**2 for tokens in how.tokens)
    rounded = [max(how.patch, round(side / unit) * unit) for side in (height, width)]
    size = _bounded(height, width, unit, least, most)
    whole = resized(pixels, size, how)
    if not how.split or max(how.tiles) == 1 or math.prod(rounded) <= most * how.tolerance:
        return _processed([whole], part)
    least, most = how.tiles
    # transformers sorts the pairs of a set only by their number of tiles, so the last of two equal ones may win
    shapes = {(x, y) for n in range(least, most + 1) for x in range(1, n + 1) for y in range(1, n + 1)
              if least <= x * y <= most}  # fmt: skip
    columns, rows = _grid(height, width, how.tile, shapes)
    tiles = _tiles(resized(pixels, (rows * how.tile, columns * how.tile), how), how.tile)
    thumbnail = [whole] if how.thumbnail and rows * columns > 1 else []
    if rows * columns == 1:
        return _processed(tiles, part)

    def words(found: list[str]) -> str:
        last = part.prompt_template.whole + found[-1] if thumbnail else ""
        return _tiled(found[: rows * columns], columns, part) + last

    return _processed([*tiles, *thumbnail], part, words)


def _grid(height: int, width: int, tile: int, shapes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Choose columns and rows of tiles with the shape of the image; among equal ones, those nearest to its size."""
    best, off = (1, 1), math.inf
    for x, y in sorted(shapes, key=math.prod):
        other = abs(width / height - x / y)
        if other < off or (other == off and width * height > 0.5 * tile**2 * x * y):
            best, off = (x, y), other
    return best


def _internvl(pixels: Picture, how: InternVlPixels, part: ImagePart) -> Processed:
    """Resize an image to tiles of about its shape, with a thumbnail of it if there are several."""
    (least, most), (height, width) = how.tiles, pixels.shape[:2]
    sides = range(1, most + 1)
    shapes = [(x, y) for x in sides for y in sides if least <= x * y <= most] if how.split else [(1, 1)]
    columns, rows = _grid(height, width, how.tile, shapes)
    tiles = _tiles(resized(pixels, (rows * how.tile, columns * how.tile), how), how.tile)
    return _processed([*tiles, *([resized(pixels, (how.tile, how.tile), how)] if len(tiles) > 1 else [])], part)


def _bounded(height: int, width: int, unit: int, least: int, most: int) -> Size:
    """Round sides to multiples of ``unit`` with about the same shape and ``least`` to ``most`` pixels."""
    found = [max(unit, round(side / unit) * unit) for side in (height, width)]
    if math.prod(found) > most:
        times = math.sqrt(height * width / most)
        found = [max(unit, math.floor(side / times / unit) * unit) for side in (height, width)]
    elif math.prod(found) < least:
        times = math.sqrt(least / (height * width))
        found = [math.ceil(side * times / unit) * unit for side in (height, width)]
    return found[0], found[1]


def _within(pixels: Picture, how: Qwen2VlPixels, part: ImagePart) -> Picture:
    """Resize a picture to multiples of merged patches within the model's limits."""
    height, width = pixels.shape[:2]
    if max(height, width) > MOST_RATIO * min(height, width):
        raise InvalidRequest(
            f"a picture of {width} x {height} pixels: expected one side to be at most {MOST_RATIO} times the other",
            "cut it into parts",
        )
    return resized(pixels, _qwen_size(height, width, how.patch * part.merge.factor, how), how)


def _gemma4_size(height: int, width: int, how: Gemma4Pixels, factor: int) -> Size:
    """Scale sides so that there are about as many patches as allowed, and round down to multiples of merged ones."""
    unit, most = how.patch * factor, how.max_tokens * factor**2 * how.patch**2
    times = math.sqrt(most / (height * width))
    found = [math.floor(times * side / unit) * unit for side in (height, width)]
    if not any(found):
        raise InvalidRequest(f"a picture of {width} x {height} pixels is too small", "take a larger one")
    if not all(found):  # of a very long one
        longer = max(height, width) // min(height, width)
        found = [min(longer, how.max_tokens) * unit if side else unit for side in found]
    return found[0], found[1]


def _qwen_size(height: int, width: int, unit: int, how: Qwen2VlPixels) -> Size:
    """Like ``_bounded``, but a side may round to 0 before the number of pixels is checked."""
    if round(height / unit) * round(width / unit):
        return _bounded(height, width, unit, how.min_pixels, how.max_pixels)
    times = math.sqrt(how.min_pixels / (height * width))
    return math.ceil(height * times / unit) * unit, math.ceil(width * times / unit) * unit
