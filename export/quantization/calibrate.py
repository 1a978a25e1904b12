"""Quantizing with the inputs that every matrix sees on a calibration text, one sub-layer at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.ops import (
    Activation,
    AttentionRule,
    Block,
    Kind,
    LayerEmbedding,
    Linear,
    Multiply,
    Norm,
    SubLayer,
)
from edgespec.export.architectures.trace import walk
from edgespec.export.quantization.gptq import Correction
from edgespec.export.quantization.levels import (
    BLOCK,
    Array,
    Blocks,
    Quantized,
    dequantize_block,
    pack_levels,
    unpack_levels,
)
from edgespec.export.quantization.mse import quantize_searched
from edgespec.export.quantization.quantizer import DirectLevels, LevelSource, PieceQuantizer, Quantizer
from edgespec.export.quantization.reference import NumpyOps
from edgespec.export.source.source import Checkpoint

SEQUENCE = 512  # tokens


class SpooledLevels:
    """Levels made earlier, in a temporary file; matrices it does not hold are quantized when asked for."""

    def __init__(self, file: IO[bytes], quantizer: Quantizer) -> None:
        self._file, self._direct = file, DirectLevels(quantizer)
        self.quantizer_name = quantizer.name
        self._where: dict[tuple[str, Blocks], list[tuple[int, int, int]]] = {}  # offset, rows, blocks of each piece

    def add(self, name: str, form: Blocks, made: Quantized) -> None:
        """Keep the next piece of a matrix."""
        levels, scales = made
        offset = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(pack_levels(levels, form.bits)).data)
        self._file.write(np.ascontiguousarray(scales).data)
        self._where.setdefault((name, form), []).append((offset, *scales.shape))

    def pieces(self, source: Checkpoint, name: str, form: Blocks) -> Iterator[tuple[Array, Quantized]]:
        where = self._where.get((name, form))
        if where is None:
            yield from self._direct.pieces(source, name, form)
            return
        for piece, (offset, rows, blocks) in zip(source.pieces(name), where, strict=True):
            self._file.seek(offset)
            packed = np.frombuffer(self._file.read(rows * blocks * form.size * form.bits // 8), np.uint8)
            scales = np.frombuffer(self._file.read(4 * rows * blocks), np.float32)
            levels = unpack_levels(packed.reshape(rows, blocks, -1), form.bits)
            yield piece, (levels, scales.reshape(rows, blocks))


class CalibrationOps(NumpyOps):
    """Runs calibration sequences through the decoder and quantizes every matrix on its way.

    Every activation is [2 S, T, width]: the sequences in the unquantized model, then the same behind the matrices
    quantized so far, which is what a matrix sees at run time.  Held at once: one activation or two, the statistics of
    one input, a piece of a matrix.

    Args:
        sequences: int [S, T], each from an empty past.
    """

    def __init__(
        self,
        arch: Architecture,
        sequences: NDArray[np.int64],
        quantizer: Quantizer,
        blocks: Callable[[str], Blocks],
        spool: SpooledLevels,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(arch, sequences[0].tolist(), None, progress)
        self.sequences, self.quantizer, self.blocks, self.spool = sequences, quantizer, blocks, spool
        self._writers = residual_writers(arch.trace())
        self._given: dict[int, dict[int, tuple[Array, Array]]] = {}  # see NumpyOps, by sequence
        self._product = True  # whether anybody needs what a matrix gives
        self._stream: Array = np.empty(0, np.float32)  # before this sub-layer

    def embed(self, weight: str, scale: float, positions: str | None) -> Array:
        wanted, inverse = np.unique(self.sequences, return_inverse=True)
        found, at = [], 0
        for piece in self.source.pieces(weight):
            found.append(piece[wanted[(wanted >= at) & (wanted < at + len(piece))] - at])
            at += len(piece)
        rows = np.concatenate(found)
        inverse = inverse.reshape(self.sequences.shape)
        k, form, seen = rows.shape[1], self.blocks(weight), rows
        if k % BLOCK == 0:  # a tied embedding's own levels come last, with the head: a guess at them has to do
            seen = dequantize_block(*quantize_searched(rows, form), k, form.bits)
        return self._placed(np.concatenate([rows[inverse], seen[inverse]]), scale, positions)

    def linear(self, x: Array, parts: tuple[Linear, ...], joined: bool) -> tuple[Array, ...]:
        seen = x[len(x) // 2 :].reshape(-1, x.shape[-1])
        products = seen.T @ seen / np.float32(len(seen))
        if not np.isfinite(products).all():
            raise ExportError(
                f"{self.source.path}: the inputs of {parts[0].weight} are not finite on the calibration text",
                "quantize without calibration: --quantizer mse",
            )
        quantize = self.quantizer.prepare(products)
        correction = self._correction(x, parts[0], products) if self.quantizer.corrects else None
        return tuple(self._quantized(x, part, quantize, correction) for part in parts)

    def sublayer(self, kind: Kind, layer: int, x: Array, body: Callable[[Array], Array], scale: str | None) -> Array:
        self._stream = x
        return super().sublayer(kind, layer, x, body, scale)

    def attended(self, q: Array, k: Array | None, v: Array | None, rule: AttentionRule) -> Array:
        found = []
        for s in range(len(q)):
            self.given = self._given.setdefault(s, {})
            own = slice(s, s + 1)
            keys, values = None if k is None else k[own], None if v is None else v[own]
            found.append(super().attended(q[own], keys, values, rule))
        return np.concatenate(found)

    def layer_embedding(self, gate: Array, base: Array, rule: LayerEmbedding, activation: Activation) -> Array:
        columns = slice(rule.layer * rule.width, (rule.layer + 1) * rule.width)
        rows = self._rows(rule.table, self.sequences, columns) * np.float32(rule.scale)
        return self.gated(gate, base + np.concatenate([rows, rows]), activation)

    def gated(self, gate: Array, up: Array, activation: Activation) -> Array:
        for s in range(len(gate)):  # in place: the widest of all activations
            gate[s] = super().gated(gate[s], up[s], activation)
        return gate

    def activate(self, x: Array, activation: Activation, numbers: str | None) -> Array:
        for s in range(len(x)):
            x[s] = super().activate(x[s], activation, numbers)
        return x

    def head(self, x: Array, norm: Norm, head: Linear) -> Array:
        """Quantize the head; nobody needs its logits."""
        x = self.norm(x, norm)
        self._product = False
        self.linear(x, (head,), joined=False)
        return x

    def _quantized(self, x: Array, part: Linear, quantize: PieceQuantizer, correction: Correction | None) -> Array:
        form, k = self.blocks(part.weight), x.shape[-1]
        middle, n = len(x) // 2, self.source.shape(part.weight)[0] if self._product else 0
        y, at = np.empty((*x.shape[:-1], n), np.float32), 0
        for piece in self.source.pieces(part.weight):
            rows = slice(at, at + len(piece))
            made = quantize(correction.target(piece, rows) if correction else piece, form)
            self.spool.add(part.weight, form, made)
            if self._product:
                y[:middle, :, rows] = x[:middle] @ piece.T
                y[middle:, :, rows] = x[middle:] @ dequantize_block(*made, k, form.bits).T
            at += len(piece)
        if part.bias is not None and self._product:
            y += self.source.read(part.bias)
        return y

    def _correction(self, x: Array, part: Linear, products: Array) -> Correction:
        exact, seen = x.reshape(2, -1, x.shape[-1])  # [S * T, k]
        count = np.float32(len(seen))
        residual = None
        if part.weight in self._writers:  # stands alone in its linear
            before, behind = self._stream.reshape(2, -1, self._stream.shape[-1])  # [S * T, n]
            residual = (before - behind).T @ seen / count
        return Correction(products, exact.T @ seen / count - products, residual)


def residual_writers(trace: Block) -> set[str]:
    """Find the matrices whose outputs are added to the residual stream as they are."""
    ends = (each.body.steps[-1][0] for each in walk(trace) if isinstance(each, SubLayer))
    return {end.parts[0].weight for end in ends if isinstance(end, Multiply) and len(end.parts) == 1}


@contextmanager
def chosen_levels(
    arch: Architecture,
    quantizer: Quantizer,
    blocks: Callable[[str], Blocks],
    texts: NDArray[np.int64],
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> Iterator[LevelSource]:
    """Choose the levels of a model's matrices by ``quantizer``.

    Args:
        quantizer: one that needs calibration runs the model here; any other quantizes when a matrix is stored.
        texts: [S, T], tokens of the calibration text; see ``sequences``.
        folder: where a temporary file may lie: about as large as the weights.

    Raises:
        ExportError: activations that are not finite.
    """
    if not quantizer.calibrated:
        yield DirectLevels(quantizer)
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        spool = SpooledLevels(file, quantizer)
        CalibrationOps(arch, texts, quantizer, blocks, spool, progress).run(arch.trace())
        yield spool


def sequences(tokens: Sequence[int], begin: Sequence[int], context: int) -> NDArray[np.int64]:  # [S, T]
    """Cut tokens into rows of equal length, ``begin`` in front of each; drop what does not fill a row."""
    length = max(1, min(SEQUENCE, context - len(begin), len(tokens)))
    count = len(tokens) // length
    rows = np.asarray(tokens[: count * length], np.int64).reshape(count, length)
    return np.concatenate([np.tile(np.asarray(begin, np.int64), (count, 1)), rows], 1)
