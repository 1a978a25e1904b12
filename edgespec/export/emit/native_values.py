"""Results of operations while a native program is written: buffers, and lazy values that their reader computes."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import ExportError
from edgespec.export.architectures.ops import Activation
from edgespec.export.architectures.rules import ExpertsRule, Linear, Norm
from edgespec.export.emit.program import Floats, Form, NativePlan, QuantizedActivations, Scalar, activation_form


@dataclass(frozen=True)
class LazyNorm:
    """A norm that is computed when a matrix needs it, or when it is added to the residual stream."""

    x: Floats
    norm: Norm


@dataclass(frozen=True)
class LazySlice:
    """Columns of the rows that the pass reads, loaded when they are needed."""

    first: int
    width: int


@dataclass(frozen=True)
class LazyProduct:
    """A matrix product that waits for the buffer that it goes to."""

    x: Value
    part: Linear


@dataclass(frozen=True)
class LazyExperts:
    """A mixture of experts, emitted once its destination buffer is known."""

    x: Value
    rule: ExpertsRule
    activation: Activation
    by: Value | None = None  # what the router reads instead of x


@dataclass(frozen=True)
class LazyActivation:
    """An activation of a product, times another where there is one, made together where a matrix reads it."""

    x: Value
    parts: tuple[Linear, ...]  # gate and up, or only up
    activation: Activation


Value = Floats | LazyNorm | QuantizedActivations | LazyProduct | LazySlice | LazyExperts | LazyActivation


class Waiting:
    """Computes values that wait, into the buffers of one program."""

    def __init__(self, plan: NativePlan) -> None:
        self.arch, self.plan, self.program = plan.arch, plan, plan.program
        self._ready: dict[tuple[Value, Form], QuantizedActivations] = {}  # what was quantized for this sub-layer

    def alike(self, parts: tuple[Linear, ...]) -> bool:
        """Whether matrices are of one kind and multiply the same activations, as those of a file need not."""
        return len({(self.program.kind(part.weight), self.program.form(part.weight)) for part in parts}) == 1

    def _width(self, x: Value) -> int:
        if isinstance(x, LazyProduct):
            return self.plan.width(x.part)
        if isinstance(x, LazyActivation):
            return self.plan.width(x.parts[0])
        if isinstance(x, LazyNorm):
            return x.x.width
        if isinstance(x, LazyExperts):
            return self.arch.facts.hidden
        return x.width

    def _as_floats(self, x: Value, use: str) -> Floats:
        """Turn a value into float32, computing what still waits."""
        if isinstance(x, Floats):
            return x
        if isinstance(x, LazySlice):
            out = self.program.floats(f"given {x.first}", x.width)
            self._write(x, out)
            return out
        if isinstance(x, LazyProduct):
            out = self.program.floats(use, self.plan.width(x.part))
            self._multiply(x, out, add=False)
            return out
        if isinstance(x, LazyNorm):
            return self._computed(x, f"normed {use}")
        if isinstance(x, LazyActivation):
            return self._glu_as_floats(x, use)
        if isinstance(x, LazyExperts):
            out = self.program.floats(use, self.arch.facts.hidden)
            self._mix(x, out, add=False)
            return out
        raise ExportError("native operators cannot turn quantized activations into floats")

    def _write(self, x: Value, out: Floats) -> None:
        if isinstance(x, LazySlice):
            self.program.step("load", out=out.id, k=x.width, at=x.first)
        elif isinstance(x, LazyNorm):
            self._norm(x, out)
        elif isinstance(x, LazyProduct):
            self._multiply(x, out, add=False)
        else:
            raise ExportError("native operators expect what a pass is given, its norm or a product")

    def _computed(self, x: LazyNorm, use: str) -> Floats:
        out = self.program.floats(use, x.x.width)
        self._norm(x, out)
        return out

    def _norm(self, x: LazyNorm, out: Floats, add: int = 0, scale: str | None = None) -> None:
        by = Scalar(scale) if scale else None
        self.program.step(
            "norm", x=x.x.id, **self.program.norm(x.norm), k=x.x.width, out=out.id, add=add or None, scale=by
        )

    def _acts(self, x: Value, use: str, parts: tuple[Linear, ...]) -> QuantizedActivations:
        """Quantize a value for these matrices, once a sub-layer."""
        form = self.program.form(parts[0].weight)
        if isinstance(x, LazyActivation) and (x, form) not in self._ready:
            kind = self.program.kind(x.parts[0].weight)
            if self.alike(x.parts) and (activation_form(kind), "") == form:
                made = self._glu(x.x, x.parts, x.activation)
                if isinstance(made, QuantizedActivations):
                    self._ready[x, form] = made
                x = made
        if isinstance(x, QuantizedActivations):
            return x
        key = x, form
        if key not in self._ready:
            norm = x.norm if isinstance(x, LazyNorm) else None
            floats = x.x if isinstance(x, LazyNorm) else self._as_floats(x, use)
            others = sum(known == x for known, _ in self._ready)  # in other forms, in buffers of that name
            use = f"{use} {others}" if others else use
            made = self.program.quantize(floats, use, parts[0].weight, norm=norm)
            # what another value left in this buffer is gone
            self._ready = {known: acts for known, acts in self._ready.items() if acts != made} | {key: made}
        return self._ready[key]

    def _buffer(self, x: Value) -> str:
        """Name the buffer of what is normed: one for each projection, as q and k wait side by side."""
        return x.part.weight.split(".")[-2] if isinstance(x, LazyProduct) else "normed"

    def _multiply(self, product: LazyProduct, out: Floats, add: bool) -> None:
        parts = (product.part,)
        self.program.linear(self._acts(product.x, "inner", parts), parts, out, add=add)

    def _glu(self, x: Value, parts: tuple[Linear, ...], activation: Activation) -> Floats | QuantizedActivations:
        """Compute a gate, times the second product where there is one, as what a matrix of their kind multiplies."""
        act = self._acts(x, "hidden", parts)
        n = self.plan.width(parts[0])
        fields = self.program.matrix(parts[0], key="gate")
        for up in parts[1:]:
            fields |= self.program.matrix(up, key="up")
        kind = fields["kind"]
        # a scale a row (c8) is known only when the whole row is: floats first
        out: Floats | QuantizedActivations = (
            self.program.floats("mlp", n) if kind == "c8" else self.program.acts("mlp", n)
        )
        self.program.step("glu", act=act.id, **fields, n=n, k=act.width, out=out.id, fn=_other(activation),
                   bias=self.program.bias(parts[:1]), upbias=self.program.bias(parts[1:]))  # fmt: skip
        return out

    def _glu_as_floats(self, x: LazyActivation, use: str) -> Floats:
        """Compute gate and up one after the other, where matrices differ or something else than a matrix reads it."""
        *gates, last = (LazyProduct(x.x, part) for part in x.parts)
        if not gates:
            return self._activate(last, x.activation, None)
        by, out = self._as_floats(gates[0], "gate"), self._as_floats(last, use)
        self.program.step("multiply", x=by.id, k=out.width, fn=x.activation, out=out.id)
        return out

    def _activate(self, x: Value, activation: Activation, numbers: str | None) -> Floats:
        out = self._as_floats(x, self._buffer(x) if activation == "clamp" else "mlp")
        w = self.program.vector(numbers)
        self.program.step("activate", x=out.id, k=out.width, fn=activation, rows=0, w=w)
        self._ready = {key: made for key, made in self._ready.items() if key[0] != out}  # of what was there
        return out

    def _mix(self, mixture: LazyExperts, out: Floats, add: bool) -> None:
        program, facts, rule = self.program, self.arch.facts.experts, mixture.rule
        assert facts is not None
        router = Linear(rule.router, rule.router_bias)
        gate, up, down = map(Linear, (rule.gate, rule.up, rule.down))
        biases = {"gatebias": rule.gate_bias, "upbias": rule.up_bias, "bias": rule.down_bias}
        scores, chosen = program.floats("router", facts.count), program.floats("chosen", 2 * facts.chosen)
        by = mixture.x if mixture.by is None else mixture.by
        program.linear(self._acts(by, "routed", (router,)), (router,), scores)
        act = self._acts(mixture.x, "hidden", (gate,))
        program.step("route", x=scores.id, n=facts.count, k=facts.chosen, out=chosen.id, scale=float(rule.scale),
                     add=int(rule.normed), first=rule.always or None, fn="sigmoid" if rule.sigmoid else None,
                     bias=program.vector(rule.bias), w=program.vector(rule.factors))  # fmt: skip
        kind, last = program.kind(gate.weight), program.kind(down.weight)
        if not self.alike((gate, up)) or program.form(down.weight) != (activation_form(kind), ""):
            raise ExportError(f"{rule.gate}: native operators cannot multiply it with up and down as these are stored")
        matrices = program.matrix(gate, key="gate", head_dim=facts.inner)
        matrices |= program.matrix(up, key="up", head_dim=facts.inner) | program.matrix(down, head_dim=out.width)
        matrices |= {"kind": kind} | ({} if last == kind else {"downkind": last})
        program.step("experts", act=act.id, x=chosen.id, **matrices, n=facts.inner, k=act.width, times=facts.count,
                     heads=facts.chosen, out=out.id, add=int(add), fn=_other(mixture.activation),
                     **{key: program.vector(name) for key, name in biases.items()})  # fmt: skip


def _other(activation: Activation) -> str | None:
    """Name an activation in steps whose own is silu."""
    return None if activation == "silu" else activation
