"""From the rows of a text to its vector: pooling, the steps after it, and the length.

All sums are over one text's rows, in float64 and in their order, so no other text changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.embedding import Pooling, StepWeights, VectorActivation

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
Doubles = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def check_pooling(pooling: str) -> None:
    """Raise ``InvalidRequest`` for an unknown pooling."""
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling {pooling!r}: expected {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}")


class Pool:
    """Pools the rows of one text, which come in order.

    Args:
        pooling: ``cls``: the first row; ``weighted``: the mean, row i counting i + 1 times (arXiv 2202.08904).
        skip: rows at the beginning that do not count, those of a prompt; not for ``cls`` and ``last``.
        width: of a row.
    """

    def __init__(self, pooling: Pooling, width: int, skip: int = 0) -> None:
        self._pooling, self._skip, self._count, self._weight = pooling, skip, 0, 0
        self._total = np.zeros(width)

    def add(self, rows: Doubles) -> None:  # [n, width]
        """Take the next rows; any cut of a text into pieces gives the same bits."""
        first, self._count = self._count, self._count + len(rows)
        if self._pooling == "last":
            self._total = rows[-1]
        elif self._pooling == "cls":
            self._total = self._total if first else rows[0]
        elif len(counted := rows[max(0, self._skip - first) :]):
            weights = np.arange(self._count - len(counted), self._count) + 1 if self._pooling == "weighted" else None
            seen, self._weight = self._weight, self._weight + int(len(counted) if weights is None else weights.sum())
            if self._pooling == "max":
                self._total = np.maximum.reduce(np.vstack([self._total, counted] if seen else [counted]))
            else:  # along rows, a reduction adds one after the other
                counted = counted if weights is None else counted * weights[:, None]
                self._total = np.add.reduce(np.vstack([self._total, counted]), axis=0)

    @property
    def vector(self) -> Doubles:  # [width]
        """Return what was pooled."""
        return self._total / self._weight if self._weight and self._pooling != "max" else self._total


def finish(pooled: Doubles, steps: Sequence[StepWeights]) -> Doubles:  # [width] -> [outputs]
    """Run the steps after pooling."""
    x = pooled
    for step, weight, bias in steps:
        if step.kind == "norm":
            x = x - x.mean()
            x = x / np.sqrt(np.square(x).mean() + step.eps) * weight
        else:
            x = weight.astype(np.float64) @ x
        x = x if bias is None else x + bias
        x = activate(x, step.activation)
    return x


def activate(x: Doubles, activation: VectorActivation) -> Doubles:
    """Compute an activation of a step."""
    if activation == "tanh":
        return np.tanh(x)
    if activation == "relu":
        return np.maximum(x, 0)
    if activation == "gelu":
        found: Doubles = 0.5 * x * (1 + _erf(x / math.sqrt(2)))
        return found
    if activation == "gelu_tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    if activation in ("silu", "sigmoid"):
        half = 0.5 * (1 + np.tanh(x / 2))  # the sigmoid, without overflow
        return np.asarray(x * half if activation == "silu" else half)
    return x


def shortened(vector: Doubles, dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """Cut a vector to its first numbers (arXiv 2205.13147), and give it the length one."""
    cut = vector[:dimensions]
    return np.asarray(cut / (np.sqrt(np.square(cut).sum()) or 1) if normalize else cut, np.float32)
