"""Handle images as codes: allowed tokens, codes that look alike, and PNG files of generated images."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.codes import CodesPart

Pixels = NDArray[np.uint8]  # [height, width, 3]


class CodeTokenConstraint:
    """A ``Constraint``: an image consists only of codes."""

    scored = True

    def __init__(self, part: CodesPart, vocab: int) -> None:
        self._codes = np.zeros(vocab, bool)
        self._codes[part.first : part.first + part.size] = True

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_]:
        """See Constraint."""
        return self._codes

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """See Constraint."""
        return []


class NearestCodes:
    """Tokens of codes whose vectors are nearest to another one's, the nearest first.

    Args:
        folder: of the bundle.
        part: with a ``codebook``.
        most: how many of each.

    Raises:
        BundleError: the bundle has no such vectors.
    """

    def __init__(self, folder: Path, part: CodesPart, most: int) -> None:
        assert part.image is not None
        file, self._first, self._most = part.image.codebook, part.first, min(most, part.size - 1)
        vectors = np.fromfile(folder / file, "<f4") if file else np.zeros(0, np.float32)
        if not vectors.size or vectors.size % part.size:
            raise BundleError(f"{folder}: has no vectors of {part.size} codes", "export the bundle again")
        self._vectors = vectors.reshape(part.size, -1)
        self._halves = (self._vectors**2).sum(1) / 2
        self.near = lru_cache(4096)(self._near)

    def _near(self, token: int) -> NDArray[np.int64]:
        code = token - self._first
        if not 0 <= code < len(self._vectors):
            return np.empty(0, np.int64)
        far = self._halves - self._vectors @ self._vectors[code]
        far[code] = np.inf
        found = np.argpartition(far, self._most - 1)[: self._most]
        return found[np.argsort(far[found], kind="stable")] + self._first


def pixels_of(picture: NDArray[np.float32]) -> Pixels:
    """Round a picture, [height, width, 3] from -1 to 1, to bytes."""
    return ((np.clip(picture, -1, 1) + 1) * 127.5).round().astype(np.uint8)


def png(pixels: Pixels) -> bytes:
    """Write a picture as a PNG file (https://www.w3.org/TR/png-3)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with the filter that changes nothing
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
