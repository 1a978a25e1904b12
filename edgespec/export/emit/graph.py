"""Writing ONNX: nodes, branches, and initializers in one weight file that several graphs share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.export.emit.plan import WeightLayout

if TYPE_CHECKING:
    import onnx

T = TypeVar("T")
MICROSOFT = "com.microsoft"
EDGESPEC = "edgespec"  # edgespec/runtimes/native
OPSET = 23  # RMSNormalization and RotaryEmbedding as operators
IR_VERSION = 11
FLOAT, UINT8, INT32, INT64, BOOL = 1, 2, 6, 7, 9  # of onnx, which planning does without
Declared = tuple[str, int, Sequence[int | str]]  # name, kind and sizes of a value
Branch: TypeAlias = "onnx.GraphProto"


class GraphBuilder:
    """Collects the nodes of one graph.  Branches of ``If`` are at most one deep.

    An ``If`` inside an ``If`` is correct but its weights are not pre-packed by ONNX Runtime: 15 times slower.
    """

    def __init__(self, weights: WeightLayout) -> None:
        self.weights = weights
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._outer: list[onnx.NodeProto] | None = None
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._count = 0
        self._memo: dict[Hashable, Any] = {}

    def once(self, key: Hashable, emit: Callable[[], T]) -> T:
        """Return the earlier result of ``emit`` for this key in the same scope; otherwise call it."""
        if key not in self._memo:
            self._memo[key] = emit()
        found: T = self._memo[key]
        return found

    def input(self, name: str, kind: int, dims: Sequence[int | str]) -> str:
        """Declare a graph input; returns its name."""
        self.inputs.append(declared(name, kind, dims))
        return name

    def output(self, name: str, kind: int, dims: Sequence[int | str]) -> None:
        self.outputs.append(declared(name, kind, dims))

    def unique(self, stem: str) -> str:
        """Make a value name that nothing else uses."""
        self._count += 1
        return f"{stem}_{self._count}"

    def node(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str] | None = None,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node; returns the name of its first output."""
        outputs = outputs or [self.unique(kind)]
        name = self.unique(f"node_{kind}")
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Put a small tensor inside the graph file."""
        if name not in self._initializers:
            from onnx import numpy_helper

            self._initializers[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def stored(self, name: str) -> str:
        """Name a tensor of the weight file."""
        if name not in self._initializers:
            self._initializers[name] = stored_tensor(self.weights, name)
        return name

    def branch(self, name: str, body: Callable[[], list[Declared]]) -> onnx.GraphProto:
        """Record the nodes that ``body`` adds as a branch of an ``If``; body returns the branch's outputs."""
        from onnx import helper

        if self._outer is not None:
            raise AssertionError("an If inside an If is never pre-packed by ONNX Runtime: emit at depth one only")
        self._outer, self._nodes = self._nodes, []
        memo, self._memo = self._memo, {}  # values of a branch are not seen outside it
        outputs = body()
        nodes, self._nodes, self._outer, self._memo = self._nodes, self._outer, None, memo
        made = [declared(*output) for output in outputs]
        return helper.make_graph(alive(nodes, {output.name for output in made}), name, [], made)

    def rewrite(self, change: Callable[[list[onnx.NodeProto]], list[onnx.NodeProto]]) -> None:
        """Replace the nodes by what ``change`` makes of those that outputs need."""
        self._nodes = change(alive(self._nodes, {output.name for output in self.outputs}))

    def save(self, path: Path) -> None:
        """Write the graph; its weights stay in the separate weight file."""
        from onnx import helper

        nodes = alive(self._nodes, {output.name for output in self.outputs})
        read = {name for node in nodes for name in reads(node)}  # ONNX Runtime warns of others
        kept = [tensor for name, tensor in self._initializers.items() if name in read]
        graph = helper.make_graph(nodes, "decoder", self.inputs, self.outputs, kept)
        domains = {node.domain for node in nodes}
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        if EDGESPEC in domains:
            opsets.append(helper.make_opsetid(EDGESPEC, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgespec")
        path.write_bytes(model.SerializeToString())


def declared(name: str, kind: int, dims: Sequence[int | str]) -> onnx.ValueInfoProto:
    """Describe a value of a graph."""
    from onnx import helper

    return helper.make_tensor_value_info(name, kind, dims)


def stored_tensor(weights: WeightLayout, name: str) -> onnx.TensorProto:
    """Make an initializer that refers to a tensor of the weight file."""
    from onnx import TensorProto, helper

    entry = weights.entries[name]
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(entry.dtype))
    tensor.dims.extend(entry.dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", weights.file), ("offset", entry.offset), ("length", entry.length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def alive(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """Keep the nodes whose outputs are wanted, or read by such a node."""
    wanted, kept = set(wanted), []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.output):
            continue
        kept.append(node)
        wanted.update(reads(node))
    return kept[::-1]


def reads(node: onnx.NodeProto) -> list[str]:
    """List what a node reads, its branches included: those read values of the outer graph."""
    return [*node.input, *(name for attribute in node.attribute for inner in attribute.g.node for name in reads(inner))]
