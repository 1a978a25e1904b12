"""The small tensors of a decoder, as initializers of either kind of graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.export.architectures.ops import Linear
from edgespec.export.emit.graph import GraphBuilder
from edgespec.export.emit.plan import StoragePlan, stacked_name


def vector(graph: GraphBuilder, plan: StoragePlan, name: str) -> str:
    """Name a vector of the checkpoint: inside the graph file if it is small."""
    return graph.stored(name) if name in plan.entries else graph.constant(name, plan.arch.source.read(name))


def stacked_bias(graph: GraphBuilder, plan: StoragePlan, parts: Sequence[Linear]) -> str | None:
    """Name the biases of matrices stacked along n, one behind the other; None if there are none."""
    if all(part.bias is None for part in parts):
        return None
    if len(parts) == 1:
        return vector(graph, plan, str(parts[0].bias))
    read = plan.arch.source.read
    pieces = [read(part.bias) if part.bias else np.zeros(plan.width(part), np.float32) for part in parts]
    return graph.constant(stacked_name(part.bias for part in parts), np.concatenate(pieces))


def rope_vectors(graph: GraphBuilder, plan: StoragePlan, rotary: str) -> tuple[str, str, str, int]:
    """Cosines and sines of all positions, how queries grow there ("" = they do not), and how many channels turn."""
    growth = graph.stored(f"{rotary}_growth") if f"{rotary}_growth" in plan.entries else ""
    return graph.stored(f"{rotary}_cos"), graph.stored(f"{rotary}_sin"), growth, plan.arch.rotaries[rotary].dims
