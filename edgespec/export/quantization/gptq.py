"""Quantize with error feedback: GPTQ, and the corrections of GPTAQ.

* GPTQ (Frantar et al., arXiv 2210.17323): quantizes column by column, and later columns compensate for the error of
  each.  It is computed as LDLQ (Chee et al., arXiv 2307.13304, who show that both are the same): a column is
  quantized together with a linear function of the errors before it, which needs no inverse.
* ``correction``: weights are moved so that a matrix compensates for the errors of the quantized matrices before it, the
  asymmetric calibration of GPTAQ (Li et al., arXiv 2504.02692), by ridge regression: the outputs to match are those of
  the unquantized model, whose inputs f differ from the inputs x that the matrix gets.  A matrix that writes into the
  residual stream also compensates for the loss of that stream.

The upper four of 8 bits are a model too (planes.py), with separate error feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from edgespec.export.quantization.factors import solved, upper_root
from edgespec.export.quantization.levels import HALF_MAX, Array, Blocks, Quantized, half, reciprocal
from edgespec.export.quantization.mse import CHUNK, search_scales
from edgespec.export.quantization.planes import CORRECTED_SCALE_WEIGHT, drafted, levels_for_both
from edgespec.runtimes.ort.session import default_threads

LAZY = 128  # whole blocks of columns that errors before them reach together
DAMPING = 0.01  # of the mean of the diagonal
RIDGE = 0.05  # of the mean of the diagonal: what holds the correction back on few tokens
TOGETHER = 1024  # rows of a thread, at most


def feedback_factor(products: Array, damping: float = DAMPING) -> Array:  # [k, k] -> [k, k]
    """Compute how columns compensate for the errors of those before them.

    The damped products are F @ D @ F.T with D diagonal and ones on the diagonal of F: an error of 1 in column i adds
    F[i, j] to the goal of column j.  Entries below the diagonal are undefined.
    """
    root = upper_root(products, damping)
    root /= np.diag(root).copy()
    return root


def quantize_corrected(
    weight: Array,  # [n, k]
    form: Blocks,
    feedback: Array,  # [k, k], of ``feedback_factor``
    importance: Array | None = None,  # [k]: of the channels, for the search of the scales
) -> Quantized:
    """Quantize rows with error feedback."""
    threads = default_threads()
    count = threads * -(-len(weight) // (threads * TOGETHER))
    parts = [part for part in np.array_split(weight, count) if len(part)]
    # threads of BLAS would wait for each other: five times as long, with two of our threads
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:  # numpy computes without the lock
        made = list(pool.map(lambda rows: _corrected(rows, form, feedback, importance), parts))
    return np.concatenate([levels for levels, _ in made]), np.concatenate([scales for _, scales in made])


def _corrected(weight: Array, form: Blocks, feedback: Array, importance: Array | None) -> Quantized:
    (n, k), bits, size = weight.shape, form.bits, form.size
    zero, blocks = 1 << (bits - 1), form.count(weight.shape[1])
    reach = HALF_MAX * np.float32(zero)  # larger weights than the largest scale allows would make the rest infinite
    exact = np.clip(np.ascontiguousarray(weight.T), -reach, reach)  # [k, n]
    # of 8 bits once for them and once for their upper four, [1 or 2, k, n]
    errors = np.empty((2 if bits == 8 else 1, k, n), np.float32)
    levels = np.full((blocks * size, n), zero, np.uint8)
    scales = np.empty((blocks, n), np.float32)
    for start in range(0, k, LAZY):
        end = min(start + LAZY, k)
        group = exact[start:end] + feedback[:start, start:end].T @ errors[:, :start]
        for first in range(start, end, size):
            last = min(first + size, end)
            wanted = group[:, first - start : last - start]
            wanted += feedback[start:first, first:last].T @ errors[:, start:first]
            scale = _scales(wanted[0], bits, None if importance is None else importance[first:last])
            scales[first // size] = scale
            own = np.ascontiguousarray(feedback[first:last, first:last].T)
            levels[first:last] = _block(exact[first:last], wanted, scale, own, errors[:, first:last])
    return np.ascontiguousarray(levels.T).reshape(n, blocks, size), np.ascontiguousarray(scales.T)


def _block(exact: Array, wanted: Array, scale: Array, feedback: Array, errors: Array) -> Array:
    """Quantize a block of columns one after the other.

    Args:
        exact: [size, n], the weights.
        wanted: [1 or 2, size, n], with the feedback of the blocks before; of 8 bits also for their upper four.
        scale: [n].
        feedback: [size, size], of the columns before each row's.
        errors: [1 or 2, size, n], to be filled.

    Returns levels [size, n], zero point added.
    """
    bits = 8 if len(wanted) == 2 else 4
    zero, inverse, levels = np.float32(1 << (bits - 1)), reciprocal(scale), np.empty_like(exact)
    for j, (weights, level) in enumerate(zip(exact, levels, strict=True)):
        for precision in range(len(wanted) if j else 0):
            wanted[precision, j] += feedback[j, :j] @ errors[precision, :j]
        if bits == 8:
            level[:] = levels_for_both(*(wanted[:, j] * inverse))
            errors[1, j] = weights - drafted(level) * scale
        else:
            np.multiply(wanted[0, j], inverse, out=level)
            np.rint(level, out=level)
            np.clip(level, -zero, zero - 1, out=level)
        np.multiply(level, scale, out=errors[0, j])
        np.subtract(weights, errors[0, j], out=errors[0, j])
    return levels + zero


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


def correction(products: Array, drift: Array | None, lacking: Array | None) -> Callable[[Array, slice], Array]:
    """Return a function from rows [rows, k] of a matrix, and their numbers, to the rows to quantize instead.

    They are W' = W + (W @ drift + lacking) @ inverse of the damped products, for one matrix [n, k].

    Args:
        products: [k, k], mean of x.T @ x.
        drift: [k, k], mean of (f - x).T @ x; None = none.
        lacking: [n, k], mean of e.T @ x, e [tokens, n] being what outputs, or the residual stream that they are added
            to, lack besides; None = nothing.
    """
    drift, lacking = (each if each is not None and each.any() else None for each in (drift, lacking))
    if not products.diagonal().any() or drift is lacking is None:
        return lambda weight, rows: weight  # nothing to make up for
    root = upper_root(products, RIDGE)
    share = None if drift is None else solved(drift, root)

    def target(weight: Array, rows: slice) -> Array:
        moved = weight if share is None else weight + weight @ share
        return moved if lacking is None else moved + solved(lacking[rows], root)

    return target
