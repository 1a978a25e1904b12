"""Float16 activations for the graphs of a device, where they are safe.

The graphs are written in float32 and then changed as a whole (``to_half``):

* float16: products with matrices, attention with its keys and values, rotation and activation functions, which use most
  of the time and memory;
* float32: the residual stream, which outgrows float16 in some models, every norm, and the last product with all that
  follows it: float16 has one value for every 0.016 of a logit near 20, so that tokens would tie;
* weights stay the same in the file that all graphs share.  A ``Cast`` connects a float32 scale, bias or table and its
  float16 reader.  ONNX Runtime folds it when it opens the graph, so the device gets float16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from edgespec.export.emit.graph import FLOAT, GraphBuilder

FLOAT16 = onnx.TensorProto.FLOAT16
HIDE_HALF = np.float32(-30000)  # far below every score
BIAS = 10  # input of GroupQueryAttention
PRODUCTS = ("MatMulNBits", "MatMul")
# which inputs of the operators that compute in float16 are numbers of that kind, and which of their outputs
HALF: dict[str, tuple[int, ...]] = {
    "MatMulNBits": (0, 2, 5),  # rows, scales, bias
    "MatMul": (0, 1),
    "GroupQueryAttention": (0, 1, 2, 3, 4, BIAS),  # q, k, v, past keys and values, bias
    "RotaryEmbedding": (0, 1, 2),
    "QuickGelu": (0,),
    "Gelu": (0,),
    "Relu": (0,),
}
# operators that have the precision of their first input
FOLLOW: dict[str, tuple[int, ...]] = {
    "Mul": (0, 1),
    "Split": (0,),
    "Reshape": (0,),
    "Identity": (0,),
    "GatherND": (0,),
    "ScatterND": (0, 2),
}
CACHED = ("past_key_values.", "present.")


def to_half(graph: GraphBuilder) -> None:
    """Convert a graph for a device, which has no branches, to float16 activations, keys and values."""
    for value in (*graph.inputs, *graph.outputs):
        if value.name.startswith(CACHED):
            value.type.tensor_type.elem_type = FLOAT16
    graph.rewrite(lambda nodes: _Halving(graph, nodes).nodes())


class _Halving:
    """The nodes of one graph, changed."""

    def __init__(self, graph: GraphBuilder, nodes: Sequence[onnx.NodeProto]) -> None:
        self.graph, self.before = graph, nodes
        self.half = {value.name for value in graph.inputs if value.type.tensor_type.elem_type == FLOAT16}
        self.full = last_products(nodes) | _mask_products(nodes)
        self.made: list[onnx.NodeProto] = []
        self.casts: dict[tuple[str, int], str] = {}

    def nodes(self) -> list[onnx.NodeProto]:
        for node in self.before:
            self._change(node)
        return self.made

    def _change(self, node: onnx.NodeProto) -> None:
        kind = node.op_type
        follows = kind in FOLLOW and node.input[0] in self.half
        half = follows or (kind in HALF and node.name not in self.full)
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        if half:
            for at in (HALF | FOLLOW)[kind]:
                if at < len(node.input) and (name := node.input[at]):
                    masks = kind == "GroupQueryAttention" and at == BIAS
                    changed.input[at] = self._as(self._limited(name) if masks else name, FLOAT16)
            self.half.update(node.output)
        else:
            for at, name in enumerate(node.input):
                if name in self.half:
                    changed.input[at] = self._as(name, FLOAT)
        self.made.append(changed)

    def _limited(self, name: str) -> str:
        """Limit a mask to numbers that float16 has: minus infinity would make NaN of what is hidden altogether."""
        hide = self.graph.constant("hide_half", HIDE_HALF)

        def limit() -> str:
            output = f"{name}.limited"
            self.made.append(helper.make_node("Max", [name, hide], [output], name=f"limit_{name}"))
            return output

        return self.graph.once(("limited", name), limit)

    def _as(self, name: str, kind: int) -> str:
        if (name in self.half) == (kind == FLOAT16):
            return name
        if (name, kind) not in self.casts:
            output = f"{name}.{'half' if kind == FLOAT16 else 'full'}"
            self.made.append(helper.make_node("Cast", [name], [output], name=f"cast_{output}", to=kind))
            self.casts[name, kind] = output
        return self.casts[name, kind]


def last_products(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Name the products that compute logits: those with no other product after them."""
    makers = {output: node for node in nodes for output in node.output}
    found: set[str] = set()
    todo = ["logits"]
    while todo:
        node = makers.get(todo.pop())
        if node is None:
            continue
        if node.op_type in PRODUCTS:
            found.add(node.name)
        else:
            todo.extend(node.input)
    return found


def _mask_products(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Names of the products that make masks: of values, not with a matrix of weights."""
    makers = {output for node in nodes for output in node.output}
    return {node.name for node in nodes if node.op_type == "MatMul" and node.input[1] in makers}
