"""GPTQ: column by column, the error of each made up for by those that follow (Frantar et al., arXiv 2210.17323)."""

from __future__ import annotations

import numpy as np

from edgespec.export.quantization.base import Array, PieceQuantizer, Quantized
from edgespec.export.quantization.levels import HALF_MAX, Blocks, half, reciprocal
from edgespec.export.quantization.mse import CHUNK, quantize_searched, search_scales

LAZY = 128  # whole blocks of columns whose corrections reach the rest of the matrix together
DAMPING = 0.01  # of the mean of the diagonal


class Gptq:
    """Minimises the squared error of a matrix's outputs on its calibration inputs.

    Columns come in their stored order: blocks are contiguous, so the paper's order by activation would need a
    permutation of the inputs.  The scale of a block is searched when the block is reached, on the corrected weights.
    """

    name = "gptq"
    calibrated = True
    corrects = True

    def prepare(self, inputs: Array | None) -> PieceQuantizer:
        """See Quantizer."""
        if inputs is None or not inputs.any():
            return quantize_searched
        feedback, importance = feedback_factor(inputs), np.diag(inputs)

        def quantize(weight: Array, form: Blocks) -> Quantized:
            return quantize_corrected(weight, form, feedback, importance)

        return quantize


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
