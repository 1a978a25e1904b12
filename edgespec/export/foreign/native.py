"""The same foreign graph on native operators, as far as they have its operations.

A node of native operators runs a program (edgespec/runtimes/native/steps.inl).  Operations over rows that are
recognized (``patterns``, ``attention``) become its steps.  Those that do not wait for one of ONNX Runtime's nodes are
one program, so a graph that is recognized as a whole becomes one node, like edgespec's own.  The rest stays as it is.

Where all attention is recognized, keys and values are in the cache of native operators (``cached``), and the graph has
the ports of edgespec's own.  Otherwise it keeps the ports and caches of the foreign graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.export.emit.graph import EDGESPEC, alive, reads
from edgespec.export.foreign.attention import Attention, Attentions, Norm
from edgespec.export.foreign.graph import ForeignGraph
from edgespec.export.foreign.patterns import activation, find_norms
from edgespec.export.foreign.values import Values, attributes
from edgespec.runtimes.files.formats import BLOCK, Kind
from edgespec.runtimes.files.graph_check import FIXED, RESULTS
from edgespec.runtimes.files.packing import Packed

KINDS: dict[int, Kind] = {4: "q4", 8: "q8"}  # by bits
_NO_CODES = 6  # of keys: the number of that format
_MOST_BUFFERS = 60  # of each kind, that a program has
_MOST_TABLES = 4  # of angles
# for nodes without attention: nothing of it is read without a cache
_CONSTANTS: dict[str, NDArray[Any]] = {
    "rows": np.zeros(0, np.int64),
    "gates": np.zeros(0, np.bool_),
    "moves": np.zeros((0, 3), np.int64),
    "kv": np.zeros((1, 64), np.uint8),
    "control": np.array([0, 0, 0, _NO_CODES, 0, 0, 0, 0], np.int64),
    "tables": np.zeros(0, np.float32),
    # tokens, positions, slots, tokens seen, no parent, places
    "row": np.array([[0], [0], [0], [0], [-1], [0]], np.int64),
    "six": np.array([6], np.int64),
}
_KINDS_OF = {"plan": TensorProto.INT64, "rows": TensorProto.INT64, "gates": TensorProto.BOOL,
             "moves": TensorProto.INT64, "kv": TensorProto.UINT8, "control": TensorProto.INT64,
             "tables": TensorProto.FLOAT, "hidden_in": TensorProto.FLOAT}  # fmt: skip


class Unfit(Exception):
    """A graph that cannot be written so."""


@dataclass(frozen=True)
class Linear:
    """A multiplication by a quantized matrix, as ``MatMulNBits``."""

    x: str
    key: str  # of its matrix
    n: int
    k: int
    bits: int
    bias: str | None

    @property
    def packed(self) -> Packed:
        """Return how native operators store the matrix."""
        return Packed(KINDS[self.bits], self.n, self.k, 0, ((self.key, self.n),))

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)


@dataclass(frozen=True)
class Sum:
    """Two values, added."""

    a: str
    b: str

    @property
    def reads(self) -> tuple[str, ...]:
        return self.a, self.b


@dataclass(frozen=True)
class Activation:
    """A function of a value, times another one where there is one."""

    fn: str
    gate: str
    up: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.gate,) if self.up is None else (self.gate, self.up)


@dataclass(frozen=True)
class Normed:
    """A norm."""

    norm: Norm

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.norm.x,)


@dataclass(frozen=True)
class Attended:
    """An attention over the cache."""

    rule: Attention

    @property
    def reads(self) -> tuple[str, ...]:
        return self.rule.query.source, self.rule.key.source, self.rule.value


Operation = Linear | Sum | Activation | Normed | Attended


class NativeGraph:
    """A graph in the making: ``model`` with ``MatMulNBits`` nodes, whose operations native ones take over.

    Args:
        model: is changed in place.
        graph: the same as it was opened.
        positions: how many there are.
        hidden: the model's hidden size.

    Attributes:
        matrices: how those are packed that native nodes multiply by, by their keys.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        graph: ForeignGraph,
        positions: int,
        hidden: int,
    ) -> None:
        self.matrices: dict[str, Packed] = {}
        self._model, self._graph, self._ports = model, model.graph, graph.ports
        self._values = Values(model, graph)
        self._norms = find_norms(self._values)
        self._positions, self._hidden = positions, hidden
        self._attentions: Attentions | None = None
        self._by_out: dict[str, Attention] = {}
        self._constants: dict[str, NDArray[Any]] = {}
        self._planned: set[str] = set()
        self._moved: dict[str, str] = {}  # positions, and what the graph calls them
        self._begin: list[onnx.NodeProto] = []  # nodes in front of all others

    def cached(self) -> onnx.ModelProto | None:
        """Write the graph over the cache of native operators, in place; None = not all attention is recognized."""
        if self._ports.single or self._ports.states or self._ports.heads is None:
            return None
        self._attentions = Attentions(self._values, self._ports.cache, self._norms, self._positions)
        found = self._attentions.find()
        if found is None or len(self._attentions.tables) > _MOST_TABLES:
            return None
        self._by_out = {one.out: one for one in found}
        for number, table in enumerate(self._attentions.tables):
            self._constants[f"native.cos.{number}"] = np.ascontiguousarray(table.cos)
            self._constants[f"native.sin.{number}"] = np.ascontiguousarray(table.sin)
        try:
            return self._write()
        except Unfit:
            return None

    def joined(self) -> onnx.ModelProto | None:
        """Write the graph with its own caches, in place; None = native operators have nothing of it."""
        try:
            return self._write()
        except Unfit:
            return None

    # -- what is there -------------------------------------------------------------------------------------------------

    def _operation(self, name: str) -> Operation | None:
        """Recognize what makes a value."""
        values = self._values
        same = values.same
        if (rule := self._by_out.get(name)) is not None:
            query, key = (replace(one, source=same(one.source)) for one in (rule.query, rule.key))
            return Attended(replace(rule, query=query, key=key, value=same(rule.value)))
        node = values.made.get(name)
        if node is None or len(node.output) != 1 or values.places(name) or (width := values.width(name)) is None:
            return None
        if (linear := self._linear(name)) is not None:
            return linear
        if (norm := self._norms.get(name)) is not None and values.width(norm.x) == width:
            return Normed(replace(norm, x=same(norm.x)))
        if node.op_type == "Add" and all(values.width(one) == width for one in node.input):
            return Sum(*map(same, node.input))
        if found := activation(values, name):
            return Activation(found[0], same(found[1]))
        for gate, up in values.either(name, "Mul"):
            if values.width(up) == width and (found := activation(values, gate)):
                return Activation(found[0], same(found[1]), same(up))
        return None

    def _linear(self, name: str) -> Linear | None:
        """Recognize a product with a quantized matrix, perhaps with a bias after it."""
        values, bias = self._values, None
        for vector, product in values.either(name, "Add"):
            node = values.made.get(product)
            if node is None or node.op_type != "MatMulNBits" or len(node.input) > 5 or not values.only(product):
                continue
            if values.vector(vector, int(attributes(node)["N"])):
                name, bias = product, vector
        node = values.made[name]
        if node.op_type != "MatMulNBits":
            return None
        facts = attributes(node)
        if values.width(node.input[0]) != facts["K"] or facts["K"] % BLOCK or facts["N"] != values.width(name):
            return None
        bias = node.input[5] if len(node.input) > 5 and node.input[5] else bias
        key, x = node.input[1].removesuffix(".levels"), values.same(node.input[0])
        return Linear(x, key, facts["N"], facts["K"], facts["bits"], bias)

    # -- the parts of the graph ----------------------------------------------------------------------------------------

    def _write(self) -> onnx.ModelProto | None:
        """Divide the graph into programs and other nodes, each after what it reads; changes the model."""
        cached = bool(self._by_out)
        ends = {"logits"} if cached else set(self._values.outputs)
        operations, others = self._operations(ends)
        if not any(isinstance(one, Linear) for one in operations.values()):
            return None
        if cached and not isinstance(operations.get("logits"), Linear):
            raise Unfit("the LM head is no product")
        nodes = self._divided(operations, others, ends)
        nodes = alive([*self._begin, *nodes], ends | ({*RESULTS} if cached else set()))
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        if cached:
            self._set_ports()
        self._graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in self._constants.items())
        self._model.opset_import.append(helper.make_opsetid(EDGESPEC, 1))
        return self._model

    def _operations(self, ends: set[str]) -> tuple[dict[str, Operation], list[onnx.NodeProto]]:
        """Return what native operators compute, by its values, and the other nodes, both in the order of the graph."""
        wanted = set(ends)
        operations: dict[str, Operation] = {}
        others: list[onnx.NodeProto] = []
        for node in reversed(self._graph.node):
            names = [name for name in node.output if name in wanted]
            if not names:
                continue
            operation = self._operation(names[0]) if len(node.output) == 1 else None
            if operation is not None:
                operations[names[0]] = operation
                wanted.update(operation.reads)
                continue
            kept = onnx.NodeProto()
            kept.CopyFrom(node)
            if self._by_out:
                kept.input[:] = [self._without_past(name) for name in node.input]
            others.append(kept)
            wanted.update(reads(kept))
        return {name: operations[name] for name in reversed(operations)}, others[::-1]

    def _divided(
        self, operations: Mapping[str, Operation], others: Sequence[onnx.NodeProto], ends: set[str]
    ) -> list[onnx.NodeProto]:
        """Write programs and other nodes by turns: a program waits for as few nodes as possible."""
        turn: dict[str, int] = {}  # of each value: the program that makes it, or the one before its node
        for node in self._graph.node:
            if (operation := operations.get(node.output[0])) is not None:
                turn[node.output[0]] = max(turn.get(one, 0) + (one not in operations) for one in operation.reads)
            else:
                turn |= dict.fromkeys(node.output, max((turn.get(one, 0) for one in reads(node)), default=0))
        readers: dict[str, set[int]] = defaultdict(set)  # programs that read a value, -1 = others
        for name, operation in operations.items():
            for one in operation.reads:
                readers[one].add(turn[name])
        for name in (*ends, *(one for node in others for one in reads(node))):
            readers[name].add(-1)
        attending = [turn[name] for name, operation in operations.items() if isinstance(operation, Attended)]
        nodes: list[onnx.NodeProto] = []
        for at in range(max(turn.values(), default=0) + 1):
            inside = {name: operation for name, operation in operations.items() if turn[name] == at}
            if inside:
                given = dict.fromkeys(one for op in inside.values() for one in op.reads if one not in inside)
                head = "logits" if self._by_out and "logits" in inside else None
                taken = [name for name in inside if readers[name] - {at} and name != head]
                attends = at in attending
                moves = attends and at == min(attending)  # rows are moved once
                nodes += self._node(_Program(self, inside, list(given), taken, head), f"native.{at}", attends, moves)
            nodes += [node for node in others if turn[node.output[0]] == at]
        return nodes

    def _without_past(self, name: str) -> str:
        """Return what a value is called where the caches are not inputs: positions come from the plan of the pass."""
        values = self._values
        if name == "input_ids":
            return self._from_plan("input_ids", 0)
        if not name or name in values.tensors or not values.places(name) or self._from_tokens(name):
            return name
        if name not in self._moved:
            found = [(past, rows, values.compute(name, past, rows)) for past, rows in ((0, 4), (5, 3), (9, 1))]
            first = found[0][2]
            if first is None or first.dtype != np.int64 or first.ndim > 2:
                raise Unfit(f"{name} depends on the length of the text")
            shift = int(first.ravel()[0])
            for past, rows, got in found:
                if (
                    got is None
                    or got.ndim != first.ndim
                    or got.ravel().tolist() != list(range(past + shift, past + rows + shift))
                ):
                    raise Unfit(f"{name} depends on the length of the text")
            moved = self._from_plan("positions", 1)
            if first.ndim == 1:
                moved = self._begin_with("Squeeze", [moved, self._constant("zero", [0])], f"{name}.line")
            if shift:
                moved = self._begin_with("Add", [moved, self._constant(f"shift.{shift}", [shift])], f"{name}.shifted")
            self._moved[name] = moved
        return self._moved[name]

    def _from_tokens(self, name: str) -> bool:
        """Whether a value follows from the number of tokens in a pass alone."""
        stack, seen = [name], set()
        while stack:
            if (at := stack.pop()) in seen or at in self._values.tensors or not at:
                continue
            seen.add(at)
            node = self._values.made.get(at)
            if node is None:
                return False
            if node.op_type == "Shape" and node.input[0] in self._values.inputs:
                if node.input[0] != "input_ids":
                    return False
                continue
            stack += node.input
        return True

    def _from_plan(self, name: str, line: int) -> str:
        """Take a line [1, rows] of the plan."""
        own = "input_ids" if not line else f"native.{name}"
        if not any(own in node.output for node in self._begin):
            self._begin_with("Gather", ["plan", self._constant(f"line.{line}", [line])], own, axis=0)
        return own

    def _begin_with(self, kind: str, inputs: Sequence[str], output: str, **facts: Any) -> str:
        self._begin.append(helper.make_node(kind, inputs, [output], **facts))
        return output

    def _set_ports(self) -> None:
        """Give the graph the ports of edgespec's own."""
        hidden = self._hidden
        del self._graph.input[:], self._graph.output[:]
        shapes: dict[str, list[int | str]] = {
            "plan": [6, "T"], "rows": ["R"], "gates": ["G"], "moves": ["M", 3], "kv": ["S", "B"], "control": [8],
            "tables": ["N"], "hidden_in": ["H", hidden],
        }  # fmt: skip
        self._graph.input.extend(helper.make_tensor_value_info(name, _KINDS_OF[name], shapes[name]) for name in FIXED)
        outputs: dict[str, tuple[int, list[int | str]]] = {
            "logits": (TensorProto.FLOAT, ["L", "V"]),
            "ids": (TensorProto.INT64, ["K", "top"]),
            "values": (TensorProto.FLOAT, ["K", "top"]),
            "hidden": (TensorProto.FLOAT, ["H", hidden]),
        }
        self._graph.node.append(helper.make_node("Identity", ["hidden_in"], ["hidden"]))
        self._graph.output.extend(helper.make_tensor_value_info(name, kind, dims)
                                  for name, (kind, dims) in outputs.items())  # fmt: skip

    # -- a program -----------------------------------------------------------------------------------------------------

    def _node(self, writer: _Program, own: str, attends: bool, moves: bool) -> list[onnx.NodeProto]:
        """Write the node of a program, and how its rows come and go."""
        values, nodes, flat = self._values, [], []
        for name in writer.given:
            flat.append(name)
            if values.rank(name) == 3:
                flat[-1] = f"{own}.in.{len(flat)}"
                shape = self._constant(f"flat.{values.width(name)}", [-1, values.width(name)])
                nodes.append(helper.make_node("Reshape", [name, shape], [flat[-1]]))
        given = flat[0]
        if len(flat) > 1:
            given = f"{own}.in"
            nodes.append(helper.make_node("Concat", flat, [given], axis=-1))
        cached = bool(self._by_out)
        real = {"plan": cached, "kv": cached, "control": cached, "tables": attends, "moves": moves,
                "rows": bool(writer.head), "gates": False}  # fmt: skip
        fixed = {name: name if own_port else "" for name, own_port in real.items()}
        fixed |= {name: self._shared(name) for name, taken in fixed.items() if not taken and name != "plan"}
        if not cached:
            fixed["plan"], more = self._plan(given, [*values.dims.get(writer.given[0], ())][-2:-1])
            nodes += more
        fixed["hidden_in"] = given
        if not writer.weights:  # the operator has one at least
            self._constants["native.none"] = np.zeros(1, np.float32)
        outputs = [f"{own}.{name}" for name in RESULTS]
        if writer.head:
            outputs[:3] = RESULTS[:3]
        inputs = [*(fixed[name] for name in FIXED), *(writer.weights or ["native.none"])]
        facts = {"domain": EDGESPEC, "program": writer.text, "constant_weights": 1}
        nodes.append(helper.make_node("Decoder", inputs, outputs, name=own, **facts))
        sizes = [values.width(name) or 0 for name in writer.taken]
        parts = [outputs[3]]
        if len(sizes) > 1:
            parts = [f"{own}.out.{at}" for at in range(len(sizes))]
            nodes.append(helper.make_node("Split", [outputs[3], self._constant(f"{own}.sizes", sizes)], parts, axis=-1))
        for name, size, part in zip(writer.taken, sizes, parts, strict=False):
            dims = [1, -1, size] if values.rank(name) == 3 else [-1, size]
            form = self._constant("shape." + ".".join(map(str, dims)), dims)
            nodes.append(helper.make_node("Reshape", [part, form], [name]))
        return nodes

    def rotary(self, number: int) -> tuple[int, str, str]:
        """Return how many channels a table turns, and the names of its cosines and sines."""
        assert self._attentions is not None
        size = 2 * self._attentions.tables[number].cos.shape[1]
        return size, f"native.cos.{number}", f"native.sin.{number}"

    def layers(self) -> list[int]:
        """Return the head sizes of the layers with attention."""
        return [one.dim for one in self._by_out.values()]

    def _plan(self, flat: str, rows: Sequence[Any]) -> tuple[str, list[onnx.NodeProto]]:
        """Describe the rows of a pass to a node without attention; those of a length are described once."""
        fixed = rows[0].dim_value if rows else 0  # 0 = any number
        key = (rows[0].dim_param if rows else "") or (str(fixed) if fixed else flat)
        name = f"native.plan.{key}"
        if name in self._planned:
            return name, []
        self._planned.add(name)
        if fixed:
            self._constants[name] = np.repeat(_CONSTANTS["row"], fixed, 1)
            return name, []
        return name, [
            helper.make_node("Shape", [flat], [f"{name}.rows"], start=0, end=1),
            helper.make_node("Concat", [self._shared("six"), f"{name}.rows"], [f"{name}.shape"], axis=0),
            helper.make_node("Expand", [self._shared("row"), f"{name}.shape"], [name]),
        ]

    def width(self, name: str) -> int:
        """Return how many numbers a row of a value has."""
        found = self._values.width(name)
        if found is None:
            raise Unfit(f"{name} is not one row for each token")
        return found

    def _shared(self, name: str) -> str:
        self._constants[f"native.{name}"] = _CONSTANTS[name]
        return f"native.{name}"

    def _constant(self, name: str, numbers: Sequence[int | None]) -> str:
        self._constants[f"native.{name}"] = np.array(numbers, np.int64)
        return f"native.{name}"


class _Program:
    """Writes operations that wait for nothing in between as the steps of one node.

    A norm, a product and an activation wait for what reads them: a matrix multiplies quantized activations, which come
    from either without float32 numbers in between, and a product can be added to what it is added to.

    Args:
        graph: the graph, whose ``matrices`` get those that are named.
        operations: by the values that they make, each after those that it reads.
        given: values that others make.
        taken: values that others read.
        head: the value that is the logits.
    """

    def __init__(
        self,
        graph: NativeGraph,
        operations: dict[str, Operation],
        given: Sequence[str],
        taken: Sequence[str],
        head: str | None,
    ) -> None:
        self.given, self.taken, self.head = list(given), list(taken), head
        self.weights: list[str] = []
        self._graph, self._operations = graph, operations
        self._left: dict[str, int] = defaultdict(int)  # readers that a value still has
        for operation in operations.values():
            for name in operation.reads:
                self._left[name] += 1
        for name in taken:
            self._left[name] += 1
        self._buffers: dict[str, list[int]] = {"floats": [], "acts": []}  # widths
        self._free: dict[int, list[int]] = defaultdict(list)  # float buffers by width
        self._floats: dict[str, int] = {}  # where values are
        self._acts: dict[str, int] = {}  # where they are as what matrices multiply
        self._waiting: set[str] = set()  # those that are not computed yet
        self._steps: list[str] = []
        at = 0
        for name in given:
            self._step("load", out=self._new(name), k=graph.width(name), at=at)
            at += graph.width(name)
        for name, operation in operations.items():
            if name == head:
                continue
            if isinstance(operation, Sum):
                self._sum(name, operation)
            elif isinstance(operation, Attended):
                self._attend(name, operation.rule)
            else:
                self._waiting.add(name)
        at = 0
        for name in taken:
            self._step("store", x=self._as_floats(name), k=graph.width(name), at=at)
            at += graph.width(name)
        if head is not None:
            self._logits(operations[head])

    @property
    def text(self) -> str:
        """The program."""
        declared = [f"{kind} {at} {width}" for kind, of in self._buffers.items() for at, width in enumerate(of)]
        lent = [f"lent {layer} {dim}" for layer, dim in enumerate(self._graph.layers())]
        if not any(step.startswith("attend") for step in self._steps):
            lent = []
        return "\n".join([*declared, *lent, *self._steps])

    def _step(self, op: str, /, **fields: float | str | None) -> None:
        words = [f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}"
                 for key, value in fields.items() if value is not None]  # fmt: skip
        self._steps.append(" ".join([op, *words]))

    def _buffer(self, kind: str, width: int) -> int:
        held = self._buffers[kind]
        if len(held) >= _MOST_BUFFERS:
            raise Unfit("too many values at once")
        held.append(width)
        return len(held) - 1

    def _new(self, name: str) -> int:
        """Place a value."""
        width = self._graph.width(name)
        self._floats[name] = self._free[width].pop() if self._free[width] else self._buffer("floats", width)
        return self._floats[name]

    def _done(self, *names: str) -> None:
        """Say that one reader has read these values."""
        for name in names:
            self._left[name] -= 1
            if self._left[name]:
                continue
            if name in self._waiting:
                self._waiting.remove(name)
                self._done(*self._operations[name].reads)
            elif name in self._floats:
                at = self._floats.pop(name)
                self._free[self._buffers["floats"][at]].append(at)
            self._acts.pop(name, None)

    def _computed(self, name: str) -> None:
        """Say that a value that waited was computed."""
        self._waiting.remove(name)
        self._done(*self._operations[name].reads)

    def _weight(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self.weights:
            self.weights.append(name)
        return self.weights.index(name)

    def _matrix(self, linear: Linear) -> int | None:
        self._graph.matrices[linear.key] = linear.packed
        return self._weight(f"{linear.key}.packed")

    def _norm(self, norm: Norm) -> dict[str, Any]:
        return {"norm": self._weight(norm.weight), "eps": norm.eps, "beta": self._weight(norm.bias),
                "center": 1 if norm.centered else None}  # fmt: skip

    # -- values --------------------------------------------------------------------------------------------------------

    def _as_floats(self, name: str) -> int:
        """Compute a value in its own buffer."""
        if name not in self._waiting:
            return self._floats[name]
        operation, width = self._operations[name], self._graph.width(name)
        if isinstance(operation, Normed):
            x = self._as_floats(operation.norm.x)
            self._step("norm", x=x, **self._norm(operation.norm), k=width, out=self._new(name))
        elif isinstance(operation, Linear):
            self._multiply(operation, self._new, name)
        elif isinstance(operation, Activation):
            by = None if operation.up is None else self._as_floats(operation.gate)
            source = operation.gate if operation.up is None else operation.up
            product = self._operations.get(source)
            if source in self._waiting and self._left[source] == 1 and isinstance(product, Linear):
                self._multiply(product, self._new, name)
            else:
                x = self._as_floats(source)
                self._step("norm", x=x, k=width, out=self._new(name), n=width)
            if by is None:
                self._step("activate", x=self._floats[name], k=width, fn=operation.fn)
            else:
                self._step("multiply", x=by, k=width, fn=operation.fn, out=self._floats[name])
        self._computed(name)
        return self._floats[name]

    def _multiply(self, linear: Linear, place: Callable[[str], int], name: str, add: int | None = None) -> None:
        act = self._as_acts(linear.x, linear)
        self._step("linear", act=act, w=self._matrix(linear), kind=KINDS[linear.bits], n=linear.n, k=linear.k,
                   bias=self._weight(linear.bias), out=place(name), add=add)  # fmt: skip

    def _as_acts(self, name: str, reader: Linear) -> int:
        """Turn a value into what a matrix multiplies."""
        if name in self._acts:
            return self._acts[name]
        operation, width = self._operations.get(name), self._graph.width(name)
        if name in self._waiting and isinstance(operation, Activation) and self._glu(name, operation, reader):
            return self._quantized(name)
        kind = KINDS[reader.bits]
        if name in self._waiting and isinstance(operation, Normed):
            x = self._as_floats(operation.norm.x)
            self._step("quantize", x=x, **self._norm(operation.norm), k=width, kind=kind, out=self._place(name, width))
        else:
            x = self._as_floats(name)
            self._step("quantize", x=x, k=width, kind=kind, out=self._place(name, width))
        return self._quantized(name)

    def _quantized(self, name: str) -> int:
        """Return where activations are; its sources are free once nothing else reads it."""
        if name in self._waiting and self._left[name] == 1:
            self._computed(name)
        return self._acts[name]

    def _place(self, name: str, width: int) -> int:
        """Place activations: where others of their width were that nothing reads any more, if there are such."""
        held = set(self._acts.values())
        free = [at for at, other in enumerate(self._buffers["acts"]) if other == width and at not in held]
        self._acts[name] = free[0] if free else self._buffer("acts", width)
        return self._acts[name]

    def _glu(self, name: str, operation: Activation, reader: Linear) -> bool:
        """Compute an activation of products as what a matrix multiplies, if that is possible."""
        names = operation.reads
        parts = [self._operations.get(one) for one in names]
        if len(set(names)) < len(names) or not all(one in self._waiting and self._left[one] == 1 for one in names):
            return False
        linears = [one for one in parts if isinstance(one, Linear)]
        if len(linears) < len(parts) or len({(one.x, one.bits) for one in linears}) > 1:
            return False
        if linears[0].bits != reader.bits:
            return False
        gate, up = linears[0], linears[1] if operation.up is not None else None
        act = self._as_acts(gate.x, gate)
        self._step("glu", act=act, gate=self._matrix(gate), up=None if up is None else self._matrix(up),
                   bias=self._weight(gate.bias), upbias=None if up is None else self._weight(up.bias),
                   kind=KINDS[gate.bits], n=gate.n, k=gate.k, out=self._place(name, gate.n),
                   fn=None if operation.fn == "silu" else operation.fn)  # fmt: skip
        return True

    # -- operations ----------------------------------------------------------------------------------------------------

    def _sum(self, name: str, operation: Sum) -> None:
        width = self._graph.width(name)
        for one in operation.reads:  # what a product multiplies: then it needs nothing else any more
            product = self._operations.get(one)
            if one in self._waiting and self._left[one] == 1 and isinstance(product, Linear):
                self._as_acts(product.x, product)
        to, other = operation.a, operation.b
        there = [one for one in operation.reads if one not in self._waiting and self._left[one] == 1]
        if there:
            to = there[0]
            other = operation.b if to == operation.a else operation.a
        if self._left[to] == 1 and to != other:
            self._as_floats(to)
            self._floats[name] = self._floats.pop(to)
        else:
            x = self._as_floats(to)
            self._step("norm", x=x, k=width, out=self._new(name), n=width)
        out = self._floats[name]
        product = self._operations.get(other)
        if other in self._waiting and self._left[other] == 1 and isinstance(product, Linear):
            self._multiply(product, lambda _: out, name, add=1)
        elif other in self._waiting and self._left[other] == 1 and isinstance(product, Normed):
            x = self._as_floats(product.norm.x)
            self._step("norm", x=x, **self._norm(product.norm), k=width, out=out, add=1)
        else:
            self._step("norm", x=self._as_floats(other), k=width, out=out, add=1)
        self._done(to, other)

    def _attend(self, name: str, rule: Attention) -> None:
        rows = [self._as_floats(one) for one in (rule.query.source, rule.key.source, rule.value)]
        norms = {"qnorm": rule.query.norm, "knorm": rule.key.norm}
        facts: dict[str, Any] = {key: self._weight(norm.weight) for key, norm in norms.items() if norm}
        eps = next((norm.eps for norm in norms.values() if norm), None)
        if rule.query.table is not None:
            table = rule.query.table
            tables = self._graph.rotary(table)
            facts |= {"rotary": tables[0], "cos": self._weight(tables[1]), "sin": self._weight(tables[2])}
        self._step("heads", qx=rows[0], kx=rows[1], vx=rows[2], dim=rule.dim, heads=rule.heads, kv=rule.kv, **facts,
                   eps=eps, layer=rule.layer, scale=rule.scale)  # fmt: skip
        self._done(rule.query.source, rule.key.source, rule.value)
        self._step("attend", out=self._new(name), layer=rule.layer, heads=rule.heads, kv=rule.kv, dim=rule.dim,
                   window=rule.window or None, cap=rule.cap or None)  # fmt: skip

    def _logits(self, operation: Operation) -> None:
        if not isinstance(operation, Linear):
            raise Unfit("the LM head is no product")
        x, facts = operation.x, {}
        above = self._operations.get(x)
        if x in self._waiting and isinstance(above, Normed):
            x, facts = above.norm.x, self._norm(above.norm)
        at, kind = self._as_floats(x), KINDS[operation.bits]
        act = self._buffer("acts", operation.k)
        self._step("quantize", x=at, **facts, k=operation.k, kind=kind, out=act, rows=1)
        self._step("logits", act=act, w=self._matrix(operation), kind=kind, n=operation.n, k=operation.k,
                   bias=self._weight(operation.bias))  # fmt: skip
