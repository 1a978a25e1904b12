"""Quantizers of block formats: how levels and scales are chosen, and where a format takes its levels from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from edgespec.export.quantization.gptq import feedback_factor, quantize_corrected
from edgespec.export.quantization.levels import Array, Blocks, Quantized, quantize_block
from edgespec.export.quantization.mse import quantize_searched
from edgespec.export.source.source import Checkpoint

PieceQuantizer = Callable[[Array, Blocks], Quantized]  # rows [n, k] of a matrix, and what is made of them


class Quantizer(Protocol):
    """Chooses levels and scales of a matrix, a piece of its rows at a time.

    Attributes:
        name: as in ``--quantizer``.
        calibrated: whether it asks for the inputs of a matrix.
        corrects: whether it moves weights to make up for errors, also for those of the matrices before.
    """

    name: str
    calibrated: bool
    corrects: bool

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        """Make a function for the pieces of one matrix.

        Args:
            inputs: [k, k], the mean of x.T @ x over the inputs x [tokens, k]; None if it asks for none, or where a
                matrix has none (rows that are only looked up): every channel then counts the same.
        """
        ...


class LevelSource(Protocol):
    """Where a format takes the levels of a matrix from.

    Attributes:
        quantizer_name: what chose them.
    """

    quantizer_name: str

    def pieces(self, source: Checkpoint, name: str, form: Blocks) -> Iterator[tuple[Array, Quantized]]:
        """Pieces of the checkpoint's matrix ``name`` [n, k], in order, and what was made of them."""
        ...


class DirectLevels:
    """Quantizes when asked, without knowing the inputs."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.quantizer_name = quantizer.name

    def pieces(self, source: Checkpoint, name: str, form: Blocks) -> Iterator[tuple[Array, Quantized]]:
        quantize, rows = self.quantizer.prepare(None), source.pieces(name)

        def following() -> tuple[Array, Quantized] | None:
            return None if (piece := next(rows, None)) is None else (piece, quantize(piece, form))

        with ThreadPoolExecutor(1) as pool:  # the next piece is read and quantized while this one is written
            ahead = pool.submit(following)
            while (made := ahead.result()) is not None:
                ahead = pool.submit(following)
                yield made


class RoundToNearest:
    """Rounds to nearest: the scale follows the largest weight of a block.  The fastest, and the worst."""

    name = "rtn"
    calibrated = False
    corrects = False

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        return quantize_block


class SquaredError:
    """Searches for scales of least squared error; every channel counts the same."""

    name = "mse"
    calibrated = False
    corrects = False

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        return quantize_searched


class ActivationAware:
    """Weights squared errors by the mean square of the input channel (Lin et al., arXiv 2306.00978).

    The paper's channel scaling is left out: it would have to be folded into the operation before a matrix, and so
    change other tensors of the model.  What remains is its observation that few channels matter most.
    """

    name = "awq"
    calibrated = True
    corrects = False

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        if inputs is None or not inputs.any():
            return quantize_searched
        squares = np.diag(inputs)  # [k]
        # a channel that the calibration text never used still counts a little
        return partial(quantize_searched, importance=squares + squares.mean() * np.float32(1e-3))


class Gptq:
    """Minimises the squared error of a matrix's outputs on its calibration inputs.

    Columns come in their stored order: blocks are contiguous, so the paper's order by activation would need a
    permutation of the inputs.  The scale of a block is searched when the block is reached, on the corrected weights.
    """

    name = "gptq"
    calibrated = True
    corrects = True

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        if inputs is None or not inputs.any():
            return quantize_searched
        feedback, importance = feedback_factor(inputs), np.diag(inputs)

        def quantize(weight: Array, form: Blocks) -> Quantized:
            return quantize_corrected(weight, form, feedback, importance)

        return quantize


QUANTIZERS: dict[str, Quantizer] = {
    quantizer.name: quantizer for quantizer in (RoundToNearest(), SquaredError(), ActivationAware(), Gptq())
}
