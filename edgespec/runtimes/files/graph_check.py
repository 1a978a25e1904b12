"""Check untrusted graphs before ONNX Runtime opens them.

The file is read field by field (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto); numbers are never copied.
Allowed: known operators that always end, tensors with all their bytes, external ones
inside the bundle's own files.  A graph of native operators is one node over constant weights.  One of another exporter
is a stock graph with such nodes in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path

from edgespec.errors import BundleError
from edgespec.runtimes.files.manifest import Operators

MOST_BYTES, MOST_NODES, MOST_DEPTH, MOST_ELEMENTS = 1 << 31, 1 << 17, 4, 1 << 40
_MADE = 1 << 28  # most elements that a constant may ask an operator to make
FIXED = ("plan", "rows", "gates", "moves", "kv", "control", "tables", "hidden_in")  # inputs of the native node
BESIDE = ("memory", "sources", "inserted", "axes")  # and that of decoders with encoders, of texts or of images
RESULTS = ("logits", "ids", "values", "hidden")
NATIVE_NODE = ("edgespec", "Decoder")
FLOAT, UINT8, INT8, INT32, INT64 = 1, 2, 3, 6, 7
_BITS = {FLOAT: 32, UINT8: 8, INT8: 8, 4: 16, 5: 16, INT32: 32, INT64: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16,
         21: 4, 22: 4}  # fmt: skip
_MAKERS = ("ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Tile")
_STANDARD = """
Abs Add And ArgMax Attention Cast CastLike Ceil Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos CumSum
DequantizeLinear Div DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand Flatten Floor Gather GatherElements GatherND
Gelu Gemm Greater GreaterOrEqual HardSigmoid HardSwish Identity If InstanceNormalization IsInf IsNaN LayerNormalization
LeakyRelu Less LessOrEqual Log LogSoftmax MatMul MatMulInteger Max Mean Min Mod Mul Neg NonZero Not OneHot Or Pad Pow
QuantizeLinear RMSNormalization Range Reciprocal ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
ReduceSum ReduceSumSquare Relu Reshape Resize RotaryEmbedding Round ScatterElements ScatterND Shape Sigmoid Sign Sin
Size Slice Softmax Softplus Split Sqrt Squeeze Sub Sum Swish Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
_MICROSOFT = """
BiasGelu FastGelu FusedMatMul GatherBlockQuantized Gelu GroupQueryAttention MatMulNBits MultiHeadAttention QuickGelu
RotaryEmbedding SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization
"""
KNOWN = {"": frozenset(_STANDARD.split()), "com.microsoft": frozenset(_MICROSOFT.split())}
KNOWN["ai.onnx"] = KNOWN[""]
Value = int | memoryview


def check_graph(path: Path, operators: Operators, foreign: bool = False) -> None:
    """Reject the graph at ``path``, with its weights, if a bundle may not hold it, for these operators.

    ``foreign``: it comes from another exporter.

    Raises:
        BundleError: the fault.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, expected at most {MOST_BYTES}")
        with path.open("rb") as file:
            model = _Message(memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)))
        if model.all(20) or model.all(25):
            raise ValueError("functions or training, which no bundle has")
        (graph,) = model.all(7) or [memoryview(b"")]
        if operators == "native" and not foreign:
            _check_native(path.parent, _Message(graph))
        else:
            _Walk(path.parent, operators == "native").graph(graph, 0, {})
    except OSError as error:
        raise BundleError(f"{path}: cannot read {error.filename or path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BundleError(f"{path}: not a graph of a bundle: {error}", "export the bundle again") from error


def fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """Iterate over the fields of the protobuf message ``data``, as (number, value).

    Raises:
        ValueError: it is cut off, or no protobuf.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"no protobuf: a field of type {kind}")
        size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if size > end - at:
            raise ValueError("no protobuf: a field is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read the number at a place -> it, and the place after it."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at : at + 10], strict=False):
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at + shift // 7 + 1
    raise ValueError("no protobuf: a number is cut off")


class _Message:
    """The fields of a message by number."""

    def __init__(self, data: memoryview) -> None:
        self._held: dict[int, list[Value]] = {}
        for number, value in fields(data):
            self._held.setdefault(number, []).append(value)

    def all(self, number: int) -> list[memoryview]:
        """Return messages, texts or packed numbers."""
        found = self._held.get(number, [])
        if not all(isinstance(value, memoryview) for value in found):
            raise ValueError(f"field {number} is a number")
        return [value for value in found if isinstance(value, memoryview)]

    def texts(self, number: int) -> list[str]:
        return [bytes(value).decode("utf-8") for value in self.all(number)]

    def text(self, number: int) -> str:
        return (self.texts(number) or [""])[-1]

    def numbers(self, number: int) -> list[int]:
        """Return integers, packed or not."""
        found: list[int] = []
        for value in self._held.get(number, []):
            found += [value] if isinstance(value, int) else _packed(value)
        return [value - (1 << 64) if value >> 63 else value for value in found]

    def number(self, number: int) -> int:
        return (self.numbers(number) or [0])[-1]


def _packed(data: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph: its name, element type and shape; ``values`` of small integers."""

    name: str
    kind: int
    dims: tuple[int, ...]
    values: tuple[int, ...] = ()


def read_tensor(folder: Path, data: memoryview) -> Tensor:
    """Read the tensor in the message ``data`` of a graph in ``folder``; its bytes must all be there.

    Raises:
        ValueError: another size than its shape's, a type that is not known, or a file outside the folder.
    """
    message = _Message(data)
    name, dims, kind = message.text(8), tuple(message.numbers(1)), message.number(2)
    elements = prod(dims)
    if len(dims) > 8 or any(size < 0 for size in dims) or elements > MOST_ELEMENTS or kind not in _BITS:
        raise ValueError(f"tensor {name!r} of type {kind} and shape {list(dims[:9])}")
    nbytes = -(-elements * _BITS[kind] // 8)
    if message.number(14):
        _check_external(folder, name, nbytes, {(e := _Message(entry)).text(1): e.text(2) for entry in message.all(13)})
        return Tensor(name, kind, dims)
    small = kind in (INT32, INT64) and elements <= 64
    if raw := message.all(9):
        if len(raw) > 1 or len(raw[0]) != nbytes:
            raise ValueError(f"tensor {name!r} has {len(raw[0])} bytes, expected {nbytes}")
        values = raw[0].cast("q" if kind == INT64 else "i").tolist() if small else []
        return Tensor(name, kind, dims, tuple(values))
    listed = sum(len(value) for field in (4, 5, 7, 10, 11) for value in message.all(field)) if elements else 0
    if elements > 8 * listed:  # a packed number takes a byte at least, 4-bit ones share an element
        raise ValueError(f"tensor {name!r} of {elements} numbers has {listed} bytes")
    return Tensor(name, kind, dims, tuple(message.numbers(7) + message.numbers(5)) if small else ())


def _check_external(folder: Path, name: str, nbytes: int, at: dict[str, str]) -> None:
    location, numbers = at.get("location", ""), [at.get("offset", "0"), at.get("length", str(nbytes))]
    if not location or Path(location).name != location or location in (".", ".."):
        raise ValueError(f"tensor {name!r} is in {location[:60]!r}, which is not a file in the graph's folder")
    if not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        raise ValueError(f"tensor {name!r} is at {numbers}")
    offset, length = map(int, numbers)
    size = (folder / location).stat().st_size
    if length != nbytes or offset + length > size:
        raise ValueError(
            f"tensor {name!r} of {nbytes} bytes: {length} at byte {offset} of {location}, which has {size} bytes"
        )


class _Walk:
    """Nodes and tensors of a stock graph, branches included; ``native``: it may have nodes of native operators."""

    def __init__(self, folder: Path, native: bool) -> None:
        self._folder, self._native, self._nodes = folder, native, 0

    def graph(self, data: memoryview, depth: int, outer: dict[str, Tensor]) -> None:
        if depth > MOST_DEPTH:
            raise ValueError(f"branches more than {MOST_DEPTH} deep")
        message = _Message(data)
        if message.all(15):
            raise ValueError("sparse tensors, which no bundle has")
        known = outer | {one.name: one for one in (read_tensor(self._folder, part) for part in message.all(5))}
        for node in message.all(1):
            self._node(_Message(node), depth, known)

    def _node(self, node: _Message, depth: int, known: dict[str, Tensor]) -> None:
        self._nodes += 1
        kind, domain = node.text(4), node.text(7)
        if self._native and (domain, kind) == NATIVE_NODE and not depth:
            _check_weights(node.texts(1)[len(FIXED) :], known)
        elif self._nodes > MOST_NODES or kind not in KNOWN.get(domain, ()):
            where = f" of {domain[:40]}" if domain else ""
            raise ValueError(f"operator {kind[:40]!r}{where} is not one that a bundle may use")
        for part in node.all(5):
            attribute = _Message(part)
            if attribute.all(10) or attribute.all(11) or attribute.all(22) or attribute.all(23):
                raise ValueError(f"an attribute of {kind} that no bundle has")
            for tensor in attribute.all(5):
                held = read_tensor(self._folder, tensor)
                if kind == "Constant":
                    known.update((name, held) for name in node.texts(2))
            for branch in attribute.all(6):
                self.graph(branch, depth + 1, known)
        if kind in _MAKERS:
            for name in node.texts(1):
                values = known[name].values if name in known else ()
                if prod(max(1, abs(value)) for value in values) > _MADE:
                    raise ValueError(f"{kind} is to make {list(values[:8])}")


def _check_native(folder: Path, graph: _Message) -> None:
    """One node over graph inputs and constant weights."""
    (node,) = (_Message(one) for one in graph.all(1)) if len(graph.all(1)) == 1 else (None,)
    if node is None or (node.text(7), node.text(4)) != NATIVE_NODE or graph.all(15):
        raise ValueError("expected one node edgespec.Decoder, alone")
    inputs, outputs = ([_Message(one).text(1) for one in graph.all(number)] for number in (11, 12))
    fixed = FIXED + tuple(name for name in BESIDE if name in inputs[len(FIXED) :])
    if tuple(inputs) != fixed or tuple(outputs) != RESULTS or tuple(node.texts(2)) != RESULTS:
        raise ValueError(
            f"expected inputs {', '.join(fixed)} and outputs {', '.join(RESULTS)}, got {inputs}, {outputs}"
        )
    weights = [read_tensor(folder, one) for one in graph.all(5)]
    names = {one.name for one in weights}
    given = node.texts(1)
    if tuple(given[: len(fixed)]) != fixed or not names.isdisjoint(fixed) or len(names) != len(weights):
        raise ValueError("the node's first inputs must be the graph's, and weights need distinct names")
    _check_weights([*given[len(fixed) :], *names], {one.name: one for one in weights})


def _check_weights(names: list[str], known: dict[str, Tensor]) -> None:
    """Weights of a native node are constants, of types that it reads."""
    if lost := [name for name in names if name not in known]:
        raise ValueError(f"{lost[0][:60]!r} is not a constant weight")
    if odd := [one for one in map(known.__getitem__, names) if one.kind not in (FLOAT, UINT8, INT8)]:
        raise ValueError(f"weight {odd[0].name!r} of type {odd[0].kind}: expected float32, uint8 or int8")
