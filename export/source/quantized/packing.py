"""Levels of few bits in 32-bit words, and matrices of levels with scales."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.source.tensors.stored import Plain, span


def unpack(words: NDArray[np.int32], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Levels of words, int32 [..., m] -> uint8 [..., m * 32 / bits], the lowest bits first.

    Args:
        words: packed.
        bits: of a level; divides 32.
        order: for each level of a word, in which place it is; None = in its own.
    """
    places = range(32 // bits) if order is None else order
    shifts = np.array([bits * place for place in places], np.uint32)
    levels = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return levels.astype(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * len(shifts))


def dequantize(
    levels: NDArray[np.generic], zeros: NDArray[np.float32], scales: NDArray[np.float32], group: NDArray[np.int64]
) -> NDArray[np.float32]:
    """(level - zero) * scale in float32.

    Args:
        levels: integers [n, k].
        zeros: [n, groups]. scales: [n, groups].
        group: of every column, [k].
    """
    values = levels.astype(np.float32)
    values -= zeros[:, group]
    values *= scales[:, group]
    return values


@dataclass(frozen=True)
class Scaled:
    """A matrix of float8 or int8 with one scale for each block: ``(level - zero) * scale``.

    Attributes:
        levels: [n, k].
        scale: as many as there are blocks; any shape.
        zero: like ``scale``; None = 0.
        block: rows and columns of a block; the last ones may be cut off.
    """

    levels: Plain
    scale: Plain
    zero: Plain | None
    block: tuple[int, int]

    @property
    def file(self) -> Path:
        """See Stored."""
        return self.levels.file

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, k]."""
        return self.levels.shape

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Stored."""
        n, k = self.shape
        grid = -(-n // self.block[0]), -(-k // self.block[1])
        down = np.arange(*span(rows, n)) // self.block[0]
        across = np.arange(*span(columns, k)) // self.block[1]
        values = self.levels.raw(rows, columns).astype(np.float32)
        if self.zero is not None:
            values -= self.zero.raw().astype(np.float32).reshape(grid)[np.ix_(down, across)]
        values *= self.scale.raw().astype(np.float32).reshape(grid)[np.ix_(down, across)]
        return values
