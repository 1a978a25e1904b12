"""Positions of tokens as sines and cosines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BASE = 10000  # of their wavelengths


def sinusoids(positions: NDArray[np.int64], width: int, far: bool) -> NDArray[np.float32]:  # [n] -> [n, width]
    """Compute sinusoidal positions (arXiv 1706.03762, 3.5): sines, then cosines, of wavelengths from 2 pi to 20000 pi.

    Args:
        far: the longest wavelength is included, as in tensor2tensor.
    """
    half = width // 2
    steps = np.float64(BASE) ** (-np.arange(half) / (half - 1 if far else width / 2))
    angles = positions[:, None] * steps
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
