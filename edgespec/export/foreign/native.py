"""The same foreign graph with its linear layers on native operators.

A node of native operators runs a program (edgespec/runtimes/native/steps.inl).  Here it is a short one over the rows
of a value: it quantizes them, multiplies them by every matrix that reads them, and returns the products side by side.
A root-mean-square norm before it, and a gated activation between two such layers, are part of the program.  The rest
of the graph stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.export.emit.graph import EDGESPEC, alive
from edgespec.runtimes.files.formats import BLOCK, Kind
from edgespec.runtimes.files.packing import Packed

KINDS: dict[int, Kind] = {4: "q4", 8: "q8"}  # by bits
_FIXED = ("plan", "rows", "gates", "moves", "kv", "control", "tables")  # inputs of the node before its rows
_NO_CODES = 6  # of keys: the number of that format
_CONSTANTS: dict[str, NDArray[Any]] = {
    "rows": np.zeros(0, np.int64),
    "gates": np.zeros(0, np.bool_),
    "moves": np.zeros((0, 3), np.int64),
    "kv": np.zeros((1, 64), np.uint8),
    "control": np.array([0, 0, 0, _NO_CODES, 0, 0, 0, 0], np.int64),
    "tables": np.zeros(0, np.float32),
    # tokens, positions, slots, tokens seen, no parent, places: nothing of it is read without a cache
    "row": np.array([[0], [0], [0], [0], [-1], [0]], np.int64),
    "six": np.array([6], np.int64),
}


@dataclass(frozen=True)
class Linear:
    """A multiplication by a quantized matrix, as ``MatMulNBits``."""

    node: onnx.NodeProto
    key: str  # of its matrix
    n: int
    k: int
    bits: int
    bias: str | None

    @property
    def packed(self) -> Packed:
        """Return how native operators store the matrix."""
        return Packed(KINDS[self.bits], self.n, self.k, 0, ((self.key, self.n),))


@dataclass(frozen=True)
class _Norm:
    x: str  # what is normed
    weight: str
    eps: float


class NativeGraph:
    """A graph in the making: ``model`` with ``MatMulNBits`` nodes, some of which native ones replace.

    Args:
        model: is changed in place.
        shapes: the same graph before, whose values have shapes.

    Attributes:
        matrices: how those are packed that native nodes multiply by, by their keys.
    """

    def __init__(self, model: onnx.ModelProto, shapes: onnx.GraphProto) -> None:
        self.matrices: dict[str, Packed] = {}
        self._model = model
        self._graph = graph = model.graph
        self._made = {name: node for node in graph.node for name in node.output if name}
        self._read: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self._read[name].append(node)
        self._outputs = {value.name for value in graph.output}
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        values = (*shapes.value_info, *shapes.input, *shapes.output)
        self._dims = {value.name: value.type.tensor_type.shape.dim for value in values}
        ids = self._dims.get("input_ids", ())
        self._batch = {ids[0].dim_param} - {""} if len(ids) == 2 else set()
        self._new: dict[str, list[onnx.NodeProto]] = {}  # nodes that take the place of one, by its output
        self._gone: set[str] = set()  # outputs of nodes that others compute as well
        self._planned: set[str] = set()  # numbers of rows that are described
        self._constants: dict[str, NDArray[Any]] = {}

    def run(self) -> onnx.ModelProto | None:
        """Replace what can be replaced, in place; None = nothing can."""
        groups: dict[str, list[Linear]] = defaultdict(list)
        for node in self._graph.node:
            if (linear := _linear(node)) and self._fits(node):
                groups[node.input[0]].append(linear)
        lone = {x: group[0] for x, group in groups.items() if len(group) == 1}
        after = {id(pair[0].node): lone[x] for x in lone if (pair := self._gated(x, groups))}
        for x, group in groups.items():
            if x in lone and any(lone[x] is down for down in after.values()):
                continue
            self._replace(x, group, after.get(id(group[0].node)))
        if not self._new:
            return None
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            name = node.output[0]
            nodes += self._new.get(name, [] if name in self._gone else [node])
        nodes = alive(nodes, self._outputs)
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        self._graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in self._constants.items())
        self._model.opset_import.append(helper.make_opsetid(EDGESPEC, 1))
        return self._model

    # -- what is there -------------------------------------------------------------------------------------------------

    def _fits(self, node: onnx.NodeProto) -> bool:
        """Whether a node reads rows [n, k] or [batch, n, k] of whole blocks; a pass has one text."""
        dims = self._dims.get(node.input[0])
        if dims is None or _attributes(node)["K"] % BLOCK:
            return False
        return len(dims) == 2 or (len(dims) == 3 and (dims[0].dim_value == 1 or dims[0].dim_param in self._batch))

    def _only(self, name: str, count: int = 1) -> bool:
        return name not in self._outputs and len(self._read[name]) == count

    def _gated(self, x: str, groups: Mapping[str, Sequence[Linear]]) -> Sequence[Linear] | None:
        """Return the two layers whose product, one of them as ``silu``, is x; None = x is something else."""
        product = self._made.get(x)
        if product is None or product.op_type != "Mul" or not self._only(x):
            return None
        for gate, up in (product.input, reversed(product.input)):
            act = self._made.get(gate)
            if act is None or act.op_type != "Mul" or not self._only(gate) or not self._only(up):
                continue
            first, second = act.input
            sigmoid = self._made.get(second)
            if sigmoid is None or sigmoid.op_type != "Sigmoid" or sigmoid.input[0] != first:
                continue
            if not self._only(first, 2) or not self._only(second):
                continue
            for pair in groups.values():
                if [one.node.output[0] for one in pair] in ([first, up], [up, first]):
                    ordered = sorted(pair, key=lambda one: one.node.output[0] != first)
                    if ordered[0].bits == ordered[1].bits and not any(one.bias for one in ordered):
                        return pair
        return None

    def _norm(self, x: str, readers: int) -> _Norm | None:
        """Recognize a root-mean-square norm that only these layers read."""
        if not self._only(x, readers):
            return None
        for weight, scaled in _either(self._made.get(x), "Mul"):
            tensor = self._tensors.get(weight)
            if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 1 or tensor.dims[0] == 1:
                continue
            for value, square in self._divided(scaled):
                for eps, mean in _either(self._made.get(square.input[0]), "Add"):
                    if (number := self._number(eps)) is None or not self._is_mean(mean, value):
                        continue
                    return _Norm(value, weight, number)
        return None

    def _divided(self, name: str) -> list[tuple[str, onnx.NodeProto]]:
        """List what a value may be: another one divided by a square root, and that root."""
        node, found = self._made.get(name), []
        if node is not None and node.op_type == "Div":
            found = [(node.input[0], self._made.get(node.input[1]))]
        for value, inverse in _either(node, "Mul"):
            above = self._made.get(inverse)
            if above is not None and above.op_type == "Reciprocal":
                found.append((value, self._made.get(above.input[0])))
        return [(value, root) for value, root in found if root is not None and root.op_type == "Sqrt"]

    def _is_mean(self, mean: str, value: str) -> bool:
        """Whether a value is the mean of another's squares along the last axis."""
        node = self._made.get(mean)
        if node is None or node.op_type != "ReduceMean" or len(node.input) != 2:
            return False
        axes, power = self._tensors.get(node.input[1]), self._made.get(node.input[0])
        if axes is None or numpy_helper.to_array(axes).ravel().tolist() != [-1] or power is None:
            return False
        if power.op_type == "Mul":
            return list(power.input) == [value, value]
        return power.op_type == "Pow" and power.input[0] == value and self._number(power.input[1]) == 2

    def _number(self, name: str) -> float | None:
        tensor = self._tensors.get(name)
        if tensor is None or int(np.prod(tensor.dims)) != 1 or tensor.data_location == TensorProto.EXTERNAL:
            return None
        return float(numpy_helper.to_array(tensor).ravel()[0])

    # -- what takes its place ------------------------------------------------------------------------------------------

    def _replace(self, x: str, group: Sequence[Linear], down: Linear | None) -> None:
        k, own = group[0].k, group[0].node.output[0]
        norm = self._norm(x, len(group))
        source = norm.x if norm else x
        weights: list[str] = []

        def weight(name: str) -> int:
            weights.append(name)
            return len(weights) - 1

        def matrix(linear: Linear) -> int:
            self.matrices[linear.key] = linear.packed
            return weight(f"{linear.key}.packed")

        normed = f" norm={weight(norm.weight)} eps={norm.eps:.9g}" if norm else ""
        steps = [f"load out=0 k={k}", f"quantize x=0{normed} k={k} kind={KINDS[group[0].bits]} out=0"]
        declared = [f"floats 0 {k}", f"acts 0 {k}"]
        last = [down] if down else list(group)
        if down:
            first = self._made[down.node.input[0]]
            gate, up = sorted(group, key=lambda one: not self._is_gate(one, first))
            declared.append(f"acts 1 {gate.n}")
            steps.append(
                f"glu act=0 gate={matrix(gate)} up={matrix(up)} kind={KINDS[gate.bits]} n={gate.n} k={k} out=1"
            )
        at = 0
        for number, one in enumerate(last, 1):
            declared.append(f"floats {number} {one.n}")
            bias = f" bias={weight(one.bias)}" if one.bias else ""
            steps.append(f"linear act={int(down is not None)} w={matrix(one)} kind={KINDS[one.bits]} n={one.n} "
                         f"k={one.k}{bias} out={number}")  # fmt: skip
            steps.append(f"store x={number} k={one.n} at={at}")
            at += one.n
        three = len(self._dims[x]) == 3
        nodes, flat = [], source
        if three:
            flat = f"{own}.flat"
            nodes.append(helper.make_node("Reshape", [source, self._constant(f"flat.{k}", [-1, k])], [flat]))
        plan, more = self._plan(flat, self._dims[x][-2])
        nodes += more
        outputs = [f"{own}.{name}" for name in ("logits", "ids", "values", "hidden")]
        fixed = [plan, *(self._shared(name) for name in _FIXED[1:])]
        program = "\n".join([*declared, *steps])
        nodes.append(helper.make_node("Decoder", [*fixed, flat, *weights], outputs, name=f"{own}.native",
                                      domain=EDGESPEC, program=program, constant_weights=1))  # fmt: skip
        names = [one.node.output[0] for one in last]
        together = f"{own}.together" if len(last) > 1 else names[0]
        shape = self._constant(f"shape{'3' if three else ''}.{at}", [1, -1, at] if three else [-1, at])
        nodes.append(helper.make_node("Reshape", [outputs[3], shape], [together]))
        if len(last) > 1:
            sizes = self._constant(f"sizes.{own}", [one.n for one in last])
            nodes.append(helper.make_node("Split", [together, sizes], names, axis=-1))
        self._new[own] = nodes
        self._gone.update(one.node.output[0] for one in group)
        self._gone.update(names)

    def _is_gate(self, linear: Linear, product: onnx.NodeProto) -> bool:
        return linear.node.output[0] not in product.input  # the other one is multiplied as it is

    def _plan(self, flat: str, rows: Any) -> tuple[str, list[onnx.NodeProto]]:
        """Describe the rows of a pass to a node; those of a length are described once."""
        key = rows.dim_param or (str(rows.dim_value) if rows.HasField("dim_value") else flat)
        name = f"native.plan.{key}"
        if name in self._planned:
            return name, []
        self._planned.add(name)
        if rows.HasField("dim_value"):
            self._constants[name] = np.repeat(_CONSTANTS["row"], rows.dim_value, 1)
            return name, []
        return name, [
            helper.make_node("Shape", [flat], [f"{name}.rows"], start=0, end=1),
            helper.make_node("Concat", [self._shared("six"), f"{name}.rows"], [f"{name}.shape"], axis=0),
            helper.make_node("Expand", [self._shared("row"), f"{name}.shape"], [name]),
        ]

    def _shared(self, name: str) -> str:
        self._constants[f"native.{name}"] = _CONSTANTS[name]
        return f"native.{name}"

    def _constant(self, name: str, numbers: Sequence[int]) -> str:
        self._constants[f"native.{name}"] = np.array(numbers, np.int64)
        return f"native.{name}"


def _linear(node: onnx.NodeProto) -> Linear | None:
    if node.op_type != "MatMulNBits":
        return None
    facts = _attributes(node)
    bias = node.input[5] if len(node.input) > 5 and node.input[5] else None
    return Linear(node, node.input[1].removesuffix(".levels"), facts["N"], facts["K"], facts["bits"], bias)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def _either(node: onnx.NodeProto | None, kind: str) -> list[tuple[str, str]]:
    """Both orders of the two inputs of a node of this kind."""
    if node is None or node.op_type != kind:
        return []
    first, second = node.input
    return [(first, second), (second, first)]
