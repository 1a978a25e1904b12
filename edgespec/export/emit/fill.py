"""Writing a weight file by its plan, piece by piece, so that no tensor need be whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.emit.plan import HEADROOM, ORDER, Matrix, StoragePlan, Stored
from edgespec.export.quantization import levels as quantize
from edgespec.export.quantization.file_blocks import stock_rows
from edgespec.export.quantization.native_packing import pack_rows
from edgespec.export.quantization.quantizer import QUANTIZERS, DirectLevels
from edgespec.export.source.stored import FileRows
from edgespec.runtimes.files.formats import FILE, FILE_KINDS
from edgespec.runtimes.files.large_writes import LargeWrites
from edgespec.runtimes.files.packing import Packed

Errors = dict[str, tuple[float, float]]  # tensor name -> sum of squared errors, sum of squares
Pieces = Iterator[tuple[NDArray[Any], NDArray[np.float32]]]  # levels [r, ..] and scales [r, ..] of consecutive rows


class WeightFile:
    """Writer of a weight file; ``progress`` is called with the bytes so far after every piece."""

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda done: None) -> None:
        self._file, self.progress = LargeWrites(path), progress
        self._bytes = 0

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def write(self, entry: Stored, pieces: Iterable[NDArray[Any]], scattered: bool = False) -> None:
        """Write a tensor that arrives as consecutive pieces of its bytes, in row order.

        ``scattered``: rows of it are looked up, far from each other.
        """
        self.write_together((entry,), ((piece,) for piece in pieces), scattered)

    def write_together(
        self, entries: Sequence[Stored], pieces: Iterable[tuple[NDArray[Any], ...]], scattered: bool = False
    ) -> None:
        """Write tensors of which pieces arrive together."""
        written = [0] * len(entries)
        for together in pieces:
            for i, (entry, piece) in enumerate(zip(entries, together, strict=True)):
                own = np.ascontiguousarray(piece, entry.dtype).reshape(-1)
                written[i] += self._file.write_at(entry.offset + written[i], own.data, scattered)
            self._bytes += sum(piece.nbytes for piece in together)
            self.progress(self._bytes)
        for entry, count in zip(entries, written, strict=True):
            if count != entry.length:
                raise AssertionError(f"wrote {count} bytes at {entry.offset}, expected {entry.length}")


def fill(
    path: Path,
    plan: StoragePlan,
    chosen: DirectLevels | None = None,
    progress: Callable[[int, int], None] | None = None,  # called with (bytes written, of) after every piece of a tensor
) -> Errors:
    """Write the tensors of a plan's model.

    Returns the squared errors of the matrices.
    """
    filler = _Filler(plan, chosen or DirectLevels(QUANTIZERS["rtn"]))
    with WeightFile(path, lambda done: progress(done, plan.end) if progress else None) as file:
        for content, name in plan.contents:
            if content == "matrix" and (packed := plan.matrices[name].packed) and packed.low_nbytes:
                planes = [plan.entries[f"{name}.{plane}"] for plane in ("packed", "low")]
                file.write_together(planes, filler.planes(plan.matrices[name], packed))
                continue
            for entry, pieces in filler.tensors(content, name):
                file.write(plan.entries[entry], pieces, scattered=content == "rows")
        file.progress(plan.end)
    return filler.errors


class _Filler:
    def __init__(self, plan: StoragePlan, chosen: DirectLevels) -> None:
        self.plan, self.arch, self.source, self.chosen = plan, plan.arch, plan.arch.source, chosen
        self.errors: Errors = {}

    def tensors(self, content: str, name: str) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        """Names of entries, and what they hold."""
        if content == "matrix":
            yield from self._matrix(name, self.plan.matrices[name])
        elif content == "rows":
            yield from self._table(name)
        elif content == "vector":
            yield name, [self.source.read(name)]
        elif content == "angles":
            context, rotary = self.arch.facts.context, self.arch.rotaries[name]
            tables = rotary.tables(context + HEADROOM, context)
            yield from ((f"{name}_{which}", [table]) for which, table in zip(("cos", "sin"), tables, strict=True))
            if (growth := rotary.growth(context + HEADROOM)) is not None:
                yield f"{name}_growth", [growth]
            if rotary.axes:
                yield f"{name}_axes", [np.array(rotary.axes, np.float32)]
        elif content == "order":
            own = self.source.blocks(name.removesuffix(ORDER))
            yield name, [] if own is None or own.order is None else [own.order.astype(np.float32)]
        else:  # learned positions; zeros beyond them, where no token is ever placed
            rows = self.arch.position_rows + HEADROOM
            learnt = self.source.read(name, slice(0, min(rows, self.source.shape(name)[0])))
            yield name, [learnt, np.zeros((rows - len(learnt), learnt.shape[1]), np.float32)]

    def _table(self, name: str) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        """Fill embeddings that are only looked up, [vocab, k]: float32, or int8 with a scale for each part of a row."""
        if f"{name}.table_scales" not in self.plan.entries:
            yield f"{name}.table", self.source.pieces(name)
            return
        parts = self.plan.entries[f"{name}.table_scales"].dims[1]

        def pieces() -> Pieces:
            for piece in self.source.pieces(name):
                rows = piece.reshape(len(piece) * parts, -1)
                levels, scales = quantize.quantize_channel(rows, quantize.EMBEDDING_LEVELS)
                yield levels.reshape(piece.shape), scales.reshape(len(piece), parts)

        yield from _in_turn((f"{name}.table", f"{name}.table_scales"), pieces())

    def _matrix(self, name: str, matrix: Matrix) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        packed, levels, scales = matrix.packed, f"{name}.levels", f"{name}.scales"
        if matrix.form == FILE and packed is not None:
            yield f"{name}.packed", (piece for piece, _ in pack_rows(packed, self._file_rows(matrix)))
        elif matrix.form == FILE:
            names = (levels, scales, f"{name}.zeros") if f"{name}.zeros" in self.plan.entries else (levels, scales)
            yield from _in_turn(names, (piece[: len(names)] for piece in self._stock_rows(matrix)))
        elif matrix.form == "fp32":
            rows = self._floats(matrix)
            yield (name, _columns(matrix, rows)) if packed is None else (f"{name}.packed", packed.pack_floats(rows))
        elif matrix.form == "w8a8":
            pieces = self._channels(matrix)
            if packed is None:
                yield from _in_turn((levels, scales), pieces, lambda pieces: _columns(matrix, pieces))
            else:
                yield f"{name}.packed", packed.pack_channels(pieces)
        else:
            form = quantize.BLOCKS[matrix.form]
            pieces = self.blocks(matrix)
            if packed is None:
                yield from _in_turn((levels, scales), (form.to_stock(*piece, matrix.k) for piece in pieces))
            else:
                yield f"{name}.packed", packed.pack_blocks(pieces)

    def planes(self, matrix: Matrix, packed: Packed) -> Iterator[tuple[NDArray[Any], ...]]:
        """Fill a matrix of two planes, which are written together."""
        if matrix.form == FILE:
            return ((high, low) for high, low in pack_rows(packed, self._file_rows(matrix)) if low is not None)
        return packed.pack_planes(self.blocks(matrix))

    def _file_rows(self, matrix: Matrix) -> list[FileRows]:
        rows = [self.source.blocks(part) for part in matrix.parts]
        return [part for part in rows if part is not None]

    def _stock_rows(self, matrix: Matrix) -> Iterator[tuple[NDArray[Any], ...]]:
        for part, rows in zip(matrix.parts, self._file_rows(matrix), strict=True):
            yield from stock_rows(FILE_KINDS[rows.type], rows, self.plan.shapes[part][0], matrix.k)

    def _floats(self, matrix: Matrix) -> Iterator[NDArray[np.float32]]:
        for part in matrix.parts:
            for piece in self.source.pieces(part):
                add_error(self.errors, part, piece, piece)
                yield piece

    def _channels(self, matrix: Matrix) -> Pieces:
        for part in matrix.parts:
            for piece in self.source.pieces(part):
                levels, scales = quantize.quantize_channel(piece)
                add_error(self.errors, part, piece, quantize.dequantize_channel(levels, scales))
                yield levels, scales

    def blocks(self, matrix: Matrix) -> Pieces:
        """Choose levels and scales of a matrix in blocks, piece by piece of its rows."""
        form = quantize.BLOCKS[matrix.form]
        for part in matrix.parts:
            for piece, (levels, scales) in self.chosen.pieces(self.source, part, form):
                add_error(self.errors, part, piece, quantize.dequantize_block(levels, scales, matrix.k, form.bits))
                yield levels, scales


def _in_turn(
    names: Sequence[str],
    pieces: Iterable[tuple[NDArray[Any], ...]],
    change: Callable[[Iterator[NDArray[Any]]], Iterable[NDArray[Any]]] = lambda pieces: pieces,
) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
    """Levels, then their scales and zero points: those are small, and kept until the levels are written."""
    kept: list[tuple[NDArray[Any], ...]] = []

    def first() -> Iterator[NDArray[Any]]:
        for piece, *own in pieces:
            kept.append(tuple(own))
            yield piece

    yield names[0], change(first())
    for at, name in enumerate(names[1:]):
        yield name, [own[at] for own in kept]


def _columns(matrix: Matrix, pieces: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Turn the rows of a matrix [n, k] into one piece [k, n]."""
    whole: NDArray[Any] | None = None
    at = 0
    for piece in pieces:
        whole = np.empty((matrix.k, matrix.n), piece.dtype) if whole is None else whole
        whole[:, at : at + len(piece)] = piece.T
        at += len(piece)
    if whole is not None:
        yield whole


def add_error(
    errors: Errors, name: str, weight: NDArray[np.float32], approximation: NDArray[np.float32]  # [r, k] both
) -> None:  # fmt: skip
    """Add the squared error and the sum of squares of some rows to those of their matrix."""
    error, norm = quantize.squared_error(weight, approximation)
    before = errors.get(name, (0.0, 0.0))
    errors[name] = before[0] + error, before[1] + norm
