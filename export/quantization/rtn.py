"""Round to nearest: the scale follows the largest weight of a block."""

from __future__ import annotations

from edgespec.export.quantization.base import Array, PieceQuantizer
from edgespec.export.quantization.levels import quantize_block


class RoundToNearest:
    """The fastest, and the worst."""

    name = "rtn"
    calibrated = False
    corrects = False

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        """See Quantizer."""
        return quantize_block
