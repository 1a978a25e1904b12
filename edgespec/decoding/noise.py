"""Counter-based randomness.

Sampling here has no generator state.  Every random number is a hash of (seed, position, stream, token).  A position
therefore gets the same token whether it was reached by plain decoding or inside a verified block, so plain decoding and
every method with deterministic guesses emit the same sampled text for the same seed.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64 (Steele et al. 2014)

# Streams: uses of randomness that must be independent of each other at one position.
TARGET, RESIDUAL, ACCEPT, DRAFT = 0, 1, 1 << 20, 1 << 40  # ACCEPT + sibling, DRAFT + length at the start of the draft
# BLOCK + length at the start of the block: a block is judged beyond the tokens that it commits, and the next one must
# not see the same numbers there.
BLOCK = 1 << 30


def _mix(x: int) -> int:
    """splitmix64's finaliser on one 64-bit integer."""
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


class Noise:
    """Randomness without state: a hash of (seed, position, stream, token); without a seed, 64 bits from the system."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self._key = _mix((self.seed + _GOLDEN) & _MASK)

    def _state(self, position: int, stream: int) -> int:
        return _mix((_mix((self._key + position * _GOLDEN) & _MASK) + stream * _MIX1 + 1) & _MASK)

    def uniform(self, position: int, stream: int) -> float:
        """One number in [0, 1)."""
        return float(_mix(self._state(position, stream)) >> 11) * 2.0**-53

    def bits(self, position: int, tokens: NDArray[np.int64], stream: int = TARGET) -> NDArray[np.uint64]:
        """uint64 [k]: 53 random bits for each of ``tokens`` int64 [k]."""
        x = tokens.astype(np.uint64)
        x *= np.uint64(_GOLDEN)
        x += np.uint64(self._state(position, stream))
        shifted = np.empty_like(x)  # in place: fresh pages for temporaries cost more than the arithmetic
        for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
            x ^= np.right_shift(x, np.uint64(shift), out=shifted)
            x *= np.uint64(factor)
        x >>= np.uint64(11)
        return x

    def gumbel(self, position: int, tokens: NDArray[np.int64], stream: int = TARGET) -> NDArray[np.float64]:
        """Draw standard Gumbel noise, float64 [k], one number for each of ``tokens`` int64 [k]."""
        return gumbel_of(self.bits(position, tokens, stream))


def gumbel_of(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """float64 [k]: -log(-log(u)) of the uniform numbers that 53 ``bits`` uint64 [k] are; increasing in them."""
    u = bits.astype(np.float64)
    u += 0.5  # never 0 and never 1: both logarithms stay finite
    u *= 2.0**-53
    return np.asarray(-np.log(-np.log(u)), np.float64)
