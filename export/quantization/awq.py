"""Activation-aware scales (the objective of Lin et al., arXiv 2306.00978)."""

from __future__ import annotations

from functools import partial

import numpy as np

from edgespec.export.quantization.base import Array, PieceQuantizer
from edgespec.export.quantization.mse import quantize_searched


class ActivationAware:
    """Squared errors count by the mean square of the input channel they are multiplied with.

    The paper's channel scaling is left out: it would have to be folded into the operation before a matrix, and so
    change other tensors of the model.  What remains is its observation that few channels matter most.
    """

    name = "awq"
    calibrated = True
    corrects = False

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        """See Quantizer."""
        if inputs is None or not inputs.any():
            return quantize_searched
        squares = np.diag(inputs)  # [k]
        # a channel that the calibration text never used still counts a little
        return partial(quantize_searched, importance=squares + squares.mean() * np.float32(1e-3))
