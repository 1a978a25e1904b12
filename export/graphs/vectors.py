"""The small tensors of a decoder, stored the same way whichever operators read them: norms, biases, angles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Linear
from edgespec.export.graphs.graph import GraphBuilder
from edgespec.export.source.source import Checkpoint
from edgespec.export.storage.layout import HEADROOM, INLINE_BYTES


def vector(graph: GraphBuilder, source: Checkpoint, name: str) -> str:
    """A vector of the checkpoint, as an initializer: inside the graph file if it is small."""
    value = source.read(name)
    if value.nbytes <= INLINE_BYTES:
        return graph.constant(name, value)
    if not graph.weights.has(name):
        graph.weights.put(name, value.shape, np.float32, [value])
    return graph.stored(name)


def stacked_bias(graph: GraphBuilder, source: Checkpoint, parts: Sequence[Linear]) -> str | None:
    """The biases of matrices stacked along n, one behind the other; None if there are none."""
    if all(part.bias is None for part in parts):
        return None
    if len(parts) == 1:
        return vector(graph, source, str(parts[0].bias))
    pieces = [source.read(p.bias) if p.bias else np.zeros(source.shape(p.weight)[0], np.float32) for p in parts]
    return graph.constant("+".join(str(part.bias) for part in parts), np.concatenate(pieces))


def position_rows(graph: GraphBuilder, arch: Architecture, name: str) -> str:
    """Learned positions, [context + HEADROOM, hidden]; zeros beyond what was learnt, where no token ever stands."""
    if not graph.weights.has(name):
        rows = arch.facts.context + HEADROOM
        learnt = arch.source.read(name, slice(0, min(rows, arch.source.shape(name)[0])))
        value = np.concatenate([learnt, np.zeros((rows - len(learnt), learnt.shape[1]), np.float32)])
        graph.weights.put(name, value.shape, np.float32, [value])
    return graph.stored(name)


def rope_vectors(graph: GraphBuilder, arch: Architecture, rotary: str) -> tuple[str, str, str, int]:
    """Cosines and sines of all positions, how queries grow there ("" = they do not), and how many channels turn."""
    turning, rows = arch.rotaries[rotary], arch.facts.context + HEADROOM
    growth = turning.growth(rows)
    names = [f"{rotary}_cos", f"{rotary}_sin", *([] if growth is None else [f"{rotary}_growth"])]
    if not graph.weights.has(names[0]):
        tables = [*turning.tables(rows, arch.facts.context), *([] if growth is None else [growth])]
        for name, table in zip(names, tables, strict=True):
            graph.weights.put(name, table.shape, np.float32, [table])
    cos, sin, *more = map(graph.stored, names)
    return cos, sin, more[0] if more else "", turning.dims
