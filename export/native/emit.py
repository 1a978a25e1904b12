"""From an architecture to one ``Decoder`` node of native operators.

The node's attribute is a program, one step a line (runtimes/native/program.h); its inputs are the weights,
memory-mapped and used in place.  The operations of an architecture arrive one by one, as for the stock graph, and are
fused while they are written down: a norm waits for the matrices that read it, a matrix for what happens to its product.

::

    norm, q k v, rotation, cache  ->  quantize, heads        gate, up, gated  ->  quantize, glu
    attention                     ->  attend                 o / down, residual  ->  (quantize,) linear add=1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import TensorProto

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture
from edgespec.export.formats import Errors, stacked_shape
from edgespec.export.graph import EDGESPEC, GraphBuilder, WeightFile
from edgespec.export.native.formats import NativeFormat
from edgespec.export.ops import Kind, Linear
from edgespec.export.vectors import rope_vectors, stacked_bias, vector

PLAN, CONTROLS = 6, 8


@dataclass(frozen=True)
class Floats:
    """A float32 buffer [rows, width]."""

    id: int
    width: int


@dataclass(frozen=True)
class Normed:
    """A norm that is computed when a matrix needs it."""

    x: Floats
    weight: str


@dataclass(frozen=True)
class Acts:
    """Activations in the form that matrices multiply."""

    id: int
    width: int


@dataclass(frozen=True)
class Product:
    """A matrix product that waits for what happens to it; ``part`` of the matrices that share its input."""

    x: Value
    parts: tuple[Linear, ...]
    part: int


Value = Floats | Normed | Acts | Product


class NativeOps:
    """Collects the program of one decoder; ``save`` happens through ``graph``.

    Args:
        arch: the architecture.
        form: how its matrices are stored.
        weights: the weight file (or only its plan).
        errors: filled with the squared errors of the stored matrices.
    """

    def __init__(self, arch: Architecture, form: NativeFormat, weights: WeightFile, errors: Errors) -> None:
        self.arch, self.form, self.weights, self.errors = arch, form, weights, errors
        self.graph = GraphBuilder(weights)
        self._inputs: dict[str, int] = {}  # weight -> index among the node's weight inputs
        self._steps: list[str] = []
        self._buffers: dict[tuple[str, str], tuple[int, int]] = {}  # (floats or acts, use) -> id, width
        self._declared: list[str] = []
        self._ready: dict[tuple[Value, str, int], Acts] = {}  # what was quantized for this sub-layer
        *self._rope, self._rotary = rope_vectors(self.graph, arch)

    # -- the operations ------------------------------------------------------------------------------------------------

    def embed(self, weight: str) -> Value:
        facts = self.arch.facts
        out = self._floats("x", facts.hidden)
        if self.form.can_lookup(facts.hidden, self.arch.head.weight == weight):
            w = self._matrix((Linear(weight),), 0)
            self._step("embed", w=w, kind=self.form.kind(weight), n=facts.vocab, k=facts.hidden, out=out.id)
            return out
        names = self.form.store_rows(self.weights, self.arch.source, weight)
        inputs = [self._input(self.graph.stored(name)) for name in names]
        kind, bias = ("r8", inputs[1]) if len(inputs) > 1 else ("r32", -1)
        self._step("embed", w=inputs[0], kind=kind, n=facts.vocab, k=facts.hidden, out=out.id, bias=bias)
        return out

    def norm(self, x: Value, weight: str) -> Value:
        return Normed(self._as_floats(x, "normed"), weight)

    def linear(self, x: Value, *parts: Linear, joined: bool = False) -> tuple[Value, ...]:
        if joined:
            return tuple(Product(x, parts, i) for i in range(len(parts)))
        return tuple(Product(x, (part,), 0) for part in parts)

    def attention(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        facts = self.arch.facts
        if not (isinstance(q, Product) and isinstance(k, Product) and isinstance(v, Product) and q.x == k.x == v.x):
            raise ExportError("native operators expect q, k and v to be products of one input")
        parts = tuple(value.parts[value.part] for value in (q, k, v))
        act = self._acts(q.x, "hidden", parts)
        bias = self._bias(parts)
        self._step(
            "heads",
            act=act.id,
            w=self._matrix(parts, facts.head_dim),
            kind=self.form.kind(parts[0].weight),
            k=act.width,
            bias=bias,
            dim=facts.head_dim,
            heads=facts.heads,
            kv=facts.kv_heads,
            rotary=self._rotary,
            cos=self._input(self._rope[0]),
            sin=self._input(self._rope[1]),
            layer=layer,
            scale=facts.head_dim**-0.5,
        )
        out = self._floats("attention", facts.heads * facts.head_dim)
        self._step("attend", layer=layer, heads=facts.heads, kv=facts.kv_heads, dim=facts.head_dim, out=out.id)
        return out

    def gated(self, gate: Value, up: Value) -> Value:
        if not (isinstance(gate, Product) and isinstance(up, Product) and gate.x == up.x):
            raise ExportError("native operators expect gate and up to be products of one input")
        parts = gate.parts[gate.part], up.parts[up.part]
        act = self._acts(gate.x, "hidden", parts)
        n = self.arch.source.shape(parts[0].weight)[0]
        kind = self.form.kind(parts[0].weight)
        # a scale a row (c8) is known only when the whole row is: floats first
        out: Floats | Acts = self._floats("mlp", n) if kind == "c8" else Acts(self._buffer("acts", "mlp", n), n)
        w = [self._matrix((part,), 0) for part in parts]
        self._step("glu", act=act.id, gate=w[0], up=w[1], kind=kind, n=n, k=act.width, out=out.id,
                   bias=self._bias(parts[:1]), upbias=self._bias(parts[1:]))  # fmt: skip
        return out

    def sublayer(self, kind: Kind, layer: int, x: Value, body: Callable[[Value], Value]) -> Value:
        if not isinstance(x, Floats):
            raise ExportError("native operators expect a residual stream")
        self._ready.clear()
        outer, self._steps = self._steps, []
        y = body(x)
        if not isinstance(y, Product):
            raise ExportError("native operators expect a sub-layer to end in a matrix")
        self._multiply(y, x, add=True)
        inner, self._steps = self._steps, outer
        self._step("gate", index=2 * layer + (kind == "mlp"), skip=len(inner))
        self._steps += inner
        return x

    def head(self, x: Value, norm: str, head: Linear) -> Value:
        self._ready.clear()
        facts = self.arch.facts
        act = self._acts(Normed(self._as_floats(x, "x"), norm), "head", (head,), rows=1)
        w = self._matrix((head,), 0)
        self._step("logits", act=act.id, w=w, kind=self.form.kind(head.weight), n=facts.vocab, k=facts.hidden)
        self._close()
        return x

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _step(self, op: str, **fields: int | float | str) -> None:
        self._steps.append(" ".join([op, *(f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}"
                                           for key, value in fields.items())]))  # fmt: skip

    def _buffer(self, kind: str, use: str, width: int) -> int:
        key = kind, use
        if key not in self._buffers:
            number = sum(1 for other, _ in self._buffers if other == kind)
            self._buffers[key] = number, width
            self._declared.append(f"{kind} {number} {width}")
        number, known = self._buffers[key]
        if known != width:
            return self._buffer(kind, f"{use}.{width}", width)
        return number

    def _floats(self, use: str, width: int) -> Floats:
        return Floats(self._buffer("floats", use, width), width)

    def _as_floats(self, x: Value, use: str) -> Floats:
        """A value as float32, computing what still waits."""
        if isinstance(x, Floats):
            return x
        if isinstance(x, Product):
            out = self._floats(use, self.arch.source.shape(x.parts[x.part].weight)[0])
            self._multiply(Product(x.x, (x.parts[x.part],), 0), out, add=False)
            return out
        raise ExportError("native operators cannot norm what is normed or quantized already")

    def _acts(self, x: Value, use: str, parts: tuple[Linear, ...], rows: int = 0) -> Acts:
        """Activations of a value for these matrices, quantized once a sub-layer."""
        if isinstance(x, Acts):
            return x
        norm = x.weight if isinstance(x, Normed) else None
        floats = x.x if isinstance(x, Normed) else self._as_floats(x, use)
        kind = self.form.kind(parts[0].weight)
        form = "f32" if kind == "f32" else "c8" if kind == "c8" else "q4"  # q4 and q8 read the same activations
        key = x, form, rows
        if key not in self._ready:
            out = Acts(self._buffer("acts", use, floats.width), floats.width)
            self._step("quantize", x=floats.id, norm=-1 if norm is None else self._vector(norm),
                       eps=float(self.arch.eps), k=floats.width, kind=form, out=out.id, rows=rows)  # fmt: skip
            self._ready[key] = out
        return self._ready[key]

    def _multiply(self, product: Product, out: Floats, add: bool) -> None:
        parts = (product.parts[product.part],)
        act = self._acts(product.x, "inner", parts)
        n = self.arch.source.shape(parts[0].weight)[0]
        self._step(
            "linear",
            act=act.id,
            w=self._matrix(parts, 0),
            kind=self.form.kind(parts[0].weight),
            n=n,
            k=act.width,
            bias=self._bias(parts),
            out=out.id,
            add=int(add),
        )

    def _matrix(self, parts: tuple[Linear, ...], head_dim: int) -> int:
        names = [part.weight for part in parts]
        name = "+".join(names)
        if name not in self.weights.matrices:
            n, k = stacked_shape(self.arch.source, names)
            self.form.store(self.weights, self.arch.source, name, names, n, k, head_dim, self.errors)
            self.weights.matrices.add(name)
        return self._input(self.graph.stored(f"{name}.packed"))

    def _bias(self, parts: tuple[Linear, ...]) -> int:
        name = stacked_bias(self.graph, self.arch.source, parts)
        return -1 if name is None else self._input(name)

    def _vector(self, name: str) -> int:
        return self._input(vector(self.graph, self.arch.source, name))

    def _input(self, name: str) -> int:
        return self._inputs.setdefault(name, len(self._inputs))

    def _close(self) -> None:
        graph, vocab = self.graph, self.arch.facts.vocab
        inputs: dict[str, tuple[int, list[int | str]]] = {
            "plan": (TensorProto.INT64, [PLAN, "T"]),
            "rows": (TensorProto.INT64, ["R"]),
            "gates": (TensorProto.BOOL, [2 * self.arch.facts.layers]),
            "moves": (TensorProto.INT64, ["M", 3]),
            "kv": (TensorProto.UINT8, ["S", "B"]),
            "control": (TensorProto.INT64, [CONTROLS]),
            "tables": (TensorProto.FLOAT, ["N"]),
        }
        for name, (kind, dims) in inputs.items():
            graph.input(name, kind, dims)
        program = "\n".join([*self._declared, *self._steps])
        outputs: dict[str, tuple[int, list[int | str]]] = {"logits": (TensorProto.FLOAT, ["L", vocab]),
                   "ids": (TensorProto.INT64, ["R", "K"]),
                   "values": (TensorProto.FLOAT, ["R", "K"])}  # fmt: skip
        graph.node("Decoder", [*inputs, *self._inputs], list(outputs), domain=EDGESPEC, program=program,
                   constant_weights=1)  # fmt: skip
        for name, (kind, out_dims) in outputs.items():
            graph.output(name, kind, out_dims)
