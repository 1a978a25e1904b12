"""Orders of rows: matrices that hold several modules, and channels of heads that turn together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.export.source.derived import Extra, original, rows_of
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import ModelFacts

Ids = NDArray[np.int64]


def stacked(whole: Extra, layer: str, modules: Sequence[str], facts: ModelFacts) -> dict[str, Extra]:
    """Split a matrix into the modules that it holds in sequence.

    Args:
        layer: the name of its layer, as of the result.
        modules: such as ``self_attn.q_proj``, in order.
    """
    query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
    found: dict[str, Extra] = {}
    start = 0
    for module in modules:
        size = sizes.get(module.split(".")[-1], facts.intermediate)
        found[f"{layer}.{module}.weight"] = rows_of(whole, np.arange(start, start + size))
        start += size
    return found


def grouped(source: Checkpoint, theirs: str, ours: str, facts: ModelFacts, bias: bool) -> dict[str, Extra]:
    """Cut q, k and v out of a matrix that holds group by group its queries, its key and its value.

    Args:
        theirs: the matrix there, without ``.weight``.
        ours: what the modules' names begin with.
        bias: whether there is one, in the same order.
    """
    each, size = facts.heads // facts.kv_heads, facts.head_dim
    rows = np.arange(facts.kv_heads * (each + 2) * size).reshape(facts.kv_heads, each + 2, size)
    parts = {"q": rows[:, :each].ravel(), "k": rows[:, each].ravel(), "v": rows[:, each + 1].ravel()}
    return {
        f"{ours}.{part}_proj.{kind}": rows_of(original(source, f"{theirs}.{kind}"), ids)
        for part, ids in parts.items()
        for kind in (("weight", "bias") if bias else ("weight",))
    }


def head_rows(heads: int, order: Ids) -> Ids:
    """Repeat an order of a head's channels, [size], for all heads -> [heads * size]."""
    return (np.arange(heads)[:, None] * len(order) + order).ravel()


def paired(size: int, turned: int, pairs: str) -> Ids:
    """Order a head's channels, [size], so that the members of a rotated pair are half the rotated channels away."""
    order = np.arange(size)
    found = order[:turned].reshape(-1, 2).T if pairs == "neighbours" else np.roll(order[:turned], turned // 2)
    order[:turned] = found.flatten()
    return order


def turned_first(size: int, dims: int) -> Ids:
    """Order a head's channels, [size], so that those that turn, ``dims`` of them, come first.

    Channel i turns with i + size / 2, and only the first of them turn.
    """
    each = np.arange(size).reshape(2, size // 2)
    return np.concatenate([each[:, : dims // 2].ravel(), each[:, dims // 2 :].ravel()])


def turned_rows(
    source: Checkpoint,
    layer: str,
    heads: Mapping[str, int],
    order: Ids,
    bias: bool,
    there: str | None = None,
    weight: str = "proj.weight",
) -> dict[str, Extra]:
    """Reorder the channels of a layer's heads, in projections and norms.

    Args:
        heads: how many there are, by ``q`` and ``k``.
        order: from ``turned_first``.
        bias: projections have one.
        there: what the layer is called in the checkpoint; None = the same.
        weight: what follows ``q_`` and ``k_`` there.
    """
    found: dict[str, Extra] = {}
    for part, count in heads.items():
        every = head_rows(count, order)
        rows = {"proj.weight": every, "norm.weight": order} | ({"proj.bias": every} if bias else {})
        for kind, ids in rows.items():
            own = weight if kind == "proj.weight" else kind
            theirs = original(source, f"{there or layer}.self_attn.{part}_{own}")
            found[f"{layer}.self_attn.{part}_{kind}"] = rows_of(theirs, ids)
    return found
