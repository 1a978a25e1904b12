"""Quantizing with error feedback: GPTQ, and the corrections of GPTAQ.

* GPTQ (Frantar et al., arXiv 2210.17323): column by column, the error of each is made up for by those that follow.
* ``Correction``: weights are moved so that a matrix makes up for the errors of the quantized matrices before it, the
  asymmetric calibration of GPTAQ (Li et al., arXiv 2504.02692), by ridge regression: the outputs to match are those of
  the unquantized model, whose inputs f differ from the inputs x that the matrix gets.  A matrix that writes into the
  residual stream also makes up for what that stream has lost.

Of 8 bits, the upper four are a model too (planes.py): their errors are fed back apart.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgespec.export.quantization.levels import HALF_MAX, Array, Blocks, Quantized, half, reciprocal
from edgespec.export.quantization.mse import CHUNK, search_scales
from edgespec.export.quantization.planes import CORRECTED_SCALE_WEIGHT, drafted, levels_for_both
from edgespec.runtimes.ort.session import default_threads

LAZY = 128  # whole blocks of columns whose corrections reach the rest of the matrix together
DAMPING = 0.01  # of the mean of the diagonal
RIDGE = 0.05  # of the mean of the diagonal: what holds the correction back on few tokens
SMALL = 256  # columns: matrices that are factored at once
TOGETHER = 1024  # rows of a thread


def feedback_factor(products: Array, damping: float = DAMPING) -> Array:  # [k, k] -> [k, k], upper triangular
    """U with U.T @ U = inverse of the damped products, divided by its diagonal row by row.

    Row j says how the columns after j make up for an error of 1 in column j.
    """
    # H = R @ R.T with R upper, by the Cholesky factor of H in reverse order; then U = inverse of R
    factor = inverse_root(products[::-1, ::-1], damping)[::-1, ::-1]
    return np.ascontiguousarray(factor / np.diag(factor)[:, None])


def inverse_root(products: Array, damping: float) -> Array:  # [k, k] -> [k, k], lower triangular
    """Inverse of the Cholesky factor of the products, ``damping`` times the mean of their diagonal added to it."""
    damped = products.astype(np.float32)
    diagonal = damped.ravel()[:: len(damped) + 1]
    diagonal += np.float32(damping) * diagonal.mean()
    while True:
        try:
            return _inverse_root(damped)
        except np.linalg.LinAlgError:  # float32 found it singular
            diagonal += np.float32(10 * DAMPING) * diagonal.mean()


def _inverse_root(matrix: Array) -> Array:
    """By halves: nearly all of it is products of matrices, which LAPACK's factors and inverses are far slower than."""
    k = len(matrix)
    if k <= SMALL:
        return np.tril(np.linalg.inv(np.linalg.cholesky(matrix)))
    middle = k // 2
    root = np.zeros((k, k), np.float32)
    first = root[:middle, :middle] = _inverse_root(matrix[:middle, :middle])
    below = matrix[middle:, :middle] @ first.T
    last = root[middle:, middle:] = _inverse_root(matrix[middle:, middle:] - below @ below.T)
    root[middle:, :middle] = -(last @ below) @ first
    return root


def quantize_corrected(
    weight: Array,  # [n, k]
    form: Blocks,
    feedback: Array,  # [k, k], of ``feedback_factor``
    importance: Array | None = None,  # [k]: of the channels, for the search of the scales
) -> Quantized:
    """Quantize rows with error feedback."""
    parts = [weight[start : start + TOGETHER] for start in range(0, len(weight), TOGETHER)]
    with ThreadPoolExecutor(default_threads()) as pool:  # numpy computes without the lock
        made = list(pool.map(lambda rows: _corrected(rows, form, feedback, importance), parts))
    return np.concatenate([levels for levels, _ in made]), np.concatenate([scales for _, scales in made])


def _corrected(weight: Array, form: Blocks, feedback: Array, importance: Array | None) -> Quantized:
    (n, k), bits, size = weight.shape, form.bits, form.size
    zero = 1 << (bits - 1)
    low, high = np.float32(-zero), np.float32(zero - 1)
    blocks = form.count(k)
    reach = HALF_MAX * np.float32(zero)  # what lies beyond the largest scale would make the rest infinite
    # what is left of the weights, corrected as columns are done: of 8 bits once for them and once for their upper four
    rest = np.stack([np.clip(weight.T, -reach, reach)] * (2 if bits == 8 else 1))  # [1 or 2, k, n]
    levels = np.full((blocks * size, n), zero, np.uint8)
    scales = np.empty((blocks, n), np.float32)
    errors = np.empty((len(rest), LAZY, n), np.float32)
    for start in range(0, k, LAZY):
        end = min(start + LAZY, k)
        for first in range(start, end, size):
            last = min(first + size, k)
            scale = _scales(rest[0, first:last], bits, None if importance is None else importance[first:last])
            inverse = reciprocal(scale)
            scales[first // size] = scale
            for j in range(first, last):
                wanted = rest[:, j] * inverse
                level = levels_for_both(*wanted) if bits == 8 else np.clip(np.rint(wanted[0]), low, high)
                error = rest[:, j] - np.stack([level, drafted(level)][: len(rest)]) * scale
                levels[j] = level + zero
                errors[:, j - start] = error
                if j + 1 < last:
                    rest[:, j + 1 : last] -= feedback[j, j + 1 : last, None] * error[:, None]
            if last < end:
                rest[:, last:end] -= feedback[first:last, last:end].T @ errors[:, first - start : last - start]
        if end < k:
            rest[:, end:] -= feedback[start:end, end:].T @ errors[:, : end - start]
    return np.ascontiguousarray(levels.T).reshape(n, blocks, size), np.ascontiguousarray(scales.T)


def _scales(columns: Array, bits: int, importance: Array | None) -> Array:  # [up to a block, n] -> [n]
    found = np.empty(columns.shape[1], np.float32)
    at = np.abs(columns).argmax(0)
    largest = np.take_along_axis(columns, at[None], 0)[0]
    first = half(largest / np.float32(-(1 << (bits - 1))))
    weights = None if importance is None else np.ascontiguousarray(importance[:, None])
    for start in range(0, len(found), CHUNK):
        part = slice(start, start + CHUNK)
        own = np.ascontiguousarray(columns[:, part])
        found[part] = search_scales(own, first[part], bits, weights, CORRECTED_SCALE_WEIGHT)
    return found


class Correction:
    """Targets W' = W + (W @ drift + lacking) @ inverse of the damped products, for one matrix [n, k].

    Args:
        products: [k, k], mean of x.T @ x.
        drift: [k, k], mean of (f - x).T @ x; None = none.
        lacking: [n, k], mean of e.T @ x, e [tokens, n] being what outputs, or the residual stream that they are added
            to, lack besides; None = nothing.
    """

    def __init__(self, products: Array, drift: Array | None, lacking: Array | None) -> None:
        drift = drift if drift is not None and drift.any() else None
        self._lacking = lacking if lacking is not None and lacking.any() else None
        self._share: Array | None = None
        if not products.diagonal().any() or drift is self._lacking is None:
            self._lacking = None
            return  # nothing to make up for
        self._root = inverse_root(products, RIDGE)
        if drift is not None:
            self._share = drift @ self._root.T @ self._root

    def target(self, weight: Array, rows: slice) -> Array:  # [rows, k] -> [rows, k]
        """Compute what to quantize instead of these rows."""
        moved = weight if self._share is None else weight + weight @ self._share
        return moved if self._lacking is None else moved + self._lacking[rows] @ self._root.T @ self._root
