"""An ONNX file of another exporter: its ports, its tensors, the matrices that can be quantized, and its strict form.

In strict mode no product of two activations ever has a single row.  If both factors are computed, as in attention's two
products, ONNX Runtime multiplies one row by other kernels than several rows.  It packs constant matrices and does not
do this with them (docs/dev/runtime.md).  So those products repeat their last row, and drop it from the result.  The
rest of the graph sees only the rows of the pass.

A graph of single rows needs none of this: every pass of it has the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import BundleError, ExportError
from edgespec.export.bundle.model_part import MAIN, STRICT
from edgespec.export.source.source import PIECE_BYTES
from edgespec.runtimes.files.graph_check import check_graph
from edgespec.runtimes.files.manifest import Graph, ModelPart, Origin
from edgespec.runtimes.files.operators import LINEAR
from edgespec.runtimes.slots.concat import FLOAT, INTEGER, ConcatPorts, Port

_KINDS = {TensorProto.FLOAT: FLOAT, TensorProto.INT64: INTEGER}
_QUANTIZED = re.compile(r"MatMulNBits|.*Integer|.*Quantiz.*|QLinear.*|QAttention|QGemm|GatherBlockQuantized")
_LAYER = re.compile(r"(?:^|[./])(?:layers|layer|h|blocks|block)[./](\d+)[./]")
_AGAIN = "give the checkpoint itself, or an export of `optimum-cli export onnx --task text-generation-with-past`"


@dataclass(frozen=True)
class Matrix:
    """A multiplication of rows by a constant matrix."""

    node: int  # its place in the graph's list of nodes
    name: str  # of the node, with ``layers.N`` in front where it belongs to a layer
    weight: str  # the initializer
    stored_rows: bool  # whether it is stored as [n, k] (else [k, n])
    n: int  # outputs
    k: int  # inputs
    bias: str | None  # the initializer of a bias [n], if the node adds one

    @property
    def key(self) -> str:
        """Names the matrix: one tensor may be multiplied by both ways."""
        return self.weight if self.stored_rows else f"{self.weight}.transposed"


class ForeignGraph:
    """An opened graph; its tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.proto = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # protobuf's own types
            raise ExportError(f"{path}: not a readable ONNX file: {_line(error)}", _AGAIN) from error
        graph = self.proto.graph
        self.initializers = {tensor.name: tensor for tensor in graph.initializer}
        quantized = next((node.op_type for node in graph.node if _QUANTIZED.fullmatch(node.op_type)), None)
        if quantized:
            raise ExportError(f"{path}: is quantized already (it has {quantized}); expected float32 weights", _AGAIN)
        try:
            ports = [one for one in graph.input if one.name not in self.initializers]
            self.ports = ConcatPorts.match([_port(one) for one in ports], [_port(one) for one in graph.output])
        except ValueError as error:
            raise ExportError(f"{path}: the graph {error}", _AGAIN) from error
        try:
            check_graph(path, "stock")
        except BundleError as error:
            raise ExportError(error.message, _AGAIN) from error

    @property
    def origin(self) -> Origin:
        """Name who made it, by what its caches are called."""
        return "transformers" if self.ports.cache[0].past == "past.0" else "optimum"

    @property
    def parameters(self) -> int:
        """Elements of all float tensors."""
        sizes = [int(np.prod(t.dims)) for t in self.initializers.values() if t.data_type == TensorProto.FLOAT]
        return sum(sizes)

    @property
    def shapes(self) -> onnx.GraphProto:
        """Return the graph with the shapes of its values as far as they can be inferred."""
        return onnx.shape_inference.infer_shapes(self.proto).graph

    def sized_shapes(self, rows: int, past: int) -> dict[str, tuple[int, ...]]:
        """Infer the shapes of values in a pass of ``rows`` rows, 0 = an unknown size.

        More of them can be inferred with numbers than with names for them.
        """
        sized = onnx.ModelProto()
        sized.CopyFrom(self.proto)
        del sized.graph.value_info[:]
        for value in sized.graph.output:
            value.type.tensor_type.ClearField("shape")
        for value in sized.graph.input:
            own = {"input_ids": rows, "position_ids": rows, "attention_mask": past + rows}.get(value.name, past)
            for at, dim in enumerate(value.type.tensor_type.shape.dim):
                if not dim.HasField("dim_value"):
                    dim.dim_value = own if at else 1
        found = onnx.shape_inference.infer_shapes(sized, data_prop=True).graph
        shapes = ((value.name, value.type.tensor_type.shape.dim) for value in (*found.value_info, *found.output))
        return {name: tuple(int(dim.dim_value) for dim in dims) for name, dims in shapes}

    def tensor(self, name: str) -> NDArray[Any]:
        """Return an initializer's values; those outside the graph's file are mapped rather than read."""
        proto = self.initializers[name]
        if proto.data_location != TensorProto.EXTERNAL:
            return np.asarray(numpy_helper.to_array(proto))
        where = {entry.key: entry.value for entry in proto.external_data}
        file = where.get("location", "")
        if Path(file).name != file:
            raise ExportError(f"{self.path}: tensor {name} is in {file!r}, which is not a file of this folder", _AGAIN)
        dtype, shape = np.dtype(helper.tensor_dtype_to_np_dtype(proto.data_type)), tuple(proto.dims)
        try:
            return np.memmap(self.path.parent / file, dtype, "r", int(where.get("offset", 0)), shape)
        except (OSError, ValueError) as error:
            hint = "copy the whole export: model.onnx and the files beside it"
            raise ExportError(f"{self.path.parent / file}: cannot read {name}: {_line(error)}", hint) from error

    def matrices(self) -> list[Matrix]:
        """Return the multiplications by constant matrices, in the order of the graph."""
        made_by = {node.output[0]: node for node in self.proto.graph.node if node.output}
        found = []
        for at, node in enumerate(self.proto.graph.node):
            if node.op_type not in ("MatMul", "Gemm"):
                continue
            attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
            weight, rows = node.input[1], bool(attributes.get("transB", 0))
            above = made_by.get(weight)
            # a head tied to the embedding [n, k] is transposed in the graph
            if above is not None and above.op_type == "Transpose" and not rows:
                weight, rows = above.input[0], True
            tensor = self.initializers.get(weight)
            if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
                continue
            bias = node.input[2] if len(node.input) > 2 else None
            usual = all(
                attributes.get(key, usual) == usual for key, usual in (("alpha", 1), ("beta", 1), ("transA", 0))
            )
            if not usual or (bias and (bias not in self.initializers or len(self.initializers[bias].dims) != 1)):
                continue
            n, k = (tensor.dims[0], tensor.dims[1]) if rows else (tensor.dims[1], tensor.dims[0])
            name = _named(node.name or node.output[0], weight, len(self.ports.cache))
            found.append(Matrix(at, name, weight, rows, n, k, bias or None))
        return found

    def pieces(self, matrix: Matrix) -> Iterator[NDArray[np.float32]]:
        """Return the rows of a matrix [n, k] in order, as float32 pieces [rows, k] of about PIECE_BYTES."""
        values = self.tensor(matrix.weight)
        step = max(1, PIECE_BYTES // (4 * matrix.k))
        for start in range(0, matrix.n, step):
            part = values[start : start + step] if matrix.stored_rows else values[:, start : start + step].T
            piece = np.ascontiguousarray(part, np.float32)
            if not np.isfinite(np.dot(piece.ravel(), piece.ravel())):
                raise ExportError(f"{self.path}: tensor {matrix.weight} holds NaN or infinity", "export it again")
            yield piece


def _port(value: Any) -> Port:
    """Return a graph's input or output as ONNX Runtime would describe it."""
    kind = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.shape.dim]
    name = _KINDS.get(kind.elem_type) or f"tensor({TensorProto.DataType.Name(kind.elem_type).lower()})"
    return Port(value.name, name, tuple(dims))


def _named(node: str, weight: str, most: int) -> str:
    """``layers.N.NODE`` for a node, or a weight, of layer N: errors are summed by layer."""
    layer = _LAYER.search(node) or _LAYER.search(weight)
    return f"layers.{layer[1]}.{node}" if layer and int(layer[1]) < most else node


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


_KEPT = ("Transpose", "Identity", "Cast")  # of a constant: still one
_NUMBERS = {"strict_last": -1, "strict_end": np.iinfo(np.int64).max, "strict_first": 0, "strict_rows": -2}


def double_last_rows(model: onnx.ModelProto) -> int:
    """Give every product of two activations its last row once more, in place; returns how many there are."""
    graph = model.graph
    constant = {tensor.name for tensor in graph.initializer}
    alone = _single_rows(graph)
    nodes, found = [], 0
    for node in graph.node:
        if node.op_type == "Constant" or (node.op_type in _KEPT and node.input[0] in constant):
            constant.update(node.output)
        if node.op_type != "MatMul" or node.input[1] in constant or node.input[0] in alone:
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


def lead_with_sinks(model: onnx.ModelProto) -> int:
    """Put the column of an attention sink before those of the keys, in place; returns how many there are.

    After them, it would be added to a row's sum after the columns of later tokens, whose number differs between
    passes: the sum would have other bits.
    """
    graph = model.graph
    made = {name: node for node in graph.node for name in node.output}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    values = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != TensorProto.EXTERNAL}
    single = {
        value.name
        for value in graph.value_info
        if (dims := value.type.tensor_type.shape.dim) and dims[-1].HasField("dim_value") and dims[-1].dim_value == 1
    }
    found = 0
    for softmax in [node for node in graph.node if node.op_type == "Softmax"]:
        scores = softmax.input[0]
        shifted = made.get(scores)
        if shifted is not None and shifted.op_type == "Sub":  # less the row's largest
            scores = shifted.input[0]
        joined, drops = made.get(scores), users.get(softmax.output[0], [])
        if joined is None or joined.op_type != "Concat" or len(joined.input) != 2 or joined.input[1] not in single:
            continue
        if not drops or not all(_drops_last_column(node, values) for node in drops):
            continue
        keys, sink = joined.input
        joined.input[:] = [sink, keys]
        for node in drops:
            node.input[1], node.input[2] = "sink_behind", "sink_end"
        found += 1
    if found:
        numbers = {"sink_behind": 1, "sink_end": np.iinfo(np.int64).max}
        graph.initializer.extend(
            numpy_helper.from_array(np.array([number], np.int64), name) for name, number in numbers.items()
        )
    return found


def _drops_last_column(node: onnx.NodeProto, values: Mapping[str, TensorProto]) -> bool:
    """Whether a node is ``[..., :-1]``."""
    if node.op_type != "Slice" or len(node.input) < 4 or any(name not in values for name in node.input[1:]):
        return False
    begin, end, axis, *step = (numpy_helper.to_array(values[name]).tolist() for name in node.input[1:])
    return (begin, end, axis, step or [[1]]) in [([0], [-1], [at], [[1]]) for at in (3, -1)]


def _single_rows(graph: onnx.GraphProto) -> set[str]:
    """Name the values that are one row in every pass, such as a token's share of a batch of experts."""
    found = set()
    for value in graph.value_info:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > 2 and dims[-2].HasField("dim_value") and dims[-2].dim_value == 1:
            found.add(value.name)
    return found


def choose_strict(folder: Path, part: ModelPart, exact: Callable[[ModelPart], bool]) -> ModelPart:
    """Return the part with the strict graph whose rows have the same bits in every pass, by trying.

    Where doubled rows are not enough (products inside other operators), every pass of the plain graph gets a dummy row,
    which costs more: its keys and values are cropped each time.  Where that is not enough either, strict mode is the
    plain graph: there are near-ties then.

    Args:
        exact: whether the rows of a part's strict graph are.
    """
    if exact(part):
        return part
    (folder / STRICT).unlink()
    padded, plain = (_with_strict(part, Graph(file=MAIN, padded=more)) for more in (True, False))
    return padded if exact(padded) else plain


def _with_strict(part: ModelPart, strict: Graph) -> ModelPart:
    """Return the part with this strict graph; one with native linear layers is padded alike."""
    native = {name: graph.model_copy(update={"padded": strict.padded}) for name, graph in part.graphs.items()
              if name == LINEAR}  # fmt: skip
    return part.model_copy(update={"graphs": {**part.graphs, "strict": strict, **native}})
