"""Quantizing with error feedback: GPTQ, and the corrections of GPTAQ.

* GPTQ (Frantar et al., arXiv 2210.17323): column by column, the error of each is made up for by those that follow.
* ``Correction``: weights are moved so that a matrix makes up for the errors of the quantized matrices before it, the
  asymmetric calibration of GPTAQ (Li et al., arXiv 2504.02692), by ridge regression: the outputs to match are those of
  the unquantized model, whose inputs f differ from the inputs x that the matrix gets.  A matrix that writes into the
  residual stream also makes up for what that stream has lost.
"""

from __future__ import annotations

import numpy as np

from edgespec.export.quantization.levels import HALF_MAX, Array, Blocks, Quantized, half, reciprocal
from edgespec.export.quantization.mse import CHUNK, search_scales

LAZY = 128  # whole blocks of columns whose corrections reach the rest of the matrix together
DAMPING = 0.01  # of the mean of the diagonal
RIDGE = 0.05  # of the mean of the diagonal: what holds the correction back on few tokens


def feedback_factor(products: Array, damping: float = DAMPING) -> Array:  # [k, k] -> [k, k], upper triangular
    """U with U.T @ U = inverse of the damped products, divided by its diagonal row by row.

    Row j says how the columns after j make up for an error of 1 in column j.
    """
    k = len(products)
    damped = products.astype(np.float32)
    diagonal = damped.ravel()[:: k + 1]
    diagonal += np.float32(damping) * diagonal.mean()
    while True:
        try:
            # H = R @ R.T with R upper, by the Cholesky factor of H in reverse order; then U = inverse of R
            lower = np.linalg.cholesky(damped[::-1, ::-1])
            break
        except np.linalg.LinAlgError:  # float32 found it singular
            diagonal += np.float32(10 * DAMPING) * diagonal.mean()
    factor = np.linalg.inv(np.ascontiguousarray(lower[::-1, ::-1]))
    return np.triu(factor / np.diag(factor)[:, None]).astype(np.float32)


def quantize_corrected(
    weight: Array,  # [n, k]
    form: Blocks,
    feedback: Array,  # [k, k], of ``feedback_factor``
    importance: Array | None = None,  # [k]: of the channels, for the search of the scales
) -> Quantized:
    """Quantize rows with error feedback."""
    (n, k), bits, size = weight.shape, form.bits, form.size
    zero = 1 << (bits - 1)
    low, high = np.float32(-zero), np.float32(zero - 1)
    blocks = form.count(k)
    reach = HALF_MAX * np.float32(zero)  # what lies beyond the largest scale would make the rest infinite
    rest = np.clip(weight.T, -reach, reach, order="C")  # [k, n]: corrected as columns are done
    levels = np.full((blocks * size, n), zero, np.uint8)
    scales = np.empty((blocks, n), np.float32)
    errors = np.empty((LAZY, n), np.float32)
    for start in range(0, k, LAZY):
        end = min(start + LAZY, k)
        for first in range(start, end, size):
            last = min(first + size, k)
            scale = _scales(rest[first:last], bits, None if importance is None else importance[first:last])
            inverse = reciprocal(scale)
            scales[first // size] = scale
            for j in range(first, last):
                level = np.clip(np.rint(rest[j] * inverse), low, high)
                error = rest[j] - level * scale
                levels[j] = level + zero
                errors[j - start] = error
                if j + 1 < last:
                    rest[j + 1 : last] -= feedback[j, j + 1 : last, None] * error
            if last < end:
                rest[last:end] -= feedback[first:last, last:end].T @ errors[first - start : last - start]
        if end < k:
            rest[end:] -= feedback[start:end, end:].T @ errors[: end - start]
    return np.ascontiguousarray(levels.T).reshape(n, blocks, size), np.ascontiguousarray(scales.T)


def _scales(columns: Array, bits: int, importance: Array | None) -> Array:  # [up to a block, n] -> [n]
    found = np.empty(columns.shape[1], np.float32)
    at = np.abs(columns).argmax(0)
    largest = np.take_along_axis(columns, at[None], 0)[0]
    first = half(largest / np.float32(-(1 << (bits - 1))))
    weights = None if importance is None else np.ascontiguousarray(importance[:, None])
    for start in range(0, len(found), CHUNK):
        part = slice(start, start + CHUNK)
        found[part] = search_scales(np.ascontiguousarray(columns[:, part]), first[part], bits, weights)
    return found


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
        """Compute what to quantize instead of these rows."""
        moved = weight if self._share is None else weight + weight @ self._share
        return moved if self._added is None else moved + self._added[rows]
