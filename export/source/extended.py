"""A checkpoint with tensors of other origin beside its own: trained heads, a cut LM head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.export.source.source import Checkpoint


class Extra(Protocol):
    """A tensor that is read in parts, as float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """Some rows, and columns of a matrix."""
        ...


@dataclass(frozen=True)
class Held:
    """A tensor in memory."""

    value: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.value.shape

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Extra."""
        return self.value[rows] if columns is None else self.value[rows, columns]


@dataclass(frozen=True)
class ChosenRows:
    """Some rows of a checkpoint's matrix.

    Attributes:
        source: the checkpoint.
        name: the matrix, [n, k].
        ids: int64 [size], ascending.
    """

    source: Checkpoint
    name: str
    ids: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """[size, k]."""
        return len(self.ids), self.source.shape(self.name)[1]

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Extra; the matrix is gone through once, a piece at a time."""
        wanted, found, start = self.ids[rows], [], 0
        for piece in self.source.pieces(self.name):
            here = wanted[(wanted >= start) & (wanted < start + len(piece))] - start
            found.append(piece[here] if columns is None else piece[here, columns])
            start += len(piece)
        return np.concatenate(found)


class Overlay(Checkpoint):
    """A checkpoint and more tensors, which may stand in for its own; ``index`` is the checkpoint's alone."""

    def __init__(self, base: Checkpoint, extra: Mapping[str, Extra]) -> None:
        super().__init__(base.path, base.config, notes=base.notes)
        self._base, self._extra = base, dict(extra)

    @property
    def base(self) -> Checkpoint:
        """The checkpoint itself."""
        return self._base

    @property
    def extra(self) -> dict[str, Extra]:
        """The tensors beside the checkpoint's own."""
        return dict(self._extra)

    @cached_property
    def index(self) -> dict[str, Path]:
        """Which file holds which tensor of the checkpoint."""
        return self._base.index

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._extra or self._base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._extra[name].shape if name in self._extra else self._base.shape(name)

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """(Part of) a tensor as float32."""
        if name in self._extra:
            return np.ascontiguousarray(self._extra[name].read(rows, columns), np.float32)
        return self._base.read(name, rows, columns)


class ExtendedCheckpoint(Overlay):
    """A checkpoint with trained heads or a cut LM head beside its own tensors."""
