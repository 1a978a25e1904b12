"""Make parts of vectors: rows of logits that any language can compute, and sampling parameters as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.sampling import SamplingParams


def row(seed: int, vocab: int, scale: float = 6.0) -> NDArray[np.float32]:
    """float32 [vocab]: logits that any language can make: a hash of (seed, token) as a fraction, times the scale."""
    tokens = np.arange(vocab, dtype=np.uint64)
    hashed = (tokens * np.uint64(2654435761) + np.uint64(seed * 40503 + 12345)) % np.uint64(1 << 32)
    hashed = (hashed * np.uint64(2246822519) + np.uint64(seed)) % np.uint64(1 << 32)
    return ((hashed.astype(np.float64) / 2**32 * 2 - 1) * scale).astype(np.float32)


def params_of(given: dict[str, Any], seed: int | None = None) -> SamplingParams:
    """Read sampling parameters of a vector; JSON has text for keys."""
    bias = {int(token): value for token, value in given.get("logit_bias", {}).items()}
    return SamplingParams(**{**given, "logit_bias": bias, "seed": seed})
