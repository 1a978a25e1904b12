"""From a trace to the program of one ``Decoder`` node of native operators.

The node's attribute is a program, one step a line (edgespec/runtimes/native/steps.inl); its inputs are the weights,
memory-mapped and used in place.  Passes rewrite the trace first, so that an operation is a step or few (``fusions``);
then a norm waits for the matrices that read it, and a product for the buffer that it goes to (``native_values``).  The
plan of the weight file stores what the program names.

::

    norm, project_and_attend      ->  quantize, heads, attend     norm, glu         ->  quantize, glu
    norm, project_and_look_up     ->  quantize, heads, attend     add_product       ->  (quantize,) linear add=1
    add_norm of a product         ->  linear, norm add=1          activate          ->  linear, activate
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from edgespec.export.architectures.ops import Activation, Block, Kind
from edgespec.export.architectures.rules import (
    AttentionRule,
    ConvolutionRule,
    DeltaRule,
    DepthwiseRule,
    ExpertsRule,
    LayerEmbedding,
    Linear,
    MemoryRule,
    Norm,
)
from edgespec.export.architectures.shapes import Shapes
from edgespec.export.architectures.trace import Pass
from edgespec.export.drafters.heads import EMBEDDED as OWN_EMBEDDING
from edgespec.export.drafters.heads import MARKOV_OUT, MARKOV_TOKENS
from edgespec.export.emit.fusions import fuse
from edgespec.export.emit.native_heads import emit_heads
from edgespec.export.emit.native_values import (
    LazyActivation,
    LazyExperts,
    LazyNorm,
    LazyProduct,
    LazySlice,
    Value,
    Waiting,
)
from edgespec.export.emit.program import Field, Fields, Floats, NativePlan
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.slots.native_runner import Gates


def lower(trace: Block, plan: NativePlan) -> None:
    """Write the program of a trace, whose heads are those of the plan; the plan stores what it names."""
    NativeOps(plan).run(trace)
    plan.place_low()


class NativeOps(Waiting, Pass[Value]):
    """Writes the program of one decoder."""

    handled_fields: ClassVar[dict[type, str]] = Shapes.handled_fields | {
        AttentionRule: "layer scale rotary window cap q_norm.weight k_norm.weight v_norm.weight late_norms dim gives "
        "relative after sinks"
    }

    def __init__(self, plan: NativePlan) -> None:
        super().__init__(plan)
        self.heads = plan.heads
        self.gates = Gates(self.arch.facts.layers, len(self.heads.groups), bool(self.heads.tapped), plan.planes,
                           self.arch.encoder is not None)  # fmt: skip
        self.program.gates, self.program.plane = self.gates.count, self.gates.head_plane
        self._inside = False  # a sub-layer
        self._beside = 0  # norms computed between sub-layers, in this layer

    @classmethod
    def lacks(cls, trace: Block) -> str:
        """Name the operations of a model that this pass does not handle, once they are fused; "" = none."""
        return super().lacks(fuse(trace))

    def interpret(self, trace: Block) -> Value:
        """Write a trace down; it is fused where the matrices of a kernel are of one kind, as a file's may not be."""
        return super().interpret(fuse(trace, self.alike))

    # -- the operations ------------------------------------------------------------------------------------------------

    def embed(self, weight: str, scale: float, positions: str | None) -> Value:
        facts, program = self.arch.facts, self.program
        out = program.floats("x", facts.hidden)
        more: Fields = {"scale": None if scale == 1 else float(scale)}
        if positions is not None:
            self.plan.store_positions(positions)
            more["positions"] = program.input(positions)
        program.gated(self.gates.embed, lambda: self._begin(weight, out, more))
        program.gated(self.gates.load, lambda: program.step("load", out=out.id, k=out.width))
        return out

    def input_slice(self, first: int, width: int) -> Value:
        return LazySlice(first, width)

    def select_input(self, fused: Callable[[], Value], recycled: Callable[[], Value]) -> Value:
        out = self.program.floats("x", self.arch.facts.hidden)
        self._apart(self.gates.embed, lambda: self._write(fused(), out))
        self._apart(self.gates.load, lambda: self._write(recycled(), out))
        return out

    def prefill_context(self, context: Callable[[], None]) -> None:
        self._apart(self.gates.embed, context)

    def project_and_append(self, x: Value, parts: tuple[Linear, ...], rule: AttentionRule) -> None:
        self._project(x, parts, rule)

    def fill_memory(self, memory: Callable[[], None]) -> None:
        self._apart(self.gates.fill, memory)

    def project_memory(self, x: Value, parts: tuple[Linear, ...], rule: MemoryRule) -> None:
        self._memory_heads(x, parts, rule)

    def project_and_look_up(self, x: Value, parts: tuple[Linear, ...], rule: MemoryRule) -> Value:
        self._memory_heads(x, parts, rule, shared=1, scale=float(rule.scale))
        facts, program = self.arch.facts, self.program
        out = program.floats("attention", facts.heads * facts.head_dim)
        program.step("attend", layer=rule.layer, heads=facts.heads, kv=facts.kv_heads, dim=facts.head_dim, out=out.id,
                     memory=1)  # fmt: skip
        return out

    def _apart(self, gate: int, body: Callable[[], None]) -> None:
        """Put steps outside sub-layers behind a gate; inside, a norm is computed by the step that reads it."""
        self._inside = True
        self.program.gated(gate, body)
        self._inside = False
        self._ready.clear()

    def _memory_heads(self, x: Value, parts: tuple[Linear, ...], rule: MemoryRule, **more: Field) -> None:
        facts, program = self.arch.facts, self.program
        act = self._acts(x, "hidden", parts)
        program.step("heads", act=act.id, **program.matrix(*parts, head_dim=facts.head_dim), k=act.width,
                     bias=program.bias(parts), dim=facts.head_dim, heads=facts.heads, kv=facts.kv_heads,
                     layer=rule.layer, memory=1, **more)  # fmt: skip

    def place(self, x: Value, positions: str) -> Value:
        out = self._as_floats(x, "x")
        self.plan.store_positions(positions)
        self.program.step("place", x=out.id, k=out.width, positions=self.program.input(positions))
        return out

    def insert(self, x: Value, first: int) -> Value:
        out = self._as_floats(x, "x")
        gate = 2 * (first // out.width - 1)  # the layer's
        step = partial(self.program.step, "insert", x=out.id, k=out.width, at=first, add=1)
        self.program.gated(gate, step, gate + 1)
        return out

    def add_product(self, to: Value, x: Value, part: Linear) -> Value:
        out = self._as_floats(to, "x")
        self._multiply(LazyProduct(x, part), out, add=True)
        return out

    def add_norm(self, to: Value, x: Value, norm: Norm, scale: str | None) -> Value:
        out = self._as_floats(to, "x")
        self._norm(LazyNorm(self._as_floats(x, self._buffer(x)), norm), out, add=1, scale=scale)
        return out

    def add_rows(self, to: Value, x: Value) -> Value:
        out, rows = self._as_floats(to, "x"), self._as_floats(x, "given")
        self.program.step("norm", x=rows.id, k=rows.width, out=out.id, add=1)
        return out

    def add_experts(
        self, to: Value, h: Value, rule: ExpertsRule, activation: Activation, by: Value | None = None
    ) -> Value:
        out = self._as_floats(to, "x")
        self._mix(LazyExperts(h, rule, activation, by), out, add=True)
        return out

    def encoded(self, x: Value, norm: Norm | None) -> Value:
        rows = self._as_floats(x, "x")
        self._tap(rows, self.arch.facts.layers)

        def steps() -> None:
            if norm is not None:
                self._norm(LazyNorm(rows, norm), rows)
            self.program.step("store", x=rows.id, k=rows.width)

        self.program.gated(self.gates.hidden, steps)
        return rows

    def join(self, parts: tuple[Value, ...]) -> Value:
        out, at = self.program.floats("joined", sum(map(self._width, parts))), 0
        for part in parts:
            x = part.x if isinstance(part, LazyNorm) else self._as_floats(part, "given")
            norm = self.program.norm(part.norm) if isinstance(part, LazyNorm) else {"norm": -1}
            self.program.step("norm", x=x.id, **norm, k=x.width, out=out.id, n=out.width, at=at)
            at += x.width
        return out

    def token_embeddings(self, weight: str, scale: float) -> Value:
        out = self.program.floats("embedded", self.arch.facts.hidden)
        self._begin(weight, out, {"scale": float(scale)})
        return out

    def norm(self, x: Value, norm: Norm) -> Value:
        floats = self._as_floats(x, self._buffer(x))
        if self._inside:
            return LazyNorm(floats, norm)
        self._beside += 1  # the stream will have changed before the result is read
        return self._computed(LazyNorm(floats, norm), f"beside.{self._beside}")

    def linear(self, x: Value, parts: tuple[Linear, ...], joined: bool) -> tuple[Value, ...]:
        return tuple(LazyProduct(x, part) for part in parts)

    def project_and_attend(self, x: Value, parts: tuple[Linear, ...], rule: AttentionRule) -> Value:
        self._project(x, parts, rule)
        return self._attend(rule)

    def attention(self, q: Value, k: Value, v: Value, rule: AttentionRule) -> Value:
        fields, given = self._head_fields(rule), zip((q, k, v), ("query", "key", "value"), strict=True)
        rows = [self._as_floats(value, use).id for value, use in given]
        self.program.step("heads", qx=rows[0], kx=rows[1], vx=rows[2], **fields)
        return self._attend(rule)

    def _attend(self, rule: AttentionRule) -> Value:
        facts, program, dim = self.arch.facts, self.program, rule.dim or self.arch.facts.head_dim
        out = program.floats("attention", facts.heads * dim)
        near = rule.relative
        by_place = {} if near is None else {"relative": program.vector(near.table), "n": near.size, "at": near.distance}
        seen = {"window": rule.window or None, "after": rule.after}
        program.step("attend", layer=self._layer(rule), heads=facts.heads, kv=facts.kv_heads, dim=dim, out=out.id,
                     cap=float(rule.cap) or None, sinks=program.vector(rule.sinks), **seen, **by_place)  # fmt: skip
        return out

    def convolution(self, x: Value, rule: ConvolutionRule) -> Value:
        program, hidden = self.program, self.arch.facts.hidden
        floats, out = self._as_floats(x, "mixed"), program.floats("convolution", hidden)
        bias = program.vector(rule.bias)
        program.step("convolve", x=floats.id, k=hidden, length=rule.length, layer=rule.layer,
                     w=program.vector(rule.taps), out=out.id, bias=bias)  # fmt: skip
        return out

    def depthwise(self, x: Value, rule: DepthwiseRule, by: Value | None) -> Value:
        program = self.program
        floats = self._as_floats(x, "mixed")
        out = program.floats("convolution", floats.width)
        more: Fields = {}
        if by is not None:
            if not rule.second:
                self._taps = self._as_floats(by, "taps")
            more = {"b": self._taps.id, "n": rule.groups, "at": rule.length * rule.groups if rule.second else None}
        program.step("depthwise", x=floats.id, k=floats.width, length=rule.length, w=program.vector(rule.taps),
                     out=out.id, bias=program.vector(rule.bias), **more)  # fmt: skip
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
                     scale=None if rule.times == 1 else float(rule.times),
                     **{key: program.vector(name) for key, name in rule.vectors.items()})  # fmt: skip
        return out

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        out, by = self._as_floats(x, "attention"), self._as_floats(gate, "open")
        times = out.width // by.width if by.width < out.width else None
        self.program.step("multiply", x=by.id, k=out.width, fn="sigmoid", out=out.id, times=times)
        return out

    def glu(self, x: Value, parts: tuple[Linear, ...], activation: Activation) -> Value:
        return LazyActivation(x, parts, activation)

    def activate(self, x: Value, activation: Activation, numbers: str | None) -> Value:
        return self._activate(x, activation, numbers)

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        by, out = self._as_floats(gate, "gate"), self._as_floats(up, "mlp")
        self.program.step("multiply", x=by.id, k=out.width, fn=activation, out=out.id)
        return out

    def experts(self, h: Value, rule: ExpertsRule, activation: Activation, by: Value | None = None) -> Value:
        return LazyExperts(h, rule, activation, by)

    def sum(self, x: Value, y: Value) -> Value:
        assert isinstance(y, LazyNorm)  # as ``Ops.sum`` says
        out = self._as_floats(x, "sum")
        self._norm(y, out, add=1)
        return out

    def layer_embedding(self, gate: Value, base: Value, rule: LayerEmbedding, activation: Activation) -> Value:
        program, table = self.program, f"{rule.table}.table"
        out, added = self._as_floats(gate, "layer gate"), self._as_floats(base, "layer")
        self.plan.store_table(rule.table, rule.layers)
        program.step("blend", x=out.id, base=added.id, **self._rows(table), n=self.arch.facts.vocab, k=rule.width,
                     times=rule.layers, first=rule.layer, scale=float(rule.scale), fn=activation)  # fmt: skip
        return out

    def residual(self, kind: Kind, layer: int, x: Value, body: Callable[[Value], Value], norm: Norm | None) -> Value:
        x = self._as_floats(x, "x")
        if kind == "attention":
            self._tap(x, layer)

        def steps() -> None:
            if norm is not None:
                self._norm(LazyNorm(x, norm), x)
            body(x)

        self._ready.clear()
        self._inside = True
        gate = 2 * layer + (kind in ("mlp", "embedding"))
        self.program.plane = self.gates.plane(gate)
        if kind == "embedding" or (kind == "attention" and self.arch.facts.shared and self.arch.rule(layer).gives):
            self.program.gated(2 * layer, steps, 2 * layer + 1)
        else:
            self.program.gated(gate, steps)
        self._inside = False
        self.program.plane = self.gates.head_plane
        self._beside = 0 if kind == "mlp" else self._beside
        return x

    def head(self, x: Value, norm: Norm | None, head: Linear) -> Value:
        floats = self.program.floats("x", self.arch.facts.hidden) if norm is None else self._as_floats(x, "x")
        self._tap(floats, self.arch.facts.layers)
        for number, group in enumerate(self.heads.groups):
            if group.kind == "embedding":  # replaces the output of the layers
                self.program.gated(self.gates.heads[number], lambda: self._look_up(OWN_EMBEDDING, floats, {}))
        emit_heads(self.program, floats, norm, head, self.gates, lambda: self._as_floats(x, "x"))
        for number, group in enumerate(self.heads.groups):
            if group.kind == "markov":
                self.program.gated(self.gates.heads[number], partial(self._markov, group))
        return x

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _markov(self, group: HeadGroup) -> None:
        """Write what a pass's tokens add to the logits of the guesses after them."""
        out = self.program.floats("markov", group.inner)
        self._look_up(MARKOV_TOKENS, out, {})
        act = self.program.quantize(out, "markov", MARKOV_OUT, rows=1)
        self.program.logits(act, Linear(MARKOV_OUT), raw=True)

    def _project(self, x: Value, parts: tuple[Linear, ...], rule: AttentionRule) -> None:
        """Compute queries, keys and values of a layer, or only queries if another layer provides the rest."""
        fields, shared = self._head_fields(rule), 1 if len(parts) == 1 else None
        act = self._acts(x, "hidden", parts)
        matrix = self.program.matrix(*parts, head_dim=rule.dim or self.arch.facts.head_dim)
        self.program.step("heads", act=act.id, **matrix, k=act.width, bias=self.program.bias(parts), **fields,
                          shared=shared)  # fmt: skip

    def _head_fields(self, rule: AttentionRule) -> Fields:
        """Say how heads are normed, rotated and stored."""
        facts, program = self.arch.facts, self.program
        fields: Fields = {"dim": rule.dim or facts.head_dim, "heads": facts.heads, "kv": facts.kv_heads,
                          "layer": self._layer(rule), "scale": float(rule.scale)}  # fmt: skip
        if rule.rotary:
            fields |= program.rotation(rule.rotary)
        norms = {"qnorm": rule.q_norm, "knorm": rule.k_norm, "vnorm": rule.v_norm}
        if any(norms.values()):
            fields |= {name: program.vector(norm.weight) for name, norm in norms.items() if norm}
            fields |= {"eps": float(self.arch.eps), "late": 1 if rule.late_norms else None}
        return fields

    def _layer(self, rule: AttentionRule) -> int:
        """Whose keys and values a layer reads and writes: an encoder has room for one layer, and all use it."""
        return 0 if self.arch.both_ways else rule.layer

    def _tap(self, x: Floats, layers: int) -> None:
        """Store the residual stream after ``layers`` layers, where a drafter reads it."""
        for at in [i for i, tapped in enumerate(self.heads.tapped) if tapped == layers]:
            store = partial(self.program.step, "store", x=x.id, k=x.width, at=(1 + at) * x.width)
            self.program.gated(self.gates.aux_hidden, store)

    def _begin(self, weight: str, out: Floats, more: Fields) -> None:
        """Write what rows begin with: their tokens' embeddings, or rows that are inserted."""
        self._look_up(weight, out, more)
        if self.arch.inserts:
            self.program.step("insert", x=out.id, k=out.width)

    def _look_up(self, weight: str, out: Floats, more: Fields) -> None:
        self.plan.store_embedding(weight)
        program, sizes = self.program, {"n": self.arch.facts.vocab, "k": out.width, "out": out.id}
        if (table := f"{weight}.table") in self.plan.entries:
            program.step("embed", **self._rows(table), **sizes, **more)
        else:
            plane, program.plane = program.plane, self.gates.embedding_plane
            program.step("embed", **program.matrix(Linear(weight)), **sizes, **more)
            program.plane = plane

    def _rows(self, table: str) -> Fields:
        """Name a table that is only looked up, as steps do."""
        scales = f"{table}_scales"
        if scales not in self.plan.entries:
            return {"w": self.program.input(table), "kind": "r32"}
        return {"w": self.program.input(table), "kind": "r8", "bias": self.program.input(scales)}
