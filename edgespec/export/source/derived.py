"""Tensors made of a checkpoint's tensors, read in parts: renamed, cut, transposed, scaled, added.

An architecture says with these how its checkpoint becomes the tensors that every other part of the export knows:
``model.layers.N.self_attn.q_proj.weight`` and so on, one matrix [outputs, inputs] a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import FileRows

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Extra:
    """A tensor that is read in parts, as float32."""

    size: Callable[[], tuple[int, ...]]  # returns its shape; the checkpoint is not read before
    read: Callable[[slice, slice | None], Floats]  # (rows, columns of a matrix or None) -> that part
    origins: frozenset[str] = frozenset()  # names of the checkpoint's tensors that it is computed from
    blocks: Callable[[], FileRows | None] = lambda: None  # gives its rows as a file has them, if that is what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size()


def original(source: Checkpoint, name: str) -> Extra:
    """Take a tensor of the checkpoint."""
    return Extra(lambda: source.shape(name), lambda rows, columns: source.read(name, rows, columns), frozenset({name}),
                 lambda: source.blocks(name))  # fmt: skip


def taken(source: Checkpoint, names: Mapping[str, str]) -> dict[str, Extra]:
    """Take weights of modules, and biases where there are some; ``names``: in the checkpoint, by ours."""
    found: dict[str, Extra] = {}
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            # if neither exists, the error should name the checkpoint's own tensor
            if source.has(f"{theirs}.{kind}") or (kind == "weight" and not source.has(f"{ours}.{kind}")):
                found[f"{ours}.{kind}"] = original(source, f"{theirs}.{kind}")
    return found


def held(value: Floats) -> Extra:
    """Keep a tensor in memory."""
    return Extra(lambda: value.shape, lambda rows, columns: value[rows] if columns is None else value[rows, columns])


def chosen_rows(source: Checkpoint, name: str, ids: Ids, width: int) -> Extra:
    """Choose rows of a checkpoint's matrix [n, width]: ids int64 [size], ascending -> [size, width]."""

    def read(rows: slice, columns: slice | None) -> Floats:
        wanted, found, start = ids[rows], [], 0
        for piece in source.pieces(name):  # once through the matrix
            here = wanted[(wanted >= start) & (wanted < start + len(piece))] - start
            found.append(piece[here] if columns is None else piece[here, columns])
            start += len(piece)
        return np.concatenate(found)

    return Extra(lambda: (len(ids), width), read)


def transposed(of: Extra) -> Extra:
    """Turn a matrix [k, n] into [n, k]."""
    return Extra(
        lambda: of.shape[::-1],
        lambda rows, columns: of.read(slice(None) if columns is None else columns, rows).T,
        of.origins,
    )


def rows_of(of: Extra, ids: Ids) -> Extra:
    """Take rows of a matrix [n, k] or a vector [n] in another order: ids int64 [m], best in long runs or close."""

    def read(rows: slice, columns: slice | None) -> Floats:
        wanted = ids[rows]
        first, last = int(wanted.min()), int(wanted.max())
        if last - first < 2 * len(wanted):  # nearly all of a part, mixed
            return of.read(slice(first, last + 1), columns)[wanted - first]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([of.read(slice(int(run[0]), int(run[-1]) + 1), columns) for run in runs])

    def blocks() -> FileRows | None:
        found = of.blocks()
        if found is None:
            return None
        read = found.read
        return replace(found, read=lambda rows: read(ids[rows]))

    return Extra(lambda: (len(ids), *of.shape[1:]), read, of.origins, blocks)


def columns_of(of: Extra, first: int, size: int) -> Extra:
    """Take ``size`` columns of a matrix [n, k] from ``first`` on; as its file has them, if they are whole blocks."""

    def read(rows: slice, columns: slice | None) -> Floats:
        start, stop, _ = (columns or slice(None)).indices(size)
        return of.read(rows, slice(first + start, first + stop))

    def blocks() -> FileRows | None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        found = of.blocks()
        if found is None or found.order is not None or found.type not in GGMLQuantizationType.__members__:
            return None
        each, length = GGML_QUANT_SIZES[GGMLQuantizationType[found.type]]
        if first % each or size % each:
            return None
        every, left, right = found.read, first // each * length, (first + size) // each * length
        return replace(found, read=lambda rows: every(rows)[:, left:right])

    return Extra(lambda: (of.shape[0], size), read, of.origins, blocks)


def joined(*parts: Extra) -> Extra:
    """Put matrices [n, k] below each other."""

    def shape() -> tuple[int, ...]:
        return sum(part.shape[0] for part in parts), *parts[0].shape[1:]

    def read(rows: slice, columns: slice | None) -> Floats:
        start, stop, _ = rows.indices(shape()[0])
        found, at = [], 0
        for part in parts:
            first, last = max(start - at, 0), min(stop - at, part.shape[0])
            if first < last:
                found.append(part.read(slice(first, last), columns))
            at += part.shape[0]
        return np.concatenate(found)

    origins = frozenset[str]().union(*(part.origins for part in parts))
    return Extra(shape, read, origins, lambda: joined_rows(parts))


def joined_rows(parts: Sequence[Extra]) -> FileRows | None:
    """Return the rows of matrices below each other as their file has them, if they are of one type and in order."""
    found = [rows for part in parts if (rows := part.blocks()) is not None and rows.order is None]
    if len(found) < len(parts) or len({rows.type for rows in found}) != 1:
        return None
    first = found[0]
    starts = np.cumsum([0, *(part.shape[0] for part in parts)])

    def read(rows: slice | Ids) -> NDArray[np.uint8]:
        wanted = np.arange(*rows.indices(int(starts[-1]))) if isinstance(rows, slice) else rows
        number = np.searchsorted(starts, wanted, "right") - 1  # of each row's part
        pieces = [found[at].read(wanted[number == at] - starts[at]) for at in np.unique(number)]
        out = np.empty((len(wanted), *pieces[0].shape[1:]), np.uint8) if pieces else first.read(slice(0, 0))
        for at, piece in zip(np.unique(number), pieces, strict=True):
            out[number == at] = piece
        return out

    return replace(first, read=read)


def affine(of: Extra, scale: float = 1.0, shift: float = 0.0) -> Extra:
    """Multiply a tensor by ``scale`` and add ``shift``."""
    return Extra(
        of.size, lambda rows, columns: of.read(rows, columns) * np.float32(scale) + np.float32(shift), of.origins
    )


def normed(of: Extra, eps: float) -> Extra:
    """Divide each row of a matrix [n, k] by the root of its mean square."""

    def read(rows: slice, columns: slice | None) -> Floats:
        x = of.read(rows, None)
        y: Floats = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
        return y if columns is None else y[:, columns]

    return Extra(of.size, read, of.origins)


def by_column(of: Extra, by: Extra, scale: float) -> Extra:
    """Multiply each column of a matrix [n, k] by its number of ``by`` [k], and all by ``scale``."""

    def read(rows: slice, columns: slice | None) -> Floats:
        return of.read(rows, columns) * (by.read(slice(None) if columns is None else columns, None) * np.float32(scale))

    return Extra(of.size, read, of.origins | by.origins)


def flat(of: Extra) -> Extra:
    """Take a matrix of one row, [1, n], as a vector."""
    return Extra(lambda: of.shape[1:], lambda rows, columns: of.read(slice(None), rows)[0], of.origins)


def made_of(of: Extra, shape: tuple[int, ...], make: Callable[[Floats], Floats], *others: Extra) -> Extra:
    """Make a tensor from a small one, which is read whole; ``others``: more tensors that ``make`` reads."""

    def read(rows: slice, columns: slice | None) -> Floats:
        found = make(of.read(slice(None), None))
        return found[rows] if columns is None else found[rows, columns]

    return Extra(lambda: shape, read, of.origins.union(*(other.origins for other in others)))


def taps(of: Extra, order: Ids | None = None) -> Extra:
    """Transpose the taps of a convolution, [hidden, 1, length] or without the 1, to [length * hidden].

    Args:
        order: of channels, int64 [hidden].
    """

    def read(rows: slice, columns: slice | None) -> Floats:
        found = of.read(slice(None), None).reshape(of.shape[0], -1)
        return (found if order is None else found[order]).T.ravel()[rows]

    return Extra(lambda: (of.shape[0] * of.shape[-1],), read, of.origins)


def exponential(of: Extra) -> Extra:
    """Raise e to the power of a vector."""
    return Extra(of.size, lambda rows, columns: np.exp(of.read(rows, columns)), of.origins)


class Overlay(Checkpoint):
    """A checkpoint with more tensors, which may replace its own; ``index`` lists only the checkpoint's."""

    def __init__(self, base: Checkpoint, extra: Mapping[str, Extra]) -> None:
        super().__init__(base.path, base.config, notes=base.notes)
        self.base, self.extra = base, dict(extra)

    @cached_property
    def index(self) -> dict[str, Path]:
        return self.base.index

    def has(self, name: str) -> bool:
        return name in self.extra or self.base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.extra[name].shape if name in self.extra else self.base.shape(name)

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Floats:
        if name in self.extra:
            return np.ascontiguousarray(self.extra[name].read(rows, columns), np.float32)
        return self.base.read(name, rows, columns)

    def blocks(self, name: str) -> FileRows | None:
        return self.extra[name].blocks() if name in self.extra else self.base.blocks(name)


class ExtendedCheckpoint(Overlay):
    """A checkpoint with additional tensors, such as trained heads or a cut LM head."""


def extended(source: Checkpoint, extra: Mapping[str, Extra]) -> ExtendedCheckpoint:
    """Add tensors to a checkpoint, which may already be extended."""
    if isinstance(source, ExtendedCheckpoint):
        return ExtendedCheckpoint(source.base, {**source.extra, **extra})
    return ExtendedCheckpoint(source, extra)


class DerivedCheckpoint(Overlay):
    """A checkpoint seen through an architecture: ``extra`` replaces and adds tensors."""

    def origins(self, name: str) -> frozenset[str]:
        """Return the names of the checkpoint's tensors that a tensor is computed from."""
        return self.extra[name].origins if name in self.extra else frozenset({name})
