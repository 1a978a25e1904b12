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

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture
from edgespec.export.formats import Errors
from edgespec.export.graph import WeightFile
from edgespec.export.heads import HeadPlan
from edgespec.export.native.formats import NativeFormat
from edgespec.export.native.heads import emit_heads
from edgespec.export.native.program import Acts, Floats, ProgramWriter, activation_form
from edgespec.export.ops import Kind, Linear
from edgespec.export.vectors import rope_vectors
from edgespec.runtimes.native_gates import Gates


@dataclass(frozen=True)
class Normed:
    """A norm that is computed when a matrix needs it."""

    x: Floats
    weight: str


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
        plan: heads beside the LM head; None = none.
    """

    def __init__(
        self,
        arch: Architecture,
        form: NativeFormat,
        weights: WeightFile,
        errors: Errors,
        plan: HeadPlan | None = None,
    ) -> None:
        self.arch, self.form, self.weights = arch, form, weights
        self.plan = plan or HeadPlan()
        self.gates = Gates(arch.facts.layers, len(self.plan.groups))
        self.program = ProgramWriter(arch, form, weights, errors)
        self.graph = self.program.graph
        self._started = False  # the first sub-layer has come
        self._ready: dict[tuple[Value, str], Acts] = {}  # what was quantized for this sub-layer
        *self._rope, self._rotary = rope_vectors(self.graph, arch)

    # -- the operations ------------------------------------------------------------------------------------------------

    def embed(self, weight: str) -> Value:
        facts = self.arch.facts
        out = self.program.floats("x", facts.hidden)
        if self.form.can_lookup(facts.hidden, self.arch.head.weight == weight):
            w = self.program.matrix((Linear(weight),))
            self.program.step("embed", w=w, kind=self.form.kind(weight), n=facts.vocab, k=facts.hidden, out=out.id)
            return out
        names = self.form.store_rows(self.weights, self.arch.source, weight)
        inputs = [self.program.input(self.graph.stored(name)) for name in names]
        kind, bias = ("r8", inputs[1]) if len(inputs) > 1 else ("r32", -1)
        self.program.step("embed", w=inputs[0], kind=kind, n=facts.vocab, k=facts.hidden, out=out.id, bias=bias)
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
        bias = self.program.bias(parts)
        self.program.step(
            "heads",
            act=act.id,
            w=self.program.matrix(parts, facts.head_dim),
            kind=self.form.kind(parts[0].weight),
            k=act.width,
            bias=bias,
            dim=facts.head_dim,
            heads=facts.heads,
            kv=facts.kv_heads,
            rotary=self._rotary,
            cos=self.program.input(self._rope[0]),
            sin=self.program.input(self._rope[1]),
            layer=layer,
            scale=facts.head_dim**-0.5,
        )
        out = self.program.floats("attention", facts.heads * facts.head_dim)
        self.program.step("attend", layer=layer, heads=facts.heads, kv=facts.kv_heads, dim=facts.head_dim, out=out.id)
        return out

    def gated(self, gate: Value, up: Value) -> Value:
        if not (isinstance(gate, Product) and isinstance(up, Product) and gate.x == up.x):
            raise ExportError("native operators expect gate and up to be products of one input")
        parts = gate.parts[gate.part], up.parts[up.part]
        act = self._acts(gate.x, "hidden", parts)
        n = self.arch.source.shape(parts[0].weight)[0]
        kind = self.form.kind(parts[0].weight)
        # a scale a row (c8) is known only when the whole row is: floats first
        out: Floats | Acts = self.program.floats("mlp", n) if kind == "c8" else self.program.acts("mlp", n)
        w = [self.program.matrix((part,)) for part in parts]
        self.program.step("glu", act=act.id, gate=w[0], up=w[1], kind=kind, n=n, k=act.width, out=out.id,
                   bias=self.program.bias(parts[:1]), upbias=self.program.bias(parts[1:]))  # fmt: skip
        return out

    def sublayer(self, kind: Kind, layer: int, x: Value, body: Callable[[Value], Value]) -> Value:
        if not isinstance(x, Floats):
            raise ExportError("native operators expect a residual stream")
        if not self._started:  # whatever an architecture does to the embedding belongs to it
            self._started = True
            self.program.gate_all(self.gates.embed)
            self.program.gated(self.gates.load, lambda: self.program.step("load", out=x.id, k=x.width))

        def steps() -> None:
            y = body(x)
            if not isinstance(y, Product):
                raise ExportError("native operators expect a sub-layer to end in a matrix")
            self._multiply(y, x, add=True)

        self._ready.clear()
        self.program.gated(2 * layer + (kind == "mlp"), steps)
        return x

    def head(self, x: Value, norm: str, head: Linear) -> Value:
        emit_heads(self.program, self._as_floats(x, "x"), norm, head, self.plan, self.gates)
        self.program.close(self.gates.count)
        return x

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _as_floats(self, x: Value, use: str) -> Floats:
        """A value as float32, computing what still waits."""
        if isinstance(x, Floats):
            return x
        if isinstance(x, Product):
            out = self.program.floats(use, self.arch.source.shape(x.parts[x.part].weight)[0])
            self._multiply(Product(x.x, (x.parts[x.part],), 0), out, add=False)
            return out
        raise ExportError("native operators cannot norm what is normed or quantized already")

    def _acts(self, x: Value, use: str, parts: tuple[Linear, ...]) -> Acts:
        """Activations of a value for these matrices, quantized once a sub-layer."""
        if isinstance(x, Acts):
            return x
        norm = x.weight if isinstance(x, Normed) else None
        floats = x.x if isinstance(x, Normed) else self._as_floats(x, use)
        key = x, activation_form(self.form.kind(parts[0].weight))
        if key not in self._ready:
            self._ready[key] = self.program.quantize(floats, use, parts[0].weight, norm=norm)
        return self._ready[key]

    def _multiply(self, product: Product, out: Floats, add: bool) -> None:
        parts = (product.parts[product.part],)
        self.program.linear(self._acts(product.x, "inner", parts), parts, out, add=add)
