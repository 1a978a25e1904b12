"""Rows of matrices that hold q, k and v of each group of heads one behind the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
