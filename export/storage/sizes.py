"""The bytes of a weight file before it is written: an architecture run over sizes, in the order that stores tensors.

Nothing is read and no graph is made, so that a config.json is enough.  The order is that of the operators' own
interpreters (``GraphOps`` in emit.py, ``NativeOps`` in native/emit.py): with it the alignment comes out exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, AttentionRule, Kind, Linear, Norm
from edgespec.export.heads.description import HeadPlan, cut_head, group_matrices, is_head
from edgespec.export.quantization.levels import BLOCK
from edgespec.export.storage.layout import HEADROOM, INLINE_BYTES, aligned
from edgespec.runtimes.files.manifest import Format

BITS: dict[Format, int] = {"int4": 4, "int8": 8}


@dataclass
class FileSizes:
    """A weight file that is only counted.

    Attributes:
        end: its bytes so far.
        entries: how many tensors it has.
        inline: bytes of what sits inside the graph's file instead, by name.
    """

    end: int = 0
    entries: int = 0
    inline: dict[str, int] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def once(self, name: str) -> bool:
        """Whether this is the first time that ``name`` is stored."""
        new = name not in self._names
        self._names.add(name)
        return new

    def put(self, length: int) -> None:
        """One more tensor, of so many bytes."""
        self.end, self.entries = aligned(self.end, length) + length, self.entries + 1


class Sizes:
    """What both kinds of operators store alike; see the module.

    Args:
        arch: the model.
        form: of its matrices.
        head: of its LM heads, and of the embedding tied to one.
        plan: heads beside the LM head.
        shapes: of every tensor of the model and of the heads, by Llama's name.
    """

    def __init__(
        self, arch: Architecture, form: Format, head: Format, plan: HeadPlan, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.arch, self.form, self.head_form, self.plan, self.shapes = arch, form, head, plan, shapes
        self.file = FileSizes()

    def _form(self, name: str) -> Format:
        return self.head_form if is_head(name, self.arch) else self.form

    def _stacked(self, parts: Sequence[Linear]) -> tuple[str, int, int]:
        """Name of matrices stored as one, and its shape [n, k]."""
        names = [part.weight for part in parts]
        return "+".join(names), sum(self.shapes[name][0] for name in names), self.shapes[names[0]][1]

    def _vector(self, name: str) -> None:
        length = 4 * prod(self.shapes[name])
        if length <= INLINE_BYTES:
            self.file.inline[name] = length
        elif self.file.once(name):
            self.file.put(length)

    def _vectors(self, norm: Norm) -> None:
        self._vector(norm.weight)
        if norm.bias is not None:
            self._vector(norm.bias)

    def _bias(self, parts: Sequence[Linear]) -> None:
        if len(parts) == 1 and parts[0].bias is not None:
            self._vector(parts[0].bias)
        elif any(part.bias for part in parts):
            self.file.inline["+".join(str(part.bias) for part in parts)] = 4 * self._stacked(parts)[1]

    def _angles(self, rotary: str) -> None:
        if self.file.once(f"{rotary}_cos"):
            rows = self.arch.facts.context + HEADROOM
            for _ in ("cos", "sin"):
                self.file.put(4 * rows * (self.arch.rotaries[rotary].dims // 2))
            if self.arch.rotaries[rotary].growth(rows) is not None:
                self.file.put(4 * rows)

    def _positions(self, name: str) -> None:
        if self.file.once(name):
            self.file.put(4 * (self.arch.facts.context + HEADROOM) * self.arch.facts.hidden)

    def _table(self, name: str) -> None:
        """An embedding that is only looked up."""
        n, k = self.shapes[name]
        if not self.file.once(f"{name}.table"):
            return
        self.file.put(4 * n * k if self.form == "fp32" else n * k)
        if self.form != "fp32":
            self.file.put(4 * n)

    def _looked_up(self, weight: str) -> bool:
        """Whether an embedding is stored as a matrix (``can_lookup`` of the formats)."""
        if self.form in BITS:
            return self.arch.facts.hidden % BLOCK == 0
        return self.arch.head.weight == weight

    def gated(self, gate: object, up: object, activation: Activation) -> object:
        return self.activate(up, activation)

    def activate(self, x: object, activation: Activation, numbers: str | None = None) -> object:
        if numbers is not None:
            self._vector(numbers)
        return x


class StockSizes(Sizes):
    """As ``GraphOps`` stores: every operation at once."""

    def __init__(
        self, arch: Architecture, form: Format, head: Format, plan: HeadPlan, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(arch, form, head, plan, shapes)
        for layer in range(arch.facts.layers):
            if rotary := arch.rule(layer).rotary:
                self._angles(rotary)

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> object:
        if self._looked_up(weight):
            self._matrix((Linear(weight),))
        else:
            self._table(weight)
        if positions is not None:
            self._positions(positions)
        return None

    def norm(self, x: object, norm: Norm) -> object:
        self._vectors(norm)
        return x

    def linear(self, x: object, *parts: Linear, joined: bool = False) -> tuple[object, ...]:
        for together in (parts,) if joined and self.form != "fp32" else ((part,) for part in parts):
            self._multiply(*together)
        return tuple(x for _ in parts)

    def attention(self, q: object, k: object, v: object, rule: AttentionRule) -> object:
        for norm in (rule.q_norm, rule.k_norm):
            if norm is not None:
                self._vectors(norm)
        return q

    def sublayer(self, kind: Kind, layer: int, x: object, body: Callable[[object], object]) -> object:
        body(x)
        return x

    def head(self, x: object, norm: Norm, head: Linear) -> object:
        self._vectors(norm)
        for group in self.plan.groups:
            matrices = group_matrices(group)
            self.linear(x, *matrices.first, joined=True)
            if matrices.second is not None:
                self._multiply(matrices.second)
        if not self.plan.only:
            self._multiply(head)
        if self.plan.cut and (self.plan.groups or self.plan.only):
            self._multiply(cut_head(self.arch))
        for group in self.plan.groups:
            for own in group_matrices(group).heads:
                self._multiply(own)
        return x

    def _multiply(self, *parts: Linear) -> None:
        self._matrix(parts)
        self._bias(parts)

    def _matrix(self, parts: Sequence[Linear]) -> None:
        name, n, k = self._stacked(parts)
        if not self.file.once(name):
            return
        form = self._form(name)
        if form == "fp32":
            self.file.put(4 * n * k)
        elif form == "w8a8":
            self.file.put(n * k)
            self.file.put(4 * n)
        else:
            blocks = -(-k // BLOCK)
            self.file.put(n * blocks * (BLOCK * BITS[form] // 8))
            self.file.put(4 * n * blocks)
