"""Rotary position tables.

Sources: RoFormer (arXiv 2104.09864); the llama3 scaling is that of the Llama 3.1 release, whose constants every
configuration carries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedModel

LLAMA3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, new form (``rope_parameters``) or old (``rope_theta``, ``rope_scaling``).

    Returns a dict with ``rope_theta`` and ``rope_type``, and what that type needs.

    Raises:
        UnsupportedModel: a type that is not supported.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise UnsupportedModel("config.json: expected rope_parameters and rope_scaling to be objects")
    merged = {"rope_theta": config.get("rope_theta", 10000.0), **old, **new}
    merged["rope_type"] = merged.pop("type", None) or merged.get("rope_type") or "default"
    if merged["rope_type"] not in ("default", "llama3"):
        raise UnsupportedModel(
            f"rope type {merged['rope_type']!r} is not supported; supported: default, llama3",
            "only the positional scaling stands in the way; open an issue with the config.json",
        )
    needed = ["rope_theta"] + (LLAMA3 if merged["rope_type"] == "llama3" else [])
    for key in needed:
        value = merged.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise UnsupportedModel(f"config.json: rope type {merged['rope_type']} needs a number {key}, got {value!r}")
    return merged


def inverse_frequencies(parameters: dict[str, Any], dims: int) -> NDArray[np.float64]:  # [dims // 2]
    """Angular step of each rotary pair, in radians per position."""
    inverse = 1.0 / float(parameters["rope_theta"]) ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
    if parameters["rope_type"] == "default":
        return inverse
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    trained = float(parameters["original_max_position_embeddings"])
    # long waves are stretched by `factor`, short ones kept, those between blended linearly in 1 / wavelength
    wavelength = 2 * math.pi / inverse
    blend = np.clip((trained / wavelength - low) / (high - low), 0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


def rope_tables(
    parameters: dict[str, Any], dims: int, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # [positions, dims // 2] each
    """Cosines and sines for every position."""
    # float32 angles, as transformers computes them: parity at long positions depends on the same rounding
    step = inverse_frequencies(parameters, dims).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * step
    return np.cos(angles), np.sin(angles)
