"""Where tensors lie in a weight file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

WEIGHTS = "model.data"
INLINE_BYTES = 1024  # smaller tensors sit inside the .onnx file
SMALL_ALIGN, LARGE_ALIGN = 1 << 12, 1 << 16  # page sizes of Linux and, for large tensors, of Windows mappings
HEADROOM = 66  # rows beyond the context: the largest tree (64 nodes) and two for padding


def converted_name(operators: str) -> str:
    """What graphs call weights in the layout of these operators, where the bundle has them in the other layout.

    No bundle has a file of that name, so nobody reads the wrong layout; ``runtimes/files/repack.py`` makes it in the
    cache.
    """
    return f"model.{operators}.data"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in the weight file."""

    offset: int
    length: int
    dims: tuple[int, ...]
    dtype: np.dtype[Any]


class WeightLayout:
    """The tensors of a weight file, one behind the other.

    Attributes:
        entries: by name, in order.
        end: bytes of the file.
        file: what graphs call it.
    """

    def __init__(self) -> None:
        self.file = WEIGHTS
        self.entries: dict[str, Stored] = {}
        self.end = 0

    def add(self, name: str, dims: tuple[int, ...], dtype: Any) -> Stored:
        """Place one more tensor."""
        dtype = np.dtype(dtype)
        length = prod(dims) * dtype.itemsize
        align = LARGE_ALIGN if length >= 1 << 20 else SMALL_ALIGN
        offset = -(-self.end // align) * align
        self.end = offset + length
        self.entries[name] = Stored(offset, length, dims, dtype)
        return self.entries[name]

    def alias(self, name: str, of: str, dims: tuple[int, ...]) -> None:
        """Name the same bytes a second time with another shape."""
        entry = self.entries[of]
        self.entries[name] = Stored(entry.offset, entry.length, dims, entry.dtype)
