"""The program of a ``Decoder`` node (edgespec/runtimes/native/steps.inl): steps, buffers, gates and weights.

A program is written only from shapes, and the plan stores what it names, in that order.  ``native_graph`` reads the
small tensors and adds the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.rules import Linear, LogitsRule, Norm
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.graph import BOOL, EDGESPEC, FLOAT, INT64, UINT8, GraphBuilder
from edgespec.export.emit.pieces import stacked_bias, vector
from edgespec.export.emit.plan import Matrix, StoragePlan, stacked_name
from edgespec.runtimes.files.formats import FILE, SPECS, Format, Kind, acts_of
from edgespec.runtimes.files.packing import Packed

PLAN, CONTROLS = 6, 8
CACHE_LINE = 64  # bytes, at which packed matrices begin


@dataclass(frozen=True)
class Floats:
    """A float32 buffer [rows, width]."""

    id: int
    width: int


@dataclass(frozen=True)
class QuantizedActivations:
    """Activations in the form that matrices multiply."""

    id: int
    width: int


@dataclass(frozen=True)
class Scalar:
    """A number of the checkpoint, read when the program becomes text; a step without it has 1."""

    name: str


Field: TypeAlias = "int | float | str | Scalar"
Fields: TypeAlias = "dict[str, Field | None]"
Form: TypeAlias = "tuple[str, str]"  # kind of activations, and the stored order of a row's numbers ("" = as they are)


class Program:
    """Collects the steps of one decoder.

    Args:
        plan: of the weights; it stores what the program names.

    Attributes:
        inputs: index of each weight among the node's weight inputs.
        tensors: the same weights, in the order that they were stored.
        gates: how many there are.
        plane: the gate of the low planes of the next matrices.
    """

    def __init__(self, plan: NativePlan) -> None:
        self.arch, self.plan = plan.arch, plan
        self.inputs: dict[str, int] = {}
        self.tensors: dict[str, None] = {}
        self.gates = self.plane = 0
        self._steps: list[tuple[str, dict[str, Field]]] = []
        self._buffers: dict[tuple[str, str], tuple[int, int]] = {}  # (floats or acts, use) -> id, width
        lent = self.arch.drafter.kv_dims if self.arch.drafter else ()
        self._declared = [f"lent {layer} {dim}" for layer, dim in enumerate(lent)]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, op: str, **fields: Field | None) -> None:
        """Add a step, with fields as its row of steps.inl has them; one of None is left out."""
        self._steps.append((op, {key: value for key, value in fields.items() if value is not None}))

    def gated(self, index: int, body: Callable[[], None], other: int | None = None) -> None:
        """Put the steps that ``body`` adds behind a gate; with ``other``, either of two gates runs them."""
        outer, self._steps = self._steps, []
        body()
        inner, self._steps = self._steps, outer
        self.step("gate", index=index, skip=len(inner), other=other)
        self._steps += inner

    def quantize(
        self,
        x: Floats,
        use: str,
        matrix: str,
        *,
        norm: Norm | None = None,
        rows: int = 0,
        times: int = 1,
        first: int = 0,
    ) -> QuantizedActivations:
        """Quantize floats, normed first if asked for, to the form that ``matrix`` multiplies."""
        out = self.acts(use, x.width)
        kind, order = self.form(matrix)
        normed: Fields = {"norm": -1, "eps": float(self.arch.eps)} if norm is None else self.norm(norm)
        if order:
            self.plan.store_order(order)
            normed["order"] = self.input(order)
        self.step("quantize", x=x.id, **normed, k=x.width, kind=kind, out=out.id, rows=rows,
                  times=times if rows == 2 else None, first=first if rows == 2 else None)  # fmt: skip
        return out

    def linear(
        self, act: QuantizedActivations, parts: tuple[Linear, ...], out: Floats, *, add: bool = False, rows: int = 0
    ) -> None:
        """Multiply by matrices stacked along n, and add their biases."""
        self.step("linear", act=act.id, **self.matrix(*parts), n=self.plan.width(*parts), k=act.width,
                  bias=self.bias(parts), out=out.id, add=int(add), rows=rows)  # fmt: skip

    def norm(self, norm: Norm) -> Fields:
        """Name a norm: the fields of a step that say it."""
        weight = self.vector(norm.weight)
        return {
            "norm": weight,
            "eps": float(self.arch.eps),
            "beta": self.vector(norm.bias),
            "center": 1 if norm.centered else None,
        }

    def logits(
        self, act: QuantizedActivations, head: Linear, *, times: int = 1, first: int = 0, raw: bool = False
    ) -> None:
        """Add an LM head; its output rows are appended after those of earlier active heads.

        Args:
            times: rows of heads that share the matrix, for each row asked for.
            first: which of these rows come first.
            raw: a trained head's own matrix: the model's logit scale and cap are left out.
        """
        rule, bias = LogitsRule() if raw else self.arch.logits, None if head.bias is None else self.bias((head,))
        self.step("logits", act=act.id, **self.matrix(head), n=self.plan.width(head), k=act.width, times=times,
                  first=first, bias=bias, scale=None if rule.scale == 1 else float(rule.scale),
                  cap=float(rule.cap) or None)  # fmt: skip

    # -- what steps name -----------------------------------------------------------------------------------------------

    def buffer(self, kind: str, use: str, width: int) -> int:
        """Declare a buffer, which is used again wherever use and width are the same."""
        key = kind, use
        if key not in self._buffers:
            number = sum(1 for other, _ in self._buffers if other == kind)
            self._buffers[key] = number, width
            self._declared.append(f"{kind} {number} {width}")
        number, known = self._buffers[key]
        if known != width:
            return self.buffer(kind, f"{use}.{width}", width)
        return number

    def floats(self, use: str, width: int) -> Floats:
        """Declare a float32 buffer; see ``buffer``."""
        return Floats(self.buffer("floats", use, width), width)

    def acts(self, use: str, width: int) -> QuantizedActivations:
        """Declare a buffer of quantized rows; see ``buffer``."""
        return QuantizedActivations(self.buffer("acts", use, width), width)

    def kind(self, name: str) -> Kind:
        """Look up how the matrix ``name`` is stored."""
        return self.plan.kind_of(name)

    def form(self, name: str) -> Form:
        """Return the form of activations that the matrix ``name`` multiplies."""
        return activation_form(self.kind(name)), self.plan.order_of(name)

    def matrix(self, *parts: Linear, key: str = "w", head_dim: int = 0) -> Fields:
        """Name matrices stacked along n, stored as one: the fields of a step that say it."""
        self.plan.store_matrix(*parts, head_dim=head_dim)
        name, kind = stacked_name(part.weight for part in parts), self.kind(parts[0].weight)
        fields: Fields = {key: self.input(f"{name}.packed"), "kind": kind}
        if kind == "p8":
            fields |= {"low" if key == "w" else f"{key}low": self.input(f"{name}.low"), "plane": self.plane}
        return fields

    def bias(self, parts: Sequence[Linear]) -> int:
        """Name their biases; -1 = no bias."""
        if all(part.bias is None for part in parts):
            return -1
        self.plan.store_bias(parts)
        return self.input(str(parts[0].bias) if len(parts) == 1 else stacked_name(part.bias for part in parts))

    def vector(self, name: str | None) -> int | None:
        """Name a vector of the checkpoint; None without one."""
        self.plan.store_vectors(name)
        return None if name is None else self.input(name)

    def rotation(self, rotary: str) -> Fields:
        """Name a rotary table: the fields of a step that say it."""
        self.plan.store_angles(rotary)
        names = {key: f"{rotary}_{key}" for key in ("growth", "cos", "sin", "axes")}
        there = {key: name for key, name in names.items() if name in self.plan.entries}
        self.tensors |= dict.fromkeys(there.values())
        fields: Fields = {"rotary": self.arch.rotaries[rotary].dims}
        return fields | {key: self.input(there[key]) for key in ("cos", "sin", "growth", "axes") if key in there}

    def input(self, name: str) -> int:
        """Find the index of a tensor of the weight file among the node's weight inputs."""
        self.tensors.setdefault(name)
        return self.inputs.setdefault(name, len(self.inputs))

    def text(self) -> str:
        """Write the program as text; reads the numbers that it contains."""
        return "\n".join([*self._declared, *(self._line(op, fields) for op, fields in self._steps)])

    def _line(self, op: str, fields: dict[str, Field]) -> str:
        words = [op]
        for key, value in fields.items():
            value = float(self.arch.source.read(value.name)[0]) if isinstance(value, Scalar) else value
            if fields[key] is not value and value == 1:
                continue
            words.append(f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}")
        return " ".join(words)


class NativePlan(StoragePlan):
    """Plan of the weights in the layout of native operators.

    Attributes:
        program: over these weights.
    """

    def __init__(
        self, arch: Architecture, form: Format, head: Format, heads: HeadPlan, fine: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(arch, form, head, heads, fine)
        self.program = Program(self)
        self._low: dict[str, int] = {}

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        rows = tuple((part, self.shapes[part][0]) for part in matrix.parts)
        packed = Packed(self.kind_of(matrix.parts[0]), matrix.n, matrix.k, head_dim, rows)
        self.add(f"{name}.packed", (packed.nbytes,), np.uint8)
        if packed.low_nbytes:
            self._low[f"{name}.low"] = packed.low_nbytes
        return Matrix(matrix.parts, matrix.n, matrix.k, matrix.form, packed)

    @property
    def planes(self) -> bool:
        """Whether int8 matrices have two planes; an encoder has one, as nothing drafts there, which is read faster."""
        return super().planes and not self.arch.both_ways

    def kind_of(self, name: str) -> Kind:
        """How a matrix is packed."""
        form = self.form_of(name)
        kind = self.file_kind(name) if form == FILE else None
        kind = kind or SPECS[form].kind
        return "q8" if kind == "p8" and self.arch.both_ways else kind

    @property
    def low_nibble_bytes(self) -> int:
        """Bytes of the low planes."""
        return sum(self._low.values())

    def place_low(self) -> None:
        """Place the low planes last, so that runs that read only high planes never page them in."""
        align: int | None = None
        for name, nbytes in self._low.items():
            self.add(name, (nbytes,), np.uint8, align)
            align = CACHE_LINE


def native_graph(plan: NativePlan) -> GraphBuilder:
    """Put the node of native operators into a graph."""
    graph, hidden, program = GraphBuilder(plan), plan.arch.facts.hidden, plan.program
    for name in program.tensors:
        if name in plan.stacked:
            stacked_bias(graph, plan, plan.stacked[name])
        else:
            vector(graph, plan, name)
    inputs: dict[str, tuple[int, list[int | str]]] = {
        "plan": (INT64, [PLAN, "T"]),
        "rows": (INT64, ["R"]),
        "gates": (BOOL, [program.gates]),
        "moves": (INT64, ["M", 3]),
        "kv": (UINT8, ["S", "B"]),
        "control": (INT64, [CONTROLS]),
        "tables": (FLOAT, ["N"]),
        "hidden_in": (FLOAT, ["H", plan.arch.input_width or hidden]),
    }
    if plan.arch.encoder is not None:
        inputs |= {"memory": (UINT8, ["M", "C"]), "sources": (INT64, [2, "T"])}
    if plan.arch.inserts:
        inputs["inserted"] = (FLOAT, ["I", plan.arch.inserts])
    if any(rotary.axes for rotary in plan.arch.rotaries.values()):
        inputs["axes"] = (INT64, [3, "T"])
    outputs: dict[str, tuple[int, list[int | str]]] = {
        "logits": (FLOAT, ["L", "V"]),
        "ids": (INT64, ["K", "top"]),
        "values": (FLOAT, ["K", "top"]),
        "hidden": (FLOAT, ["G", "W" if plan.heads.tapped else hidden]),
    }
    for name, (kind, dims) in inputs.items():
        graph.input(name, kind, dims)
    graph.node("Decoder", [*inputs, *program.inputs], list(outputs), domain=EDGESPEC,
               program=program.text(), constant_weights=1)  # fmt: skip
    for name, (kind, dims) in outputs.items():
        graph.output(name, kind, dims)
    return graph


def activation_form(kind: Kind) -> str:
    """Look up the form of activations that matrices of a kind multiply; q4 and q8 read the same."""
    return acts_of(kind)
