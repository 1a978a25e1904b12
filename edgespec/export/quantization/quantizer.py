"""Quantizers of block formats: how they choose levels and scales, and the source of a format's levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from edgespec import extensions
from edgespec.export.quantization.gptq import feedback_factor, quantize_corrected
from edgespec.export.quantization.k_blocks import KBlocks, quantize_k
from edgespec.export.quantization.levels import Array, Blocks, Quantized, dequantize_block, quantize_block
from edgespec.export.quantization.mse import quantize_searched
from edgespec.export.source.source import Checkpoint
from edgespec.extensions import Table

AnyBlocks = Blocks | KBlocks
# rows [n, k] of a matrix -> their levels; of ``KBlocks`` bytes of rows, and their values
PieceQuantizer = Callable[[Array, Any], Quantized]


@dataclass(frozen=True)
class Quantizer:
    """Chooses levels and scales of a matrix, a piece of its rows at a time.

    Attributes:
        name: as in ``--quantizer``.
        prepare: [k, k], the mean of x.T @ x over a matrix's inputs x [tokens, k], -> a function for its pieces.  None
            where a quantizer asks for none, or a matrix has none (rows that are only looked up): every channel then
            counts the same.
        calibrated: whether it asks for the inputs of a matrix.
        corrects: whether it moves weights to make up for errors, also for those of the matrices before.
    """

    name: str
    prepare: Callable[[Array | None], PieceQuantizer]
    calibrated: bool = False
    corrects: bool = False


class DirectLevels:
    """The source of a matrix's levels for a format: quantizes when asked, without knowing the inputs.

    Attributes:
        quantizer_name: what chose them.
        uncalibrated: matrices that a calibrating quantizer knew no inputs of.
        encoder: where the levels of the model's encoder come from.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.quantizer_name, self.uncalibrated = quantizer.name, 0
        self.encoder = self

    def pieces(self, source: Checkpoint, name: str, form: Blocks) -> Iterator[tuple[Array, Quantized]]:
        """Yield pieces of the checkpoint's matrix ``name`` [n, k], in order, and their levels."""
        quantize, rows = self.quantizer.prepare(None), source.pieces(name)

        def following() -> tuple[Array, Quantized] | None:
            return None if (piece := next(rows, None)) is None else (piece, quantize(piece, form))

        with ThreadPoolExecutor(1) as pool:  # the next piece is read and quantized while this one is written
            ahead = pool.submit(following)
            while (made := ahead.result()) is not None:
                ahead = pool.submit(following)
                yield made


def prepared(quantizer: Quantizer, inputs: Array | None) -> PieceQuantizer:
    """Prepare a quantizer for the pieces of matrices with these inputs, in any blocks.

    Of ``KBlocks`` it says which statistics are used: none, the importance of channels, or error feedback as well.
    """
    made: dict[bool, PieceQuantizer] = {}

    def quantize(rows: Array, form: AnyBlocks) -> Quantized:
        own = isinstance(form, KBlocks)
        if own not in made:
            made[own] = _for_k_blocks(quantizer, inputs) if own else quantizer.prepare(inputs)
        return made[own](rows, form)

    return quantize


def _for_k_blocks(quantizer: Quantizer, inputs: Array | None) -> PieceQuantizer:
    if inputs is None or not quantizer.calibrated or not inputs.any():
        return quantize_k
    squares = np.diag(inputs)
    importance = squares + squares.mean() * np.float32(1e-3)  # see ``activation_aware``
    return partial(quantize_k, importance=importance, feedback=feedback_factor(inputs) if quantizer.corrects else None)


def restored(made: Quantized, form: AnyBlocks, k: int) -> Array:  # [n, k]
    """Return the weights that a quantizer's levels stand for."""
    return made[1] if isinstance(form, KBlocks) else dequantize_block(*made, k, form.bits)


def activation_aware(inputs: Array | None) -> PieceQuantizer:
    """Weight squared errors by the mean square of the input channel (Lin et al., arXiv 2306.00978).

    The paper's channel scaling is left out: it would have to be folded into the operation before a matrix, and so
    change other tensors of the model.  What remains is its observation that few channels matter most.
    """
    if inputs is None or not inputs.any():
        return quantize_searched
    squares = np.diag(inputs)  # [k]
    # a channel that the calibration text never used still counts a little
    return partial(quantize_searched, importance=squares + squares.mean() * np.float32(1e-3))


def least_output_error(inputs: Array | None) -> PieceQuantizer:
    """Minimise the squared error of a matrix's outputs on its calibration inputs (GPTQ).

    Columns come in their stored order: blocks are contiguous, so the paper's order by activation would need a
    permutation of the inputs.  The scale of a block is searched when the block is reached, on the corrected weights.
    """
    if inputs is None or not inputs.any():
        return quantize_searched
    return partial(quantize_corrected, feedback=feedback_factor(inputs), importance=np.diag(inputs))


_OWN = {
    quantizer.name: quantizer
    for quantizer in (
        Quantizer("rtn", lambda inputs: quantize_block),  # the scale follows the largest weight: fastest, and the worst
        Quantizer("mse", lambda inputs: quantize_searched),  # scales of least squared error
        Quantizer("awq", activation_aware, calibrated=True),
        Quantizer("gptq", least_output_error, calibrated=True, corrects=True),
    )
}

QUANTIZERS: Table[Quantizer] = Table(extensions.QUANTIZERS, _OWN, lambda made: isinstance(made, Quantizer))
"""The quantizers by name: those above, then those of plug-ins (group ``edgespec.quantizers``)."""
