"""Weights moved so that a matrix makes up for the errors of the quantized matrices before it.

The asymmetric calibration of GPTAQ (Li et al., arXiv 2504.02692), by ridge regression: the outputs to match are those
of the unquantized model, whose inputs f differ from the inputs x that the matrix gets.  A matrix that writes into the
residual stream also makes up for what that stream has lost.
"""

from __future__ import annotations

import numpy as np

from edgespec.export.quantization.base import Array

RIDGE = 0.05  # of the mean of the diagonal: what holds the correction back on few tokens


class Correction:
    """Targets W' = W + W @ C + G of one matrix [n, k].

    Args:
        products: [k, k], mean of x.T @ x.
        drift: [k, k], mean of (f - x).T @ x.
        residual: [n, k], mean of e.T @ x, e [tokens, n] being what the residual stream lacks; None for a matrix that
            does not write into it.
    """

    def __init__(self, products: Array, drift: Array, residual: Array | None) -> None:
        damped = products.copy()
        diagonal = damped.ravel()[:: len(damped) + 1]
        diagonal += np.float32(RIDGE) * diagonal.mean()
        self._share: Array | None = None  # C
        self._added: Array | None = None  # G
        if not diagonal.any() or not (drift.any() or (residual is not None and residual.any())):
            return  # nothing to make up for
        both = drift.T if residual is None else np.concatenate([drift.T, residual.T], 1)  # [k, k (+ n)]
        solved = np.linalg.solve(damped, both).T
        self._share = solved[: len(damped)]
        self._added = None if residual is None else solved[len(damped) :]

    def target(self, weight: Array, rows: slice) -> Array:  # [rows, k] -> [rows, k]
        """What to quantize instead of these rows."""
        moved = weight if self._share is None else weight + weight @ self._share
        return moved if self._added is None else moved + self._added[rows]
