"""Look up nodes and shapes of a graph's values, and compute single values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.export.foreign.graph import ForeignGraph

Array = NDArray[Any]
_LARGEST = 1 << 22  # elements of a constant that is computed with
_SIZES = ((7, 11), (5, 13))  # (rows, tokens before them) of two passes
_PLACES = ("position_ids", "attention_mask")  # inputs that say nothing about tokens


class Values:
    """The values of a graph in the making.

    Args:
        model: the graph; it is not changed.
        graph: the same as it was opened, which knows its shapes and constants.
    """

    def __init__(self, model: onnx.ModelProto, graph: ForeignGraph) -> None:
        self.model, self.graph = model, model.graph
        self.made = {name: node for node in self.graph.node for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                self.readers[name].append(node)
        self.outputs = {value.name for value in self.graph.output}
        self.inputs = {value.name: value for value in self.graph.input}
        self.tensors = {one.name: one for one in self.graph.initializer}
        self._read, shapes = graph.tensor, graph.shapes
        values = (*shapes.value_info, *shapes.input, *shapes.output)
        self.dims = {value.name: value.type.tensor_type.shape.dim for value in values}
        self.floats = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
        ids = self.dims.get("input_ids", ())
        self._batch = {ids[0].dim_param} - {""} if len(ids) == 2 else set()
        self._rows = ids[1] if len(ids) == 2 else None
        self._sized = [graph.sized_shapes(*sizes) for sizes in _SIZES]
        self._placed: dict[str, bool] = {}
        self._parts: dict[tuple[str, frozenset[str]], Any] = {}  # sessions; None = it cannot stand alone

    # -- constants and shapes ------------------------------------------------------------------------------------------

    def constant(self, name: str) -> Array | None:
        """Return a constant's values; None = it is none, or a large one."""
        if (tensor := self.tensors.get(name)) is None or int(np.prod(tensor.dims)) > _LARGEST:
            return None
        return self._read(name) if tensor.data_location == TensorProto.EXTERNAL else numpy_helper.to_array(tensor)

    def number(self, name: str) -> float | None:
        """Return the value of a constant of one element."""
        tensor = self.tensors.get(name)
        if tensor is None or int(np.prod(tensor.dims)) != 1:
            return None
        found = self.constant(name)
        return None if found is None else float(found.ravel()[0])

    def vector(self, name: str, size: int) -> bool:
        """Tell whether a value is a constant float vector of this size."""
        tensor = self.tensors.get(name)
        return tensor is not None and tensor.data_type == TensorProto.FLOAT and [*tensor.dims] == [size]

    def width(self, name: str) -> int | None:
        """Return n of a value [rows, n] or [1, rows, n], one row for each token of the pass; None = it is another."""
        if name not in self.floats or self._rows is None:
            return None
        sized = [dims.get(name, ()) for dims in self._sized]
        if all(2 <= len(dims) <= 3 and dims[-2:] == (rows, sized[0][-1]) and dims[-1] and dims[:-2] in ((), (1,))
               for (rows, _), dims in zip(_SIZES, sized, strict=True)):  # fmt: skip
            return sized[0][-1]
        dims = self.dims.get(name, ())
        if len(dims) not in (2, 3) or dims[-1].dim_value <= 0:
            return None
        if len(dims) == 3 and dims[0].dim_value != 1 and dims[0].dim_param not in self._batch:
            return None
        rows, own = dims[-2], self._rows
        same = (rows.dim_param, rows.dim_value) == (own.dim_param, own.dim_value)
        return int(dims[-1].dim_value) if same and (rows.dim_param or rows.dim_value) else None

    def rank(self, name: str) -> int:
        """Return how many axes a value has whose ``width`` is known."""
        return len(self._sized[0].get(name, ()) or self.dims.get(name, ()))

    def same(self, name: str) -> str:
        """Return the first value with the rows of another one, as [rows, n] or [1, rows, n]."""
        while (node := self.made.get(name)) is not None and node.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
            if (width := self.width(name)) is None or self.width(node.input[0]) != width:
                break
            name = node.input[0]
        return name

    def only(self, name: str, count: int = 1) -> bool:
        """Tell whether a value has this number of readers, and is no output."""
        return name not in self.outputs and len(self.readers[name]) == count

    def either(self, name: str, kind: str) -> list[tuple[str, str]]:
        """Return both orders of the inputs of the node of this kind that makes a value; nothing = another makes it."""
        node = self.made.get(name)
        if node is None or node.op_type != kind or len(node.input) != 2:
            return []
        first, second = node.input
        return [(first, second), (second, first)]

    # -- computing -----------------------------------------------------------------------------------------------------

    def places(self, name: str) -> bool:
        """Tell whether a value follows from the sizes of a pass and its rows' positions, not from what tokens they are.

        Such values are masks, angles and shapes.
        """
        stack = [name]
        while stack:
            at = stack[-1]
            if at in self._placed:
                stack.pop()
                continue
            node = self.made.get(at)
            if node is None or (node.op_type == "Shape" and node.input[0] in self.inputs):
                self._placed[at] = node is not None or at in self.tensors or at in _PLACES
                continue
            if not _plain(node):
                self._placed[at] = False
                continue
            waiting = [one for one in node.input if one and one not in self._placed]
            if waiting and len(stack) < 1 << 14:
                stack += waiting
                continue
            self._placed[at] = not waiting and all(self._placed[one] for one in node.input if one)
        return self._placed[name]

    def compute(self, wanted: str, past: int, rows: int, given: Mapping[str, Array] | None = None) -> Array | None:
        """Compute a value of a pass, from given ones and from what follows from its sizes.

        Args:
            past, rows: tokens before the pass, and in it.
            given: other values that it depends on.

        Returns None where something else would be needed.
        """
        held = dict(given or {})
        key = wanted, frozenset(held)
        if key not in self._parts:
            self._parts[key] = self._part(wanted, held)
        if (part := self._parts[key]) is None:
            return None
        session, sizes = part
        for name in sizes:
            node = self.made.get(name)
            if node is not None:
                held[name] = self._shape(node, past, rows)
            elif name == "position_ids":
                held[name] = np.arange(past, past + rows)[None]
            else:
                held[name] = np.ones((1, past + rows), np.int64)
        try:
            return np.asarray(session.run([wanted], held)[0])
        except Exception:  # ONNX Runtime's exceptions share no public base class: values of other shapes are expected
            return None

    def _part(self, wanted: str, given: Mapping[str, Array]) -> tuple[Any, list[str]] | None:
        """Open a session over what computes a value, and name the sizes that it is to be given as well."""
        import onnxruntime as ort

        nodes: dict[str, onnx.NodeProto] = {}
        constants: dict[str, Array] = {}
        sizes: dict[str, None] = {}
        stack = [wanted]
        while stack:
            name = stack.pop()
            if not name or name in given or name in nodes or name in constants or name in sizes:
                continue
            node = self.made.get(name)
            if node is None and name in self.tensors:
                if (values := self.constant(name)) is None:
                    return None
                constants[name] = np.ascontiguousarray(values)
            elif node is None:
                if name not in _PLACES:
                    return None
                sizes[name] = None
            elif node.op_type == "Shape" and node.input[0] in self.inputs:
                sizes[name] = None
            elif not _plain(node):
                return None
            else:
                nodes |= dict.fromkeys((one for one in node.output if one), node)
                stack += node.input
        kept = {id(node) for node in nodes.values()}
        kinds = {name: helper.np_dtype_to_tensor_dtype(one.dtype) for name, one in given.items()}
        kinds |= dict.fromkeys(sizes, TensorProto.INT64)
        graph = helper.make_graph(
            [node for node in self.graph.node if id(node) in kept],
            "part",
            [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()],
            [onnx.ValueInfoProto(name=wanted)],
            [numpy_helper.from_array(one, name) for name, one in constants.items()],
        )
        part = helper.make_model(graph, opset_imports=list(self.model.opset_import), ir_version=self.model.ir_version)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            return ort.InferenceSession(part.SerializeToString(), options, ["CPUExecutionProvider"]), list(sizes)
        except Exception:  # as above
            return None

    def _shape(self, node: onnx.NodeProto, past: int, rows: int) -> Array:
        """Return what a node gives as the shape of an input of the graph."""
        name = node.input[0]
        if name in ("input_ids", "position_ids"):
            shape = [1, rows]
        elif name == "attention_mask":
            shape = [1, past + rows]
        else:
            dims = self.inputs[name].type.tensor_type.shape.dim
            shape = [1 if not at else dim.dim_value or past for at, dim in enumerate(dims)]
        facts = attributes(node)
        return np.array(shape[facts.get("start", 0) : facts.get("end", len(shape))], np.int64)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes by name."""
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def _plain(node: onnx.NodeProto) -> bool:
    """Tell whether a node is one of ONNX's own, without branches."""
    return not node.domain and not any(one.HasField("g") for one in node.attribute)
