"""Rows of matrices that hold several: q, k and v of each group of heads, or whole ones one behind the other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import LAYERS
from edgespec.export.source.derived import Own, Rows
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import ModelFacts


def grouped_rows(facts: ModelFacts) -> dict[str, NDArray[np.int64]]:
    """Rows of q, k and v in a matrix of kv_heads groups: the group's queries, its key, its value."""
    each, size = facts.heads // facts.kv_heads, facts.head_dim
    rows = np.arange(facts.kv_heads * (each + 2) * size).reshape(facts.kv_heads, each + 2, size)
    return {"q": rows[:, :each].ravel(), "k": rows[:, each].ravel(), "v": rows[:, each + 1].ravel()}


def unfused(source: Checkpoint, theirs: str, ours: str, facts: ModelFacts, bias: bool) -> dict[str, Extra]:
    """q, k and v (``ours``.q_proj and so on) out of one such matrix, ``theirs``, and its bias."""
    return {
        f"{ours}.{part}_proj.{kind}": Rows(Own(source, f"{theirs}.{kind}"), rows)
        for part, rows in grouped_rows(facts).items()
        for kind in (("weight", "bias") if bias else ("weight",))
    }


def stacked(source: Checkpoint, layers: int, fused: Mapping[str, Mapping[str, int]]) -> dict[str, Extra]:
    """Matrices that a checkpoint stores one behind the other: their rows, by name, by the module that holds them."""
    found: dict[str, Extra] = {}
    for layer in range(layers):
        for name, parts in fused.items():
            whole, start = Own(source, f"{LAYERS}.{layer}.{name}.weight"), 0
            for part, size in parts.items():
                found[f"{LAYERS}.{layer}.{part}.weight"] = Rows(whole, np.arange(start, start + size))
                start += size
    return found
