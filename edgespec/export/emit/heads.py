"""Groups of heads in a stock graph: between the last norm and the logits, each in its own ``If``."""

from __future__ import annotations

from functools import partial

import numpy as np

from edgespec.export.architectures.rules import Linear
from edgespec.export.drafters.heads import cut_head, group_matrices
from edgespec.export.emit.pieces import GraphPieces
from edgespec.runtimes.files.manifest import HeadGroup


def head_logits(ops: GraphPieces, h: str, head: Linear) -> str:
    """Build the logits of the LM head or of the group that is switched on.

    ::

        h -> [ If gate_heads[0]: group 0 | Identity ] -> ... -> [ If gate_lm: LM head | cut LM head ]
                                                            -> [ If gate_heads[own]: own LM heads | Identity ]

    A matrix is used in one branch only: ONNX Runtime would pack it twice.

    Args:
        h: [1, R, hidden], after the last norm.

    Returns [1, Y, V]: R rows, or count * R of a group, those of its first head first.
    """
    plan, hidden = ops.plan, ops.arch.facts.hidden
    y = h
    for at, group in enumerate(plan.groups):
        y = ops.choose(f"gate_heads.{at}", group.name, hidden, partial(_group, ops, h, group), partial(ops.same, y))
    lm = partial(ops.lm_head, y, head)
    logits = ops.choose("gate_lm", "lm_head", "V", lm, partial(ops.lm_head, y, cut_head(head))) if plan.cut else lm()
    for at, group in enumerate(plan.groups):
        if group.own:
            own = partial(_own, ops, y, group_matrices(group).heads)
            logits = ops.choose(f"gate_heads.{at}", "own_heads", "V", own, partial(ops.same, logits))
    return logits


def group_rows(ops: GraphPieces, h: str, group: HeadGroup, head: Linear, cut: bool) -> str:
    """Build the logits of only one group: h [1, R, hidden] after the last norm -> [1, count * R, V].

    Args:
        cut: heads that share an LM head share the cut one.
    """
    y = _group(ops, h, group)
    if group.own:
        return _own(ops, y, group_matrices(group).heads)
    return ops.lm_head(y, cut_head(head) if cut else head)


def _group(ops: GraphPieces, h: str, group: HeadGroup) -> str:
    """[1, R, hidden] -> [1, count * R, hidden]."""
    graph, matrices = ops.graph, group_matrices(group)
    if group.kind == "exit":
        return ops.multiply(h, *matrices.first)
    if group.kind == "blockwise":
        assert matrices.second is not None
        outer = ops.multiply(ops.silu(ops.multiply(h, *matrices.first)), matrices.second)
        sizes = graph.constant(f"rows_of_{group.count}", np.full(group.count, ops.arch.facts.hidden, np.int64))
        inner = tuple(graph.unique("part") for _ in range(group.count))
        graph.node("Split", [outer, sizes], inner, axis=-1)
    else:
        inner = tuple(ops.silu(part) for part in ops.linear(h, matrices.first, joined=True))
    rows = [graph.node("Add", [h, part]) for part in inner]
    return graph.node("Concat", rows, axis=1) if len(rows) > 1 else rows[0]


def _own(ops: GraphPieces, y: str, heads: tuple[Linear, ...]) -> str:
    """[1, count * R, hidden] -> [1, count * R, vocab], each head's rows by its own matrix."""
    graph = ops.graph
    rows = tuple(graph.unique("rows") for _ in heads)
    graph.node("Split", [y], rows, axis=1, num_outputs=len(heads))
    logits = [ops.multiply(x, head) for x, head in zip(rows, heads, strict=True)]
    return graph.node("Concat", logits, axis=1) if len(heads) > 1 else logits[0]
