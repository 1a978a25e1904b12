"""Tensors made of a checkpoint's tensors, read in parts: renamed, cut, transposed, scaled, added.

An architecture says with these how its checkpoint becomes the tensors that every other part of the export knows:
``model.layers.N.self_attn.q_proj.weight`` and so on, one matrix [outputs, inputs] a projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
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
        """Read some rows, and columns of a matrix."""
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


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Own:
    """A tensor of the checkpoint."""

    source: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.source.shape(self.name)

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        return self.source.read(self.name, rows, columns)


@dataclass(frozen=True)
class Transposed:
    """A matrix [k, n] as [n, k]."""

    of: Extra

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, k]."""
        return self.of.shape[::-1]

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        return self.of.read(slice(None) if columns is None else columns, rows).T


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor, in another order.

    Attributes:
        of: a matrix [n, k] or a vector [n].
        ids: int64 [m], the rows; best in long runs, or close together.
    """

    of: Extra
    ids: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """[m, k] or [m]."""
        return len(self.ids), *self.of.shape[1:]

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        wanted = self.ids[rows]
        first, last = int(wanted.min()), int(wanted.max())
        if last - first < 2 * len(wanted):  # nearly all of a part, mixed
            return self.of.read(slice(first, last + 1), columns)[wanted - first]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([self.of.read(slice(int(run[0]), int(run[-1]) + 1), columns) for run in runs])


@dataclass(frozen=True)
class Affine:
    """A tensor times ``scale``, plus ``shift``."""

    of: Extra
    scale: float = 1.0
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.of.shape

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        return self.of.read(rows, columns) * np.float32(self.scale) + np.float32(self.shift)


@dataclass(frozen=True)
class Normed:
    """A matrix [n, k] with each row over the root of its mean square."""

    of: Extra
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, k]."""
        return self.of.shape

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        x = self.of.read(rows, None)
        y: Floats = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self.eps))
        return y if columns is None else y[:, columns]


@dataclass(frozen=True)
class Taps:
    """The taps of a convolution, stored [hidden, 1, length], as [length * hidden]; ``order``: int64 [hidden]."""

    of: Extra
    order: NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[length * hidden]."""
        hidden, _, length = self.of.shape
        return (hidden * length,)

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        taps = self.of.read(slice(None), None)[:, 0]
        return (taps if self.order is None else taps[self.order]).T.ravel()[rows]


@dataclass(frozen=True)
class Exponential:
    """e to the power of a vector."""

    of: Own

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.of.shape

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        return np.exp(self.of.read(rows, columns))


@dataclass(frozen=True)
class Columns:
    """Some columns of a matrix [n, k], ``size`` from ``first`` on."""

    of: Own
    first: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, size]."""
        return self.of.shape[0], self.size

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        start, stop, _ = (columns or slice(None)).indices(self.size)
        return self.of.read(rows, slice(self.first + start, self.first + stop))


@dataclass(frozen=True)
class Joined:
    """Matrices [n, k] below each other."""

    of: tuple[Extra, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[sum of n, k]."""
        return sum(part.shape[0] for part in self.of), *self.of[0].shape[1:]

    def read(self, rows: slice, columns: slice | None) -> Floats:
        """See Extra."""
        start, stop, _ = rows.indices(self.shape[0])
        found, at = [], 0
        for part in self.of:
            first, last = max(start - at, 0), min(stop - at, part.shape[0])
            if first < last:
                found.append(part.read(slice(first, last), columns))
            at += part.shape[0]
        return np.concatenate(found)


def origins(tensor: object) -> set[str]:
    """Names of the checkpoint's tensors that a tensor is made of."""
    if isinstance(tensor, Own):
        return {tensor.name}
    if isinstance(tensor, tuple):
        return set().union(*map(origins, tensor))
    parts = vars(tensor).values() if is_dataclass(tensor) else ()
    return set().union(*map(origins, parts))


class DerivedCheckpoint(Overlay):
    """A checkpoint seen through an architecture: ``extra`` replaces and adds tensors."""

    def __init__(self, base: Checkpoint, extra: Mapping[str, Extra]) -> None:
        super().__init__(base, extra)

    def origins(self, name: str) -> set[str]:
        """Names of the checkpoint's tensors behind a tensor."""
        return origins(self.extra[name]) if name in self.extra else {name}
