"""Rotary position tables.

Sources: RoFormer (arXiv 2104.09864); linear and dynamic (NTK) scaling as transformers defines them; YaRN (arXiv
2309.00071); LongRoPE (arXiv 2402.13753); the llama3 scaling is that of the Llama 3.1 release, whose constants every
configuration carries.  Proportional rotation (Gemma 4, LFM3): a head's first channels turn, in steps as if all did.
Axial rotation (arXiv 2409.12191): half of a head turns by the line of a patch, half by its column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.settings import Settings
from edgespec.runtimes.files.manifest import ModelFacts

Doubles = NDArray[np.float64]
Parameters = Mapping[str, Any]

NEEDED: dict[str, list[str]] = {
    "default": [],
    "linear": ["factor"],
    "dynamic": ["factor", "max_position_embeddings"],
    "yarn": ["original_max_position_embeddings"],
    "longrope": ["original_max_position_embeddings"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}
"""Numbers that each type needs in addition to ``rope_theta``."""
OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class Rotary:
    """One rotation of queries and keys."""

    parameters: Parameters  # see ``rope_parameters``
    dims: int  # channels of a head that are turned, from the first on
    # index of the position, of a row's three, that rotates each pair of channels (M-RoPE, arXiv 2409.12191): in the
    # sequence, or in the lines and columns of an image; empty = rows have one position
    axes: tuple[int, ...] = ()

    def tables(self, positions: int, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines of the first positions, [positions, dims / 2] each, of a model used up to ``context``."""
        if self.parameters["rope_type"] == "grid":
            return _grid(self.parameters, self.dims, positions)
        if self.parameters["rope_type"] == "cyclic":  # pair i turns i times in ``period`` positions
            turns = np.arange(positions)[:, None] * np.arange(self.dims // 2) % self.parameters["period"]
            angles = 2 * np.pi / self.parameters["period"] * turns
            return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        # float32 angles, as transformers computes them: parity at long positions depends on the same rounding
        steps, times = inverse_frequencies(self.parameters, self.dims, context)
        angles = np.arange(positions, dtype=np.float32)[:, None] * steps.astype(np.float32)
        return np.cos(angles) * np.float32(times), np.sin(angles) * np.float32(times)

    def growth(self, positions: int) -> NDArray[np.float32] | None:
        """Return what queries of the first positions are multiplied by, [positions]; None where all are as they are.

        1 + beta log(1 + floor(position / trained)), of Llama 4 and Ministral 3.
        """
        beta, trained = map(self.parameters.get, ("llama_4_scaling_beta", "original_max_position_embeddings"))
        if not beta or not trained or positions <= trained:
            return None
        return (1 + beta * np.log1p(np.arange(positions) // trained)).astype(np.float32)


def check_heads(file: Path, facts: ModelFacts, rotaries: Mapping[str, Rotary]) -> None:
    """Refuse heads that do not divide, or that no operator takes."""
    turned = max((rotary.dims for rotary in rotaries.values()), default=0)
    if facts.heads % facts.kv_heads or facts.head_dim % 2 or turned % 2:
        raise ExportError(
            f"{file}: {facts.heads} heads of {facts.head_dim} ({turned} turned) on {facts.kv_heads} key heads: "
            "expected a whole number of heads for each key head, and even sizes"
        )
    if facts.head_dim % 8:
        raise UnsupportedModel(
            f"{file}: heads of {facts.head_dim}: expected a multiple of 8", "ONNX Runtime's attention takes no other"
        )


def axes_of(parameters: Parameters, dims: int) -> tuple[int, ...]:
    """Choose which of three positions rotates each pair of channels, for images with lines and columns (M-RoPE).

    ``mrope_section`` counts the pairs of each position.  With ``mrope_interleaved`` lines rotate every third pair, and
    columns the pair after it, until their counts are reached.  Otherwise the pairs of each position are contiguous
    (arXiv 2409.12191).
    """
    found, half = parameters.get("mrope_section"), dims // 2
    sizes = [size for size in found if type(size) is int and size > 0] if isinstance(found, list) else []
    if len(sizes) != 3 or sum(sizes) != half:
        raise UnsupportedModel(f"config.json: mrope_section {found!r}: expected three numbers that add up to {half}")
    if not parameters.get("mrope_interleaved"):
        return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
    axes = [0] * half
    for axis in (1, 2):
        axes[axis : 3 * sizes[axis] : 3] = [axis] * len(range(axis, min(3 * sizes[axis], half), 3))
    return tuple(axes)


def rope_facts(rotaries: Mapping[str, Rotary]) -> dict[str, Any]:
    """Give what a manifest says of a model's rotations: the main one's parameters, and how many channels each turns."""
    if (main := rotaries.get("rope")) is None:
        return {}
    others = [rotary.dims for name, rotary in rotaries.items() if name != "rope"]
    found = {key: value for key, value in main.parameters.items() if value is not None} | {"dims": main.dims}
    return found | ({"other_dims": others} if others else {})


def rope_parameters(config: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Return the rotary settings of a config.json: ``rope_parameters``, or of old ``rope_theta`` and ``rope_scaling``.

    Args:
        theta: the base where none is given.

    Returns a dict with ``rope_theta`` and ``rope_type``, and what that type needs.

    Raises:
        UnsupportedModel: a type that is not supported.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise UnsupportedModel("config.json: expected rope_parameters and rope_scaling to be objects")
    if by_kind := [key for key, value in new.items() if isinstance(value, dict)]:
        raise UnsupportedModel(
            f"config.json: rope_parameters holds {by_kind[0]!r}, an object: expected one rotation for all layers",
            "only the positions stand in the way; open an issue with the config.json",
        )
    merged = {"rope_theta": config.get("rope_theta", theta), **(old or new)}  # as transformers: the old name wins
    if old and new.get("rope_theta", merged["rope_theta"]) != merged["rope_theta"]:
        raise UnsupportedModel(
            f"config.json: rope_scaling means a rope_theta of {merged['rope_theta']!r}, and rope_parameters says "
            f"{new['rope_theta']!r}",
            "delete one of them, or say rope_theta in rope_scaling",
        )
    kind = merged.pop("type", None) or merged.get("rope_type") or "default"
    if kind == "mrope" and merged.get("mrope_section"):
        kind = "default"  # three positions (``axes_of``), which are equal for plain text
    merged["rope_type"] = OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    merged["max_position_embeddings"] = config.get("max_position_embeddings")
    if trained := config.get("original_max_position_embeddings"):  # phi3 says it outside
        merged["original_max_position_embeddings"] = trained
    elif merged["rope_type"] in ("yarn", "longrope"):
        merged.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return checked(merged)


def checked(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters, if their type is known and has what it needs."""
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in NEEDED:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported: {', '.join(NEEDED)}",
            "only the positional scaling stands in the way; open an issue with the config.json",
        )
    grows = ["original_max_position_embeddings"] if parameters.get("llama_4_scaling_beta") else []
    for key in ["rope_theta", *NEEDED[kind], *grows]:
        value = parameters.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UnsupportedModel(f"config.json: rope type {kind} needs a number {key}, got {value!r}")
    for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "partial_rotary_factor",
                "llama_4_scaling_beta", "alpha"):  # fmt: skip
        value = parameters.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise UnsupportedModel(f"config.json: expected a number {key}, got {value!r}")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            factors = parameters.get(key)
            if not isinstance(factors, list) or not all(
                isinstance(value, int | float) and math.isfinite(value) for value in factors
            ):
                raise UnsupportedModel(f"config.json: rope type {kind} needs a list {key} of numbers")
    return parameters


def rotations_by_kind(settings: Settings, usual: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ``rope_parameters`` for each kind of layers in ``usual``, the default.

    Full layers may say ``proportional``; what ``proportional`` makes of them is.
    """
    given = settings.get("rope_parameters", usual)
    if not isinstance(given, dict) or not all(isinstance(given.get(kind), dict) for kind in usual):
        raise ExportError(f"{settings.file}: expected rope_parameters of {' and '.join(usual)}")
    full = dict(given["full_attention"])
    if full.get("rope_type") not in ("default", "proportional", None):
        raise UnsupportedModel(f"{settings.file}: rope type {full['rope_type']!r} is not supported here")
    return {**given, "full_attention": {**full, "rope_type": "default"}}


def proportional(full: Rotary, size: int) -> Rotary:
    """Make the proportional rotation of full layers, whose heads have ``size`` channels."""
    share = full.parameters.get("partial_rotary_factor") or 1.0
    return Rotary({**full.parameters, "rope_type": "proportional", "channels": size}, 2 * int(share * size // 2))


def inverse_frequencies(parameters: Parameters, dims: int, context: int) -> tuple[Doubles, float]:
    """Angular step of each rotary pair in radians per position, [dims // 2], and what cosines and sines are times.

    Args:
        parameters: see ``rope_parameters``.
        dims: channels that are turned.
        context: the maximum number of positions: dynamic and longrope scaling are chosen by it, once.
    """
    theta, kind = float(parameters["rope_theta"]), parameters["rope_type"]
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    inverse = theta**-exponents
    if kind == "linear":
        return inverse / float(parameters["factor"]), 1.0
    if kind == "axial":  # the same steps for lines and for columns
        return np.tile(theta ** -(np.arange(0, dims // 2, 2, dtype=np.float64) / (dims // 2)), 2), 1.0
    if kind == "proportional":  # steps as if all channels were turned, of which only the first are
        steps = theta ** -(np.arange(0, dims, 2) / float(parameters["channels"]))
        return steps / float(parameters.get("factor") or 1), 1.0
    if kind == "dynamic":
        factor, longest = float(parameters["factor"]), int(parameters["max_position_embeddings"])
        stretch = factor * max(context, longest) / longest - (factor - 1)
        return (theta * stretch ** (dims / (dims - 2))) ** -exponents, 1.0
    if kind == "yarn":
        return _yarn(parameters, inverse, dims)
    if kind == "longrope":
        return _longrope(parameters, inverse, dims, context)
    if kind == "llama3":
        return _llama3(parameters, inverse), 1.0
    return inverse, 1.0


def _grid(
    parameters: Parameters, dims: int, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # [positions, dims // 2] each
    """Rotate half of a head's channels by line, half by column of a square; rows before it have no keys.

    As LlamaGen does (https://github.com/FoundationVision/LlamaGen, arXiv 2406.06525): tables are zeros there.
    """
    side, before = int(parameters["side"]), int(parameters["before"])
    steps = (float(parameters["rope_theta"]) ** (np.arange(0, dims // 2, 2, dtype=np.float32) / (dims // 2))) ** -1
    turns = np.arange(side, dtype=np.float32)[:, None] * steps.astype(np.float32)  # [side, dims // 4]
    angles = np.concatenate([np.repeat(turns, side, 0), np.tile(turns, (side, 1))], 1)
    found = np.zeros((2, max(positions, before + side * side), dims // 2), np.float32)
    found[:, before : before + side * side] = np.cos(angles), np.sin(angles)
    return found[0, :positions], found[1, :positions]


def _llama3(parameters: Parameters, inverse: Doubles) -> Doubles:
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    trained = float(parameters["original_max_position_embeddings"])
    # long waves are stretched by `factor`, short ones kept, those between blended linearly in 1 / wavelength
    wavelength = 2 * math.pi / inverse
    blend = np.clip((trained / wavelength - low) / (high - low), 0, 1)
    return (1 - blend) * inverse / factor + blend * inverse


def _stretch(parameters: Parameters, trained: float) -> float:
    """By how much the context was stretched, where the configuration does not say it."""
    factor, longest = parameters.get("factor"), parameters.get("max_position_embeddings")
    return float(factor) if factor is not None else float(longest or trained) / trained


def _yarn(parameters: Parameters, inverse: Doubles, dims: int) -> tuple[Doubles, float]:
    trained = float(parameters["original_max_position_embeddings"])
    factor, theta = _stretch(parameters, trained), float(parameters["rope_theta"])

    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    times = parameters.get("attention_factor")
    if times is None:
        some, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
        times = magnitude(some) / magnitude(every) if some and every else magnitude()

    def pair_that_turns(often: float) -> float:  # as many times over the trained context
        return dims * math.log(trained / (often * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(float(parameters.get("beta_fast") or 32))
    high = pair_that_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    # fast pairs are kept, slow ones stretched, those between blended
    slow = np.clip((np.arange(dims // 2) - low) / (high - low if high != low else 1e-3), 0, 1)
    return inverse * (1 - slow) + inverse / factor * slow, float(times)


def _longrope(parameters: Parameters, inverse: Doubles, dims: int, context: int) -> tuple[Doubles, float]:
    trained = float(parameters["original_max_position_embeddings"])
    factor, times = _stretch(parameters, trained), parameters.get("attention_factor")
    if times is None:
        times = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    name = "long_factor" if context > trained else "short_factor"
    factors = np.asarray(parameters[name], np.float64)
    if factors.shape != (dims // 2,):
        raise UnsupportedModel(f"config.json: expected {dims // 2} numbers in {name}, got {len(factors)}")
    return inverse / factors, float(times)
