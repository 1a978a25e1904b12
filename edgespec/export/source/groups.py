"""Rows of quantized checkpoints as blocks that native operators multiply: integer levels in groups of inputs.

A group has a float16 scale, and a zero point.  Where the groups of a matrix are wider than those that there are kernels
for, its scales repeat.  Where they are scattered (act-order), inputs are put in the order of their groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.source.stored import FileRows

SIZES = 128, 64, 32  # of groups that there are kernels for

Parts = Callable[[slice], tuple[NDArray[Any], ...]]  # of consecutive rows


@dataclass(frozen=True)
class GroupedRows:
    """The rows of a matrix: ``(level - zero) * scale``."""

    file: Path  # for messages
    bits: int  # of a level
    group: NDArray[np.int64]  # of each input, [k]
    symmetric: bool  # whether every zero point is the middle of the range
    levels: Parts  # uint8 [r, k]
    scales: Parts  # zero points [r, groups] and scales float32 [r, groups]
    pairs: Parts | None = None  # levels of 4 bits as Q4_0 has them, 32 in 16 bytes: uint8 [r, k / 2]

    def as_blocks(self, exact: bool) -> FileRows:
        """Return them as blocks, or with a type that has no kernels, whose name says why.

        Args:
            exact: whether all scales are float16 numbers.
        """
        order = None if (np.diff(self.group) >= 0).all() else np.argsort(self.group, kind="stable")
        group = self.group if order is None else self.group[order]
        size = next((size for size in SIZES if _is_constant(group, size)), 0)
        if not size or not exact:
            why = "with scales that are not float16" if size else f"in groups that are not multiples of {SIZES[-1]}"
            return without_kernels(f"{self.bits} bits {why}")
        if self.bits > 4 and (self.symmetric or size != SIZES[0]):
            size = SIZES[-1]  # of 8 bits a repeated scale is a small part, and Q8_0 has two planes
        if self.symmetric and size == SIZES[-1]:
            return FileRows("Q4_0" if self.bits <= 4 else "Q8_0", lambda rows: self._read(rows, order, size, 0), order)
        name = f"U{4 if self.bits <= 4 else 8}X{size}"
        return FileRows(name, lambda rows: self._read(rows, order, size, 1), order)

    def _read(
        self, rows: slice | NDArray[np.int64], order: NDArray[np.int64] | None, size: int, zero_bytes: int
    ) -> NDArray[np.uint8]:  # [r, bytes]
        zeros, scales = _some(self.scales, rows)
        if not np.isfinite(scales).all():
            raise ExportError(
                f"{self.file}: scales hold NaN or infinity", "the checkpoint is damaged: download it again"
            )
        own = (self.group if order is None else self.group[order])[::size]  # of each block
        middle, count = 8 if self.bits <= 4 else 128, len(scales)
        blocks = self._codes(rows, order).reshape(count, len(own), -1)
        if self.bits > 4 and not zero_bytes:
            blocks = blocks ^ np.uint8(128)  # Q8_0 has signed levels
        out = np.empty((count, len(own), 2 + zero_bytes + blocks.shape[2]), np.uint8)
        out[..., :2] = scales[:, own].astype("<f2")[..., None].view(np.uint8)
        if zero_bytes:
            out[..., 2] = (zeros[:, own].astype(np.int16) - middle).astype(np.int8).view(np.uint8)
        out[..., 2 + zero_bytes :] = blocks
        return out.reshape(count, -1)

    def _codes(self, rows: slice | NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.uint8]:
        """Return levels as blocks have them, [r, bytes]."""
        if self.pairs is not None and order is None:
            return _some(self.pairs, rows)[0]
        (levels,) = _some(self.levels, rows)
        levels = levels if order is None else levels[:, order]
        if self.bits > 4:
            return levels
        pairs = levels.reshape(len(levels), -1, 2, 16)
        return pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)


def _some(parts: Parts, rows: slice | NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
    if isinstance(rows, slice):
        return parts(rows)
    ordered = np.unique(rows)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1) if len(ordered) else [ordered]
    found = [parts(slice(int(run[0]), int(run[-1]) + 1)) if len(run) else parts(slice(0, 0)) for run in runs]
    return tuple(np.concatenate(part)[np.searchsorted(ordered, rows)] for part in zip(*found, strict=True))


def without_kernels(name: str) -> FileRows:
    """Return rows of a type that cannot be taken as it is; they are never read."""

    def read(rows: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        raise ValueError(f"{name}: no blocks")

    return FileRows(name, read)


def _is_constant(group: NDArray[np.int64], size: int) -> bool:
    """Whether every ``size`` inputs are of one group."""
    if not len(group) or len(group) % size:
        return False
    each = group.reshape(-1, size)
    return bool((each == each[:, :1]).all())


def is_half(scales: NDArray[np.float32]) -> bool:
    """Whether all scales are float16 numbers."""
    with np.errstate(over="ignore"):
        return bool((scales.astype(np.float16).astype(np.float32) == scales).all())
