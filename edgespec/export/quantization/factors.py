"""Triangular factors of products, and division by them, by halves.

Nearly all of it is products of matrices that way, which LAPACK's factors and inverses are three times slower than.
"""

from __future__ import annotations

import numpy as np

from edgespec.export.quantization.levels import Array

SMALL = 128  # columns: matrices that are factored and inverted at once
AGAIN = 0.1  # of the mean of the diagonal: added where float32 finds products singular


def upper_root(products: Array, damping: float) -> Array:  # [k, k] -> [k, k]
    """Return R, upper triangular, with R @ R.T = products + ``damping`` times the mean of their diagonal.

    Entries below the diagonal are undefined; callers must not read them.
    """
    more = np.float32(damping)
    while True:
        root = products.astype(np.float32)
        diagonal = root.ravel()[:: len(root) + 1]
        diagonal += more * diagonal.mean()
        try:
            _factor(root)
            return root
        except np.linalg.LinAlgError:
            more += np.float32(AGAIN)


def solved(rows: Array, root: Array) -> Array:  # [n, k], [k, k] -> [n, k]
    """Return rows @ inverse of (root @ root.T)."""
    found = rows.copy()
    _divide(found, root, transposed=True)
    _divide(found, root)
    return found


def _factor(matrix: Array) -> None:  # [k, k]
    """Replace a matrix by its root, in place."""
    k = len(matrix)
    if k <= SMALL:
        matrix[:] = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
        return
    first, last = slice(0, k // 2), slice(k // 2, k)
    _factor(matrix[last, last])
    _divide(matrix[first, last], matrix[last, last], transposed=True)
    matrix[first, first] -= matrix[first, last] @ matrix[first, last].T
    _factor(matrix[first, first])


def _divide(rows: Array, root: Array, transposed: bool = False) -> None:  # [n, k], [k, k]
    """Replace ``rows`` by X with X @ root = rows, or X @ root.T = rows, in place."""
    k = len(root)
    if k <= SMALL:
        inverse = np.linalg.inv(root)
        rows[:] = rows @ (inverse.T if transposed else inverse)
        return
    first, last = slice(0, k // 2), slice(k // 2, k)
    corner = root[first, last]
    begin, then, corner = (last, first, corner.T) if transposed else (first, last, corner)
    _divide(rows[:, begin], root[begin, begin], transposed)
    rows[:, then] -= rows[:, begin] @ corner
    _divide(rows[:, then], root[then, then], transposed)
