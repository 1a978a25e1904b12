"""What a quantizer of block formats is, and where a format takes its levels from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.export.quantization.levels import Blocks
from edgespec.export.source.source import Checkpoint

Array = NDArray[np.float32]
Quantized = tuple[NDArray[np.uint8], Array]  # levels [n, blocks, size], scales [n, blocks], all float16 values
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
        """A function for the pieces of one matrix.

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
        """See LevelSource."""
        quantize, rows = self.quantizer.prepare(None), source.pieces(name)

        def following() -> tuple[Array, Quantized] | None:
            return None if (piece := next(rows, None)) is None else (piece, quantize(piece, form))

        with ThreadPoolExecutor(1) as pool:  # the next piece is read and quantized while this one is written
            ahead = pool.submit(following)
            while (made := ahead.result()) is not None:
                ahead = pool.submit(following)
                yield made
