"""Strict mode for a graph of optimum: no product of two activations ever has a single row.

ONNX Runtime multiplies one row by other kernels than several where the other factor is computed, too, as in attention's
two products; constant matrices are packed, and there it does not (docs/runtime.md).  So those products get their last
row once more, and lose it again behind them.  The rest of the graph still sees the rows of the pass alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgespec.export.bundle.model_part import MAIN, STRICT
from edgespec.runtimes.files.manifest import Graph, ModelPart

_KEPT = ("Transpose", "Identity", "Cast")  # of a constant: still one
_NUMBERS = {"strict_last": -1, "strict_end": np.iinfo(np.int64).max, "strict_first": 0, "strict_rows": -2}


def double_last_rows(model: onnx.ModelProto) -> int:
    """Give every product of two activations its last row once more, in place; returns how many there are."""
    graph = model.graph
    constant = {tensor.name for tensor in graph.initializer}
    nodes, found = [], 0
    for node in graph.node:
        if node.op_type == "Constant" or (node.op_type in _KEPT and node.input[0] in constant):
            constant.update(node.output)
        if node.op_type != "MatMul" or node.input[1] in constant:
            nodes.append(node)
            continue
        found += 1
        x, y, own = node.input[0], node.output[0], f"strict_{found}"
        product = onnx.NodeProto()
        product.CopyFrom(node)
        product.input[0], product.output[0] = f"{own}_in", f"{own}_out"
        nodes += [
            helper.make_node("Slice", [x, "strict_last", "strict_end", "strict_rows"], [f"{own}_row"]),
            helper.make_node("Concat", [x, f"{own}_row"], [f"{own}_in"], axis=-2),
            product,
            helper.make_node("Slice", [f"{own}_out", "strict_first", "strict_last", "strict_rows"], [y]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    if found:
        graph.initializer.extend(
            numpy_helper.from_array(np.array([number], np.int64), name) for name, number in _NUMBERS.items()
        )
    return found


def choose_strict(folder: Path, part: ModelPart, exact: Callable[[ModelPart], bool]) -> ModelPart:
    """The part with the strict graph whose rows have the same bits in every pass, by trying.

    Where doubled rows are not enough (products inside other operators), every pass of the plain graph gets a dummy row,
    which costs more: its keys and values are cropped each time.  Where that is not enough either, strict mode is the
    plain graph: there are near-ties then.

    Args:
        folder: of the bundle.
        part: as written.
        exact: whether the rows of a part's strict graph are.
    """
    if exact(part):
        return part
    (folder / STRICT).unlink()
    padded, plain = (
        part.model_copy(update={"graphs": {**part.graphs, "strict": Graph(file=MAIN, padded=more)}})
        for more in (True, False)
    )
    return padded if exact(padded) else plain
