"""Pack rows of a file's blocks for native operators, and convert them back to float32 (native/pack.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError
from edgespec.runtimes.files.formats import TILE
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.ort.native_library import native_library

PIECE = 32 << 20  # bytes that are packed at once


class Rows(Protocol):
    """Rows of a matrix as its file has them."""

    @property
    def read(self) -> Callable[[slice | NDArray[np.int64]], NDArray[np.uint8]]:
        """Read some rows -> uint8 [rows, bytes]."""


@cache
def lacks_packing() -> str:
    """Explain why rows of a file cannot be packed here; "" = they can."""
    library = native_library()
    if library.path is None:
        return library.reason
    known = hasattr(ctypes.CDLL(str(library.path)), "edgespec_pack")
    return "" if known else f"{library.path} is of an older version: install edgespec again, so that it is built again"


@cache
def _library() -> ctypes.CDLL:
    path = native_library().path
    if path is None:
        raise BundleError("weights of a file need native operators", native_library().reason)
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.edgespec_pack.argtypes = [ctypes.c_char_p, ctypes.c_int, pointer, number, pointer, pointer]
    library.edgespec_unpack.argtypes = [ctypes.c_char_p, ctypes.c_int, pointer, pointer, number, number, pointer]
    return library


def pack_rows(packed: Packed, parts: Sequence[Rows]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8] | None]]:
    """Pack the rows of ``parts``, stacked, piece by piece of whole tiles.

    Returns bytes of the matrix, and of its low plane, if it has one.

    Raises:
        BundleError: no native operators.
    """
    starts = np.cumsum([0, *(rows for _, rows in packed.parts)])
    order = _padded(packed)  # row of each packed row, -1: none
    step = max(1, PIECE // max(1, packed.tile_bytes)) * TILE
    for first in range(0, len(order), step):
        wanted = order[first : first + step]
        there = wanted[wanted >= 0]
        held = [parts[i].read(_some(there[(there >= starts[i]) & (there < starts[i + 1])] - starts[i]))
                for i in range(len(parts))]  # fmt: skip
        yield _pack(packed, held, wanted >= 0)


def _some(rows: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return consecutive rows as a slice, which is not copied."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _padded(packed: Packed) -> NDArray[np.int64]:
    """Return the row of each row of the tiles, -1 for padding."""
    size = packed.head_dim or packed.n
    padded = -(-size // TILE) * TILE
    order = np.full((packed.n // size, padded), -1, np.int64)
    order[:, :size] = np.arange(packed.n).reshape(-1, size)
    return order.ravel()


def _pack(
    packed: Packed, held: Sequence[NDArray[np.uint8]], there: NDArray[np.bool_]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    held = [rows if rows.strides[-1] == 1 else np.ascontiguousarray(rows) for rows in held]
    pointers = np.zeros(len(there), np.uint64)
    pointers[there] = np.concatenate(
        [rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0]) for rows in held]
    )
    tiles = len(there) // TILE
    out = np.empty(tiles * packed.tile_bytes, np.uint8)
    low = np.empty(tiles * (packed.low_nbytes // (packed.nbytes // packed.tile_bytes)), np.uint8)
    given = low.ctypes.data if low.size else None
    if _library().edgespec_pack(packed.kind.encode(), packed.k, pointers.ctypes.data, tiles, out.ctypes.data, given):
        raise ValueError(f"{packed.kind} of rows of {packed.k}")
    return out, low if low.size else None


def unpack_rows(
    packed: Packed, data: NDArray[np.uint8], low: NDArray[np.uint8] | None, rows: slice
) -> NDArray[np.float32]:  # [rows, k]
    """Convert packed rows, padding included, to float32.

    Raises:
        BundleError: no native operators.
    """
    first, end, _ = rows.indices(packed.rows)
    out = np.empty((max(0, end - first), packed.k), np.float32)
    given = None if low is None else low.ctypes.data
    kind = packed.kind.encode()
    if _library().edgespec_unpack(kind, packed.k, data.ctypes.data, given, first, len(out), out.ctypes.data):
        raise ValueError(f"{packed.kind} of rows of {packed.k}")
    return out
