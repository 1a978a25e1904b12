"""Quantize with the inputs of every matrix on a calibration text, one sub-layer at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.ops import Activation, Block, Kind
from edgespec.export.architectures.rules import ExpertsRule, Linear, Norm
from edgespec.export.architectures.trace import walk
from edgespec.export.quantization.gptq import correction
from edgespec.export.quantization.k_blocks import KBlocks, k_values
from edgespec.export.quantization.k_source import KRows
from edgespec.export.quantization.levels import (
    BLOCK,
    Array,
    Blocks,
    Quantized,
    pack_levels,
    unpack_levels,
)
from edgespec.export.quantization.quantizer import (
    AnyBlocks,
    DirectLevels,
    PieceQuantizer,
    Quantizer,
    prepared,
    restored,
)
from edgespec.export.quantization.reference import NumpyOps, SequenceOps, split_sources
from edgespec.export.source.source import Checkpoint

SEQUENCE = 512  # tokens
HEAD_TOKENS = 2048  # that a head is quantized on before the layers
EMBEDDING_SHARE = 0.2  # of the mean of the diagonal: between 0 and 3 little depends on it
LEAST_ROWS = 64  # of an expert: fewer say too little of its inputs


@dataclass(frozen=True)
class SourcedTexts:
    """Calibration texts of an encoder-decoder."""

    # int64 [S, R], token ids that the encoder reads, or float32 [S, R, columns], rows of sounds
    sources: NDArray[np.int64] | Array
    texts: NDArray[np.int64]  # int64 [S, T], what the decoder has before it, each about its source

    @property
    def size(self) -> int:
        """Rows of sources and tokens of texts."""
        count, rows = self.sources.shape[:2]
        return count * rows + self.texts.size


class SpooledLevels(DirectLevels):
    """Levels made earlier, in a temporary file; matrices it does not hold are quantized when asked for.

    Experts' matrices that too few tokens came to were quantized without their inputs.
    """

    def __init__(self, file: IO[bytes], quantizer: Quantizer) -> None:
        super().__init__(quantizer)
        self.k_rows = KRows(file)  # of matrices in ``KBlocks``
        self._file, self.encoder = file, DirectLevels(quantizer)  # whose matrices may have the same names
        self._where: dict[tuple[str, Blocks], list[tuple[int, int, int]]] = {}  # offset, rows, blocks of each piece

    def add(self, name: str, form: AnyBlocks, made: Quantized, exact: Array) -> None:
        """Keep the next piece of a matrix, ``exact`` [r, k] before it was quantized."""
        if isinstance(form, KBlocks):
            self.k_rows.add(name, made[0])
            self.k_rows.note(name, exact, made[1])
            return
        levels, scales = made
        offset = self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(pack_levels(levels, form.bits)).data)
        self._file.write(np.ascontiguousarray(scales).data)
        self._where.setdefault((name, form), []).append((offset, *scales.shape))

    def holds(self, name: str, form: AnyBlocks) -> bool:
        """Whether a matrix has its levels: a convolution comes once for each of its frames."""
        if isinstance(form, KBlocks):
            return self.k_rows.holds(name)
        return (name, form) in self._where

    def pieces(self, source: Checkpoint, name: str, form: AnyBlocks) -> Iterator[tuple[Array, Quantized]]:
        if isinstance(form, KBlocks):
            yield from self._k_pieces(source, name, form)
            return
        where = self._where.get((name, form))
        if where is None:
            yield from super().pieces(source, name, form)
            return
        for piece, (offset, rows, blocks) in zip(source.pieces(name), where, strict=True):
            self._file.seek(offset)
            packed = np.frombuffer(self._file.read(rows * blocks * form.size * form.bits // 8), np.uint8)
            scales = np.frombuffer(self._file.read(4 * rows * blocks), np.float32)
            levels = unpack_levels(packed.reshape(rows, blocks, -1), form.bits)
            yield piece, (levels, scales.reshape(rows, blocks))

    def _k_pieces(self, source: Checkpoint, name: str, form: KBlocks) -> Iterator[tuple[Array, Quantized]]:
        at = 0
        for piece in source.pieces(name):
            rows = self.k_rows.read(name, slice(at, at := at + len(piece)))
            yield piece, (rows, k_values(rows, form))


class CalibrationOps(SequenceOps):
    """Runs calibration sequences through the decoder and quantizes every matrix on its way.

    Every activation is [2 S, T, width]: the sequences in the unquantized model, then the same after the matrices
    quantized so far, which are a matrix's inputs at run time.  In memory at once: one activation or two, the
    statistics of one input, a piece of a matrix; of experts, one matrix of all of them.

    Args:
        sequences: int [S, T], each from an empty past.
        floats: [2 S, R, width], the encoder's rows of the sources, unquantized and then quantized.
    """

    def __init__(
        self,
        arch: Architecture,
        sequences: NDArray[np.int64],
        quantizer: Quantizer,
        blocks: Callable[[str], AnyBlocks],
        spool: SpooledLevels,
        progress: Callable[[int], None] | None = None,
        floats: Array | None = None,
    ) -> None:
        super().__init__(arch, sequences, None, progress, floats=floats)
        self.quantizer, self.blocks, self.spool = quantizer, blocks, spool
        self._writers = residual_writers(arch.trace())
        self._head_first = False
        self._product = True  # whether the product of a matrix is needed
        self._stream: Array = np.empty(0, np.float32)  # before this sub-layer

    def embed(self, weight: str, scale: float, positions: str | None) -> Array:
        wanted, inverse = np.unique(self.sequences, return_inverse=True)
        exact, seen, at, form = list[Array](), list[Array](), 0, self.blocks(weight)
        k, tied = self.source.shape(weight)[1], weight == self.arch.head.weight
        self._head_first = tied and k % BLOCK == 0  # else its rows are not looked up in blocks
        quantize = self._head_quantizer() if self._head_first else prepared(self.quantizer, None)
        for piece in self.source.pieces(weight):
            own = wanted[(wanted >= at) & (wanted < at + len(piece))] - at
            exact.append(piece[own])
            if self._head_first:
                made = quantize(piece, form)
                self.spool.add(weight, form, made, piece)
                seen.append(restored(made, form, k)[own])
            elif k % BLOCK == 0:
                seen.append(restored(quantize(piece[own], form), form, k))
            at += len(piece)
        both = [np.concatenate(rows)[inverse.reshape(self.sequences.shape)] for rows in (exact, seen or exact)]
        return self._placed(np.concatenate(both), scale, positions)

    def _head_quantizer(self) -> PieceQuantizer:
        """Prepare the quantizer of an LM head that is also the embedding.

        It comes before the layers, so that they compensate for the embedding's loss, with the inputs that it has in the
        unquantized model.  As an embedding, all channels count the same: hence ``EMBEDDING_SHARE``.
        """
        few = self.sequences[: max(1, HEAD_TOKENS // self.sequences.shape[1])]
        floats = None if self.floats is None else self.floats[: len(few)]
        x = HeadInputs(self.arch, few, floats=floats).run(self.arch.trace()).reshape(-1, self.arch.facts.hidden)
        products = self._products(x, self.arch.head.weight)
        products.ravel()[:: len(products) + 1] += np.float32(EMBEDDING_SHARE) * products.diagonal().mean()
        return prepared(self.quantizer, products)

    def linear(self, x: Array, parts: tuple[Linear, ...], joined: bool) -> tuple[Array, ...]:
        products = self._products(x[len(x) // 2 :].reshape(-1, x.shape[-1]), parts[0].weight)
        quantize = prepared(self.quantizer, products)
        if self.quantizer.corrects and parts[0].weight in self._writers:  # alone in its linear
            return (self._written(x, parts[0], quantize, products),)
        target = None
        if self.quantizer.corrects:
            exact, seen = x.reshape(2, -1, x.shape[-1])  # [S * T, k]
            target = correction(products, exact.T @ seen / np.float32(len(seen)) - products, None)
        return tuple(self._quantized(x, part, quantize, target) for part in parts)

    def sublayer(
        self, kind: Kind, layer: int, x: Array, body: Callable[[Array], Array], scale: str | None, norm: Norm | None
    ) -> Array:
        self._stream = x if norm is None else self.norm(x, norm)
        return super().sublayer(kind, layer, x, body, scale, norm)

    def experts(self, h: Array, rule: ExpertsRule, activation: Activation, by: Array | None = None) -> Array:
        """Quantize the matrices of each expert, with inputs after the matrices quantized before."""
        facts, middle = self.arch.facts.experts, len(h) // 2
        assert facts is not None
        exact = super().experts(h[:middle], rule, activation, None if by is None else by[:middle])
        x = h[middle:].reshape(-1, h.shape[-1])
        chosen, weights = self.routed(x if by is None else by[middle:], rule)
        y, levels = np.zeros_like(x), {name: list[Quantized]() for name in (rule.gate, rule.up, rule.down)}

        def product(inputs: Array, name: str, own: slice, bias: str | None) -> Array:
            few = len(inputs) < LEAST_ROWS
            self.spool.uncalibrated += few
            form, products = self.blocks(name), None if few else self._products(inputs, name)
            levels[name].append(prepared(self.quantizer, products)(self.source.read(name, own), form))
            made = inputs @ restored(levels[name][-1], form, inputs.shape[1]).T
            return self._biased(made, bias, own)

        for expert in range(facts.count):
            rows, ranks = np.nonzero(chosen == expert)
            inner = slice(expert * facts.inner, (expert + 1) * facts.inner)
            outer = slice(expert * x.shape[1], (expert + 1) * x.shape[1])
            gate = product(x[rows], rule.gate, inner, rule.gate_bias)
            up = product(x[rows], rule.up, inner, rule.up_bias)
            hidden = NumpyOps.gated(self, gate, up, activation)
            y[rows] += product(hidden, rule.down, outer, rule.down_bias) * weights[rows, ranks][:, None]
        for name, found in levels.items():
            all_levels, scales = (np.concatenate(each) for each in zip(*found, strict=True))
            at = 0
            for piece in self.source.pieces(name):
                own = slice(at, at := at + len(piece))
                self.spool.add(name, self.blocks(name), (all_levels[own], scales[own]), piece)
        return np.concatenate([exact, y.reshape(exact.shape)])

    def head(self, x: Array, norm: Norm | None, head: Linear) -> Array:
        """Quantize a head that was not quantized as the embedding; its logits are not needed."""
        if not self._head_first:
            self._product = False
            self.linear(self.encoded(x, norm), (head,), joined=False)
        return x

    def _products(self, x: Array, name: str) -> Array:  # [tokens, k] -> [k, k]
        products = x.T @ x / np.float32(len(x))
        if not np.isfinite(products).all():
            raise ExportError(
                f"{self.source.path}: the inputs of {name} are not finite on the calibration text",
                "quantize without calibration: --quantizer mse",
            )
        return products

    def _written(self, x: Array, part: Linear, quantize: PieceQuantizer, products: Array) -> Array:
        """Quantize a matrix that writes into the residual stream, and let it compensate for the stream's loss."""
        exact, seen = x.reshape(2, -1, x.shape[-1])  # [S * T, k]
        before, behind = self._stream.reshape(2, -1, self._stream.shape[-1])  # [S * T, n]
        lacking, at = np.empty((before.shape[1], x.shape[-1]), np.float32), 0
        given = np.empty_like(before)
        for piece in self.source.pieces(part.weight):
            rows = slice(at, at := at + len(piece))
            np.matmul(exact, piece.T, out=given[:, rows])
            lost = before[:, rows] - behind[:, rows]
            lost += given[:, rows]
            lost -= seen @ piece.T
            lacking[rows] = lost.T @ seen / np.float32(len(seen))
        return self._quantized(x, part, quantize, correction(products, None, lacking), given)

    def _quantized(
        self,
        x: Array,
        part: Linear,
        quantize: PieceQuantizer,
        target: Callable[[Array, slice], Array] | None,
        given: Array | None = None,
    ) -> Array:
        """Quantize a matrix; ``given``: [S * T, n], the unquantized one's output, if that is known already."""
        form, k = self.blocks(part.weight), x.shape[-1]
        exact, seen = x.reshape(2, -1, k)  # [S * T, k]: in one product, for BLAS
        y = np.empty((2, len(seen), self.source.shape(part.weight)[0] if self._product else 0), np.float32)
        if given is not None:
            y[0] = given
        at, known = 0, self.spool.holds(part.weight, form)
        for piece, made in (
            self.spool.pieces(self.source, part.weight, form)
            if known
            else (self._made(part.weight, form, quantize, target))
        ):
            rows = slice(at, at := at + len(piece))
            if self._product:
                if given is None:
                    np.matmul(exact, piece.T, out=y[0, :, rows])
                np.matmul(seen, restored(made, form, k).T, out=y[1, :, rows])
        if part.bias is not None and self._product:
            y += self.source.read(part.bias)
        return y.reshape(*x.shape[:-1], -1)

    def _made(
        self, name: str, form: AnyBlocks, quantize: PieceQuantizer, target: Callable[[Array, slice], Array] | None
    ) -> Iterator[tuple[Array, Quantized]]:
        """Quantize a matrix piece by piece."""
        at = 0
        for piece in self.source.pieces(name):
            rows = slice(at, at := at + len(piece))
            made = quantize(target(piece, rows) if target else piece, form)
            self.spool.add(name, form, made, piece)
            yield piece, made


class HeadInputs(SequenceOps):
    """Runs sequences through the unquantized model, up to the input of its LM head."""

    def head(self, x: Array, norm: Norm | None, head: Linear) -> Array:
        return self.encoded(x, norm)


def residual_writers(trace: Block) -> set[str]:
    """Find the matrices whose outputs are added unchanged to the residual stream."""
    ends = (each.fields["body"].steps[-1][0] for each in walk(trace) if each.method == "sublayer")
    products = (end.fields["parts"] for end in ends if end.method == "linear")
    return {parts[0].weight for parts in products if len(parts) == 1}


@contextmanager
def chosen_levels(
    arch: Architecture,
    quantizer: Quantizer,
    blocks: Callable[[str], AnyBlocks],
    texts: NDArray[np.int64] | SourcedTexts,
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> Iterator[DirectLevels]:
    """Choose the levels of a model's matrices by ``quantizer``.

    Args:
        quantizer: one that needs calibration runs the model here; any other quantizes when a matrix is stored.
        texts: [S, T], tokens of the calibration text; see ``sequences``.  Of an encoder-decoder with its sources.
        folder: for a temporary file, about as large as the weights.

    Raises:
        ExportError: activations that are not finite.
    """
    if not quantizer.calibrated:
        yield DirectLevels(quantizer)
        return
    with tempfile.TemporaryFile(dir=folder) as file, tempfile.TemporaryFile(dir=folder) as other:
        spool, floats = SpooledLevels(file, quantizer), None
        if isinstance(texts, SourcedTexts):
            assert arch.encoder is not None
            spool.encoder, encoder = (inner := SpooledLevels(other, quantizer)), arch.encoder
            # no matrix of an encoder is the decoder's LM head, regardless of its name
            ids, given = split_sources(texts.sources)
            ops = CalibrationOps(encoder, ids, quantizer, lambda name: blocks(f"encoder.{name}"), inner,
                                 floats=None if given is None else np.concatenate([given, given]))  # fmt: skip
            floats = ops.run(encoder.trace())
        rows = texts.texts if isinstance(texts, SourcedTexts) else texts
        CalibrationOps(arch, rows, quantizer, blocks, spool, progress, floats).run(arch.trace())
        yield spool


def sequences(tokens: Sequence[int], begin: Sequence[int], context: int) -> NDArray[np.int64]:  # [S, T]
    """Cut tokens into rows of equal length, ``begin`` in front of each; drop what does not fill a row."""
    length = max(1, min(SEQUENCE, context - len(begin), len(tokens)))
    count = len(tokens) // length
    rows = np.asarray(tokens[: count * length], np.int64).reshape(count, length)
    return np.concatenate([np.tile(np.asarray(begin, np.int64), (count, 1)), rows], 1)
