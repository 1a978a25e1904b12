"""Activations of MLPs in float32 numpy, by their names in a trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
SWIGLU_LIMIT, SWIGLU_ALPHA = np.float32(7), np.float32(1.702)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp(-x) may overflow to inf, which gives the right 0
        return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    """x times the normal distribution's share below x; erf by Abramowitz and Stegun 7.1.26, good to 1.5e-7."""
    z = np.abs(x.astype(np.float64)) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(x) * (1 - series * np.exp(-z * z))
    return np.asarray(0.5 * x * (1 + erf), np.float32)


def gelu_tanh(x: Array) -> Array:
    """Approximate gelu by tanh (arXiv 1606.08415)."""
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu2(x: Array) -> Array:
    """Square what is positive."""
    return np.square(relu(x))


def swiglu_oai(gate: Array, up: Array) -> Array:
    """Gate of gpt-oss: a clamped silu with a slope of 1.702, times up + 1 (arXiv 2508.10925)."""
    gate, up = np.minimum(gate, SWIGLU_LIMIT), np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return np.asarray(silu(SWIGLU_ALPHA * gate) / SWIGLU_ALPHA * (up + 1), np.float32)


ACTIVATE: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}
