"""From an architecture to one ``Decoder`` node of native operators.

The node's attribute is a program, one step a line (runtimes/native/program.h); its inputs are the weights,
memory-mapped and used in place.  The operations of an architecture arrive one by one, as for the stock graph, and are
fused while they are written down: a norm waits for the matrices that read it, a matrix for what happens to its product.

::

    norm, q k v, rotation, cache  ->  quantize, heads        gate, up, gated  ->  quantize, glu
    attention                     ->  attend                 o / down, residual  ->  (quantize,) linear add=1
    o / down, norm, residual      ->  linear, norm add=1     up, activate  ->  linear, activate
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edgespec.errors import ExportError
from edgespec.export.architectures.ops import (
    Activation,
    AttentionRule,
    ConvolutionRule,
    DeltaRule,
    ExpertsRule,
    Kind,
    LayerEmbedding,
    Linear,
    Norm,
)
from edgespec.export.emit.native_heads import emit_heads
from edgespec.export.emit.plan import StoragePlan
from edgespec.export.emit.program import Acts, Floats, ProgramWriter, activation_form
from edgespec.export.emit.values import Given, Mixture, Normed, Product, Value
from edgespec.export.emit.vectors import rope_vectors
from edgespec.runtimes.slots.native_runner import Gates


class NativeOps:
    """Collects the program of one decoder; ``save`` happens through ``graph``.

    Args:
        storage: where the weights lie, those of heads included.
    """

    def __init__(self, storage: StoragePlan) -> None:
        self.arch, self.storage, self.plan = storage.arch, storage, storage.heads
        self.gates = Gates(self.arch.facts.layers, len(self.plan.groups), bool(self.plan.tapped))
        self.program = ProgramWriter(storage)
        self.graph = self.program.graph
        self._inside = False  # a sub-layer
        self._beside = 0  # norms computed between sub-layers, in this layer
        self._ready: dict[tuple[Value, str], Acts] = {}  # what was quantized for this sub-layer

    # -- the operations ------------------------------------------------------------------------------------------------

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> Value:
        facts, program = self.arch.facts, self.program
        out = program.floats("x", facts.hidden)
        more: dict[str, int | float] = {"scale": float(scale)} if scale != 1 else {}
        if positions is not None:
            more["positions"] = program.stored(positions)
        self._look_up(weight, out, more)
        program.gate_all(self.gates.embed)
        program.gated(self.gates.load, lambda: program.step("load", out=out.id, k=out.width))
        return out

    def input_slice(self, first: int, width: int) -> Value:
        return Given(first, width)

    def select_input(self, fused: Callable[[], Value], recycled: Callable[[], Value]) -> Value:
        out = self.program.floats("x", self.arch.facts.hidden)
        self._inside = True  # a norm waits for what reads it
        self.program.gated(self.gates.embed, lambda: self._write(fused(), out))
        self._ready.clear()
        self.program.gated(self.gates.load, lambda: self._write(recycled(), out))
        self._inside = False
        self._ready.clear()
        return out

    def prefill_context(self, context: Callable[[], None]) -> None:
        self._inside = True
        self.program.gated(self.gates.embed, context)
        self._inside = False
        self._ready.clear()

    def append(self, q: Value, k: Value, v: Value, rule: AttentionRule) -> None:
        self._heads(q, k, v, rule)

    def join(self, *parts: Value) -> Value:
        rows = [part if isinstance(part, Normed) else self._as_floats(part, "given") for part in parts]
        floats = [part.x if isinstance(part, Normed) else part for part in rows]
        out, at = self.program.floats("joined", sum(x.width for x in floats)), 0
        for part, x in zip(rows, floats, strict=True):
            norm = self.program.norm(part.norm) if isinstance(part, Normed) else {"norm": -1}
            self.program.step("norm", x=x.id, **norm, k=x.width, out=out.id, n=out.width, at=at)
            at += x.width
        return out

    def token_embeddings(self, weight: str, scale: float) -> Value:
        out = self.program.floats("embedded", self.arch.facts.hidden)
        self._look_up(weight, out, {"scale": float(scale)})
        return out

    def norm(self, x: Value, norm: Norm) -> Value:
        # a buffer for each projection: q and k wait side by side
        use = x.parts[x.part].weight.split(".")[-2] if isinstance(x, Product) else "normed"
        floats = self._as_floats(x, use)
        if self._inside:
            return Normed(floats, norm)
        self._beside += 1  # the stream will have changed before anybody reads it
        return self._computed(Normed(floats, norm), f"beside.{self._beside}")

    def linear(self, x: Value, *parts: Linear, joined: bool = False) -> tuple[Value, ...]:
        if joined:
            return tuple(Product(x, parts, i) for i in range(len(parts)))
        return tuple(Product(x, (part,), 0) for part in parts)

    def attention(self, q: Value, k: Value | None, v: Value | None, rule: AttentionRule) -> Value:
        facts, program, dim = self.arch.facts, self.program, rule.dim or self.arch.facts.head_dim
        self._heads(q, k, v, rule)
        out = program.floats("attention", facts.heads * dim)
        limits = {"window": rule.window} if rule.window else {}
        caps = {"cap": float(rule.cap)} if rule.cap else {}
        program.step("attend", layer=rule.layer, heads=facts.heads, kv=facts.kv_heads, dim=dim, out=out.id,
                     **limits, **caps)  # fmt: skip
        return out

    def convolution(self, x: Value, rule: ConvolutionRule) -> Value:
        program, hidden = self.program, self.arch.facts.hidden
        floats, out = self._as_floats(x, "mixed"), program.floats("convolution", hidden)
        more = {} if rule.bias is None else {"bias": program.vector(rule.bias)}
        program.step("convolve", x=floats.id, k=hidden, length=rule.length, layer=rule.layer,
                     w=program.vector(rule.taps), out=out.id, **more)  # fmt: skip
        return out

    def delta(self, x: Value, z: Value, a: Value, b: Value, rule: DeltaRule) -> Value:
        program, facts = self.program, self.arch.facts
        assert facts.delta is not None
        heads = facts.delta
        read = ("x", "mixed", x), ("z", "open", z), ("a", "decay", a), ("b", "change", b)
        rows = {key: self._as_floats(value, use).id for key, use, value in read[: 3 if rule.skip else 4]}
        out = program.floats("delta", heads.values * heads.value_dim)
        program.step("delta", **rows, k=heads.mixed, length=facts.taps, layer=rule.layer, heads=heads.values,
                     kv=heads.keys, dim=heads.key_dim, n=heads.value_dim, out=out.id,
                     eps=float(self.arch.eps if rule.eps is None else rule.eps),
                     **({"scale": float(rule.times)} if rule.times != 1 else {}),
                     **{key: program.vector(name) for key, name in rule.vectors.items()})  # fmt: skip
        return out

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        out, by = self._as_floats(x, "attention"), self._as_floats(gate, "open")
        more = {"times": out.width // by.width} if by.width < out.width else {}
        self.program.step("multiply", x=by.id, k=out.width, fn="sigmoid", out=out.id, **more)
        return out

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        if not (isinstance(gate, Product) and isinstance(up, Product) and gate.x == up.x):
            raise ExportError("native operators expect gate and up to be products of one input")
        parts = gate.parts[gate.part], up.parts[up.part]
        act = self._acts(gate.x, "hidden", parts)
        n = self.storage.width(parts[0])
        kind = self.program.kind(parts[0].weight)
        # a scale a row (c8) is known only when the whole row is: floats first
        out: Floats | Acts = self.program.floats("mlp", n) if kind == "c8" else self.program.acts("mlp", n)
        w = [self.program.matrix(part) for part in parts]
        other = {} if activation == "silu" else {"fn": activation}
        self.program.step("glu", act=act.id, gate=w[0], up=w[1], kind=kind, n=n, k=act.width, out=out.id, **other,
                   bias=self.program.bias(parts[:1]), upbias=self.program.bias(parts[1:]))  # fmt: skip
        return out

    def activate(self, x: Value, activation: Activation, numbers: str | None = None) -> Value:
        out = self._as_floats(x, "mlp")
        more = {"w": self.program.vector(numbers)} if numbers else {}
        self.program.step("activate", x=out.id, k=out.width, fn=activation, rows=0, **more)
        return out

    def experts(self, h: Value, rule: ExpertsRule, activation: Activation) -> Value:
        return Mixture(h, rule, activation)

    def layer_embedding(self, gate: Value, given: Value, rule: LayerEmbedding, activation: Activation) -> Value:
        program, table = self.program, f"{rule.table}.table"
        out, base = self._as_floats(gate, "layer gate"), self._as_floats(given, "layer")
        program.step("blend", x=out.id, base=base.id, **self._rows(table), n=self.arch.facts.vocab, k=rule.width,
                     times=rule.layers, first=rule.layer, scale=float(rule.scale), fn=activation)  # fmt: skip
        return out

    def sublayer(
        self, kind: Kind, layer: int, x: Value, body: Callable[[Value], Value], scale: str | None = None
    ) -> Value:
        x = self._as_floats(x, "x")
        if kind == "attention":
            self._tap(x, layer)

        def steps() -> None:
            y = body(x)
            if isinstance(y, Normed):
                self._norm(y, x, add=1, scale=1.0 if scale is None else float(self.arch.source.read(scale)[0]))
            elif isinstance(y, Product):
                self._multiply(y, x, add=True)
            elif isinstance(y, Mixture):
                self._mix(y, x, add=True)
            else:
                raise ExportError("native operators expect a sub-layer to end in a matrix, or in its norm")

        self._ready.clear()
        self._inside = True
        if kind == "embedding" or (kind == "attention" and self.arch.facts.shared and self.arch.rule(layer).gives):
            self.program.gated(2 * layer, steps, 2 * layer + 1)
        else:
            self.program.gated(2 * layer + (kind == "mlp"), steps)
        self._inside = False
        self._beside = 0 if kind == "mlp" else self._beside
        return x

    def head(self, x: Value, norm: Norm, head: Linear) -> Value:
        floats = self._as_floats(x, "x")
        self._tap(floats, self.arch.facts.layers)
        emit_heads(self.program, floats, norm, head, self.plan, self.gates)
        self.program.close(self.gates.count)
        return x

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _heads(self, q: Value, k: Value | None, v: Value | None, rule: AttentionRule) -> None:
        """Queries, keys and values of a layer."""
        facts, program, dim = self.arch.facts, self.program, rule.dim or self.arch.facts.head_dim
        fields: dict[str, int | float] = {"dim": dim, "heads": facts.heads, "kv": facts.kv_heads,
                                          "layer": rule.layer, "scale": float(rule.scale)}  # fmt: skip
        if rule.rotary:
            cos, sin, growth, turned = rope_vectors(self.graph, self.storage, rule.rotary)
            fields |= {"rotary": turned, "cos": program.input(cos), "sin": program.input(sin)}
            fields |= {"growth": program.input(growth)} if growth else {}
        norms = {"qnorm": rule.q_norm, "knorm": rule.k_norm, "vnorm": rule.v_norm}
        if any(norms.values()):
            fields |= {name: program.vector(norm.weight) for name, norm in norms.items() if norm}
            fields |= {"eps": float(self.arch.eps)} | ({"late": 1} if rule.late_norms else {})
        given = [value for value in (q, k, v) if value is not None]
        products = [value for value in given if isinstance(value, Product)]
        if len(products) == len(given) and isinstance(q, Product) and all(value.x == q.x for value in products):
            parts = tuple(value.parts[value.part] for value in products)
            fields |= {"shared": 1} if k is None else {}
            act = self._acts(q.x, "hidden", parts)
            program.step("heads", act=act.id, w=program.matrix(*parts), k=act.width,
                         kind=self.program.kind(parts[0].weight), bias=program.bias(parts), **fields)  # fmt: skip
        else:
            rows = [self._as_floats(value, use) for value, use in zip(given, ("query", "key", "value"), strict=True)]
            program.step("heads", qx=rows[0].id, kx=rows[1].id, vx=rows[2].id, **fields)

    def _tap(self, x: Floats, layers: int) -> None:
        """Give the residual stream after so many layers, where it is tapped."""
        for at in [i for i, tapped in enumerate(self.plan.tapped) if tapped == layers]:
            store = partial(self.program.step, "store", x=x.id, k=x.width, at=(1 + at) * x.width)
            self.program.gated(self.gates.taps, store)

    def _write(self, x: Value, out: Floats) -> None:
        """A value into a buffer."""
        if isinstance(x, Given):
            self.program.step("load", out=out.id, k=x.width, at=x.first)
        elif isinstance(x, Normed):
            self._norm(x, out)
        elif isinstance(x, Product):
            self._multiply(x, out, add=False)
        else:
            raise ExportError("native operators expect what a pass is given, its norm or a product")

    def _look_up(self, weight: str, out: Floats, more: dict[str, int | float]) -> None:
        """Rows of the embedding into a buffer."""
        program, sizes = self.program, {"n": self.arch.facts.vocab, "k": out.width, "out": out.id}
        if (table := f"{weight}.table") in self.storage.entries:
            program.step("embed", **self._rows(table), **sizes, **more)
        else:
            program.step("embed", w=program.matrix(Linear(weight)), kind=program.kind(weight), **sizes, **more)

    def _rows(self, table: str) -> dict[str, int | str]:
        """A table that is only looked up, as steps name it."""
        scales = f"{table}_scales"
        if scales not in self.storage.entries:
            return {"w": self.program.stored(table), "kind": "r32"}
        return {"w": self.program.stored(table), "kind": "r8", "bias": self.program.stored(scales)}

    def _as_floats(self, x: Value, use: str) -> Floats:
        """A value as float32, computing what still waits."""
        if isinstance(x, Floats):
            return x
        if isinstance(x, Given):
            out = self.program.floats(f"given {x.first}", x.width)
            self._write(x, out)
            return out
        if isinstance(x, Product):
            out = self.program.floats(use, self.storage.width(x.parts[x.part]))
            self._multiply(Product(x.x, (x.parts[x.part],), 0), out, add=False)
            return out
        if isinstance(x, Normed):
            return self._computed(x, f"normed {use}")
        if isinstance(x, Mixture):
            out = self.program.floats(use, self.arch.facts.hidden)
            self._mix(x, out, add=False)
            return out
        raise ExportError("native operators cannot turn quantized activations into floats")

    def _computed(self, x: Normed, use: str) -> Floats:
        """A norm as floats, now."""
        out = self.program.floats(use, x.x.width)
        self._norm(x, out)
        return out

    def _norm(self, x: Normed, out: Floats, add: int = 0, scale: float = 1.0) -> None:
        more: dict[str, int | float] = ({"add": add} if add else {}) | ({"scale": scale} if scale != 1 else {})
        self.program.step("norm", x=x.x.id, **self.program.norm(x.norm), k=x.x.width, out=out.id, **more)

    def _acts(self, x: Value, use: str, parts: tuple[Linear, ...]) -> Acts:
        """Activations of a value for these matrices, quantized once a sub-layer."""
        if isinstance(x, Acts):
            return x
        norm = x.norm if isinstance(x, Normed) else None
        floats = x.x if isinstance(x, Normed) else self._as_floats(x, use)
        key = x, activation_form(self.program.kind(parts[0].weight))
        if key not in self._ready:
            self._ready[key] = self.program.quantize(floats, use, parts[0].weight, norm=norm)
        return self._ready[key]

    def _mix(self, mixture: Mixture, out: Floats, add: bool) -> None:
        program, facts, rule = self.program, self.arch.facts.experts, mixture.rule
        assert facts is not None
        router, gate, up, down = map(Linear, (rule.router, rule.gate, rule.up, rule.down))
        scores, chosen = program.floats("router", facts.count), program.floats("chosen", 2 * facts.chosen)
        program.linear(self._acts(mixture.x, "routed", (router,)), (router,), scores)
        act = self._acts(mixture.x, "hidden", (gate,))
        how: dict[str, int | str] = {"first": rule.always} if rule.always else {}
        how |= ({"fn": "sigmoid"} if rule.sigmoid else {}) | ({"bias": program.vector(rule.bias)} if rule.bias else {})
        program.step("route", x=scores.id, n=facts.count, k=facts.chosen, out=chosen.id, scale=float(rule.scale),
                     add=int(rule.normed), **how)  # fmt: skip
        other = {} if mixture.activation == "silu" else {"fn": mixture.activation}
        program.step("experts", act=act.id, x=chosen.id, gate=program.matrix(gate), up=program.matrix(up),
                     w=program.matrix(down), kind=program.kind(rule.gate), n=facts.inner, k=act.width,
                     times=facts.count, heads=facts.chosen, out=out.id, add=int(add), **other)  # fmt: skip

    def _multiply(self, product: Product, out: Floats, add: bool) -> None:
        parts = (product.parts[product.part],)
        self.program.linear(self._acts(product.x, "inner", parts), parts, out, add=add)
