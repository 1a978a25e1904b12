"""The weight file of a model, planned from shapes alone: an architecture run over its tensors' names.

Nothing is read, so that a config.json is enough.  The plan is the one truth about what is stored, in which order and
form: ``fill`` writes by it, graphs and native programs name what it has, and sizes are its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, AttentionRule, ConvolutionRule, Kind, Linear, Norm
from edgespec.export.heads.description import HeadPlan, cut_head, group_matrices, is_head
from edgespec.export.quantization.quantizers.levels import BITS, BLOCK
from edgespec.export.source.extended import ExtendedCheckpoint
from edgespec.export.storage.layout import HEADROOM, INLINE_BYTES, PACKED_KINDS, WeightLayout
from edgespec.runtimes.files.manifest import Format, HeadGroup, Layout
from edgespec.runtimes.files.packing import Packed

Content = Literal["matrix", "rows", "vector", "angles", "positions"]


@dataclass(frozen=True)
class Matrix:
    """Matrices [n_i, k] of the checkpoint, stored as one.

    Attributes:
        parts: their names.
        n, k: of all together, stacked along n.
        form: of the levels.
        packed: where they are stored for native operators.
    """

    parts: tuple[str, ...]
    n: int
    k: int
    form: Format
    packed: Packed | None = None


class StoragePlan(WeightLayout):
    """What both layouts store alike; see the module.

    Args:
        arch: the model, with the tensors of its heads.
        form: of its matrices.
        head: of its LM heads, and of the embedding tied to one.
        heads: beside the LM head.

    Attributes:
        contents: what is stored, in order: tensors of the checkpoint, and tables by the name of their rotation.
        matrices: by the names of their parts, joined by ``+``.
        inline: bytes of what sits inside the graph's file instead, by name.
    """

    def __init__(self, arch: Architecture, form: Format, head: Format, heads: HeadPlan) -> None:
        super().__init__()
        self.arch, self.form, self.head_form, self.heads = arch, form, head, heads
        self.shapes = arch.tensors
        if isinstance(arch.source, ExtendedCheckpoint):
            self.shapes |= {name: tensor.shape for name, tensor in arch.source.extra.items()}
        self.contents: list[tuple[Content, str]] = []
        self.matrices: dict[str, Matrix] = {}
        self.inline: dict[str, int] = {}

    def form_of(self, name: str) -> Format:
        """How a matrix is stored."""
        return self.head_form if is_head(name, self.arch) else self.form

    def width(self, *parts: Linear) -> int:
        """Rows of matrices stacked along n."""
        return sum(self.shapes[part.weight][0] for part in parts)

    def _vectors(self, *names: str | None) -> None:
        for name in names:
            if name is None or name in self.entries:
                continue
            if (length := 4 * prod(self.shapes[name])) <= INLINE_BYTES:
                self.inline[name] = length
            else:
                self.contents.append(("vector", name))
                self.add(name, self.shapes[name], np.float32)

    def given(self, first: int, width: int) -> None: ...

    def _norm(self, norm: Norm) -> None:
        self._vectors(norm.weight, norm.bias)

    def _bias(self, parts: Sequence[Linear]) -> None:
        if len(parts) == 1:
            self._vectors(parts[0].bias)
        elif any(part.bias for part in parts):
            self.inline[stacked_name(part.bias for part in parts)] = 4 * self.width(*parts)

    def _angles(self, rotary: str) -> None:
        if f"{rotary}_cos" not in self.entries:
            self.contents.append(("angles", rotary))
            dims = self.arch.facts.context + HEADROOM, self.arch.rotaries[rotary].dims // 2
            for name in ("cos", "sin"):
                self.add(f"{rotary}_{name}", dims, np.float32)
            if self.arch.rotaries[rotary].growth(dims[0]) is not None:
                self.add(f"{rotary}_growth", dims[:1], np.float32)

    def _positions(self, name: str | None) -> None:
        if name is not None:
            self.contents.append(("positions", name))
            self.add(name, (self.arch.facts.context + HEADROOM, self.arch.facts.hidden), np.float32)

    def _embedding(self, name: str) -> None:
        """As a matrix where rows of one can be looked up cheaply, else as a table that is only looked up."""
        n, k = self.shapes[name]
        if k % BLOCK == 0 if self.form in BITS else self.arch.head.weight == name:
            self._matrix(Linear(name))
            return
        self.contents.append(("rows", name))
        self.add(f"{name}.table", (n, k), np.float32 if self.form == "fp32" else np.int8)
        if self.form != "fp32":
            self.add(f"{name}.table_scales", (n, 1), np.float32)

    def _matrix(self, *parts: Linear, head_dim: int = 0) -> None:
        names = tuple(part.weight for part in parts)
        name, form = stacked_name(names), self.form_of(names[0])
        if name not in self.matrices:
            self.contents.append(("matrix", name))
            self.matrices[name] = self._placed(name, Matrix(names, self.width(*parts), self.shapes[names[0]][1], form),
                                               head_dim)  # fmt: skip

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        """Add the entries of a matrix."""
        raise NotImplementedError


class StockPlan(StoragePlan):
    """As ``GraphOps`` reads: every operation stores at once."""

    def __init__(self, arch: Architecture, form: Format, head: Format, heads: HeadPlan) -> None:
        super().__init__(arch, form, head, heads)
        for layer in range(arch.facts.layers):
            if rotary := arch.rule(layer).rotary:
                self._angles(rotary)

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> None:
        self._embedding(weight)
        self._positions(positions)

    def either(self, fused: Callable[[], None], recycled: Callable[[], None]) -> None:
        fused()
        recycled()

    def join(self, *parts: None) -> None: ...

    def norm(self, x: None, norm: Norm) -> None:
        self._norm(norm)

    def linear(self, x: None, *parts: Linear, joined: bool = False) -> tuple[None, ...]:
        # a float matrix [k, n] is written whole: two would be held at once
        for together in (parts,) if joined and self.form != "fp32" else ((part,) for part in parts):
            self._multiply(*together)
        return (None,) * len(parts)

    def attention(self, q: None, k: None, v: None, rule: AttentionRule) -> None:
        for norm in (rule.q_norm, rule.k_norm):
            if norm is not None:
                self._norm(norm)

    def convolution(self, x: None, rule: ConvolutionRule) -> None:
        self._vectors(rule.taps, rule.bias)

    def gated(self, gate: None, up: None, activation: Activation) -> None: ...

    def activate(self, x: None, activation: Activation, numbers: str | None = None) -> None:
        self._vectors(numbers)

    def sublayer(self, kind: Kind, layer: int, x: None, body: Callable[[None], None]) -> None:
        body(x)

    def head(self, x: None, norm: Norm, head: Linear) -> None:
        self._norm(norm)
        for group in self.heads.groups:
            matrices = group_matrices(group)
            self.linear(x, *matrices.first, joined=True)
            if matrices.second is not None:
                self._multiply(matrices.second)
        if not self.heads.only:
            self._multiply(head)
        if self.heads.cut and (self.heads.groups or self.heads.only):
            self._multiply(cut_head(head))
        for group in self.heads.groups:
            for own in group_matrices(group).heads:
                self._multiply(own)

    def _multiply(self, *parts: Linear) -> None:
        self._matrix(*parts)
        self._bias(parts)

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        n, k = matrix.n, matrix.k
        if matrix.form == "fp32":
            self.add(name, (k, n), np.float32)
        elif matrix.form == "w8a8":
            self.add(f"{name}.levels", (k, n), np.int8)
            self.add(f"{name}.scales", (n,), np.float32)
        else:
            blocks, width = -(-k // BLOCK), BLOCK * BITS[matrix.form] // 8
            self.add(f"{name}.levels", (n, blocks, width), np.uint8)
            self.add(f"{name}.scales", (n, blocks), np.float32)
            self.alias(f"{name}.rows", f"{name}.levels", (n, blocks * width))
        return matrix


@dataclass(frozen=True)
class _Waiting:
    """A norm or a product of x that is stored when something reads it."""

    x: _Waiting | None
    what: Norm | Linear


class NativePlan(StoragePlan):
    """As ``NativeOps`` reads: norms and matrices are stored when something reads them."""

    inside = False  # a sub-layer

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> None:
        self._positions(positions)
        self._embedding(weight)

    def either(self, fused: Callable[[], _Waiting | None], recycled: Callable[[], _Waiting | None]) -> None:
        self.inside = True
        self._ready(fused())
        self._ready(recycled())
        self.inside = False

    def join(self, *parts: _Waiting | None) -> None:
        for part in parts:
            self._ready(part)

    def norm(self, x: _Waiting | None, norm: Norm) -> _Waiting | None:
        self._ready(x)
        if self.inside:
            return _Waiting(None, norm)
        self._norm(norm)
        return None

    def linear(self, x: _Waiting | None, *parts: Linear, joined: bool = False) -> tuple[_Waiting, ...]:
        return tuple(_Waiting(x, part) for part in parts)

    def attention(self, q: _Waiting | None, k: _Waiting | None, v: _Waiting | None, rule: AttentionRule) -> None:
        if rule.rotary:
            self._angles(rule.rotary)
        if rule.q_norm and rule.k_norm:
            self._vectors(rule.q_norm.weight, rule.k_norm.weight)
        parts = [x.what for x in (q, k, v) if x is not None and isinstance(x.what, Linear)]
        if q is not None and len(parts) == 3:
            self._ready(q.x)
            self._matrix(*parts, head_dim=self.arch.facts.head_dim)
            self._bias(parts)
        else:
            for x in (q, k, v):
                self._ready(x)

    def convolution(self, x: _Waiting | None, rule: ConvolutionRule) -> None:
        self._ready(x)
        self._vectors(rule.taps, rule.bias)

    def gated(self, gate: _Waiting | None, up: _Waiting | None, activation: Activation) -> None:
        products = [x for x in (gate, up) if x is not None]
        parts = [x.what for x in products if isinstance(x.what, Linear)]
        self._ready(products[0].x)
        for part in parts:
            self._matrix(part)
        for part in parts:
            self._bias((part,))

    def activate(self, x: _Waiting | None, activation: Activation, numbers: str | None = None) -> None:
        self._ready(x)
        self._vectors(numbers)

    def sublayer(
        self, kind: Kind, layer: int, x: _Waiting | None, body: Callable[[_Waiting | None], _Waiting | None]
    ) -> _Waiting | None:
        self.inside = True
        self._ready(body(x))
        self.inside = False
        return x

    def head(self, x: _Waiting | None, norm: Norm, head: Linear) -> None:
        self._norm(norm)
        own, shared = (cut_head(head) if cut else head for cut in (self.heads.only, self.heads.cut))
        self._logits(own)
        for group in self.heads.groups:
            self._group(group, shared)

    def _group(self, group: HeadGroup, shared: Linear) -> None:
        matrices = group_matrices(group)
        for parts in (matrices.first, (matrices.second,) if matrices.second else ()):
            if parts:
                self._matrix(*parts)
                self._bias(parts)
        for head in matrices.heads or (shared,):
            self._logits(head)

    def _logits(self, head: Linear) -> None:
        self._bias((head,))
        self._matrix(head)

    def _ready(self, x: _Waiting | None) -> None:
        """Store what computing a value reads."""
        if x is None:
            return
        self._ready(x.x)
        if isinstance(x.what, Norm):
            self._norm(x.what)
        else:
            self._matrix(x.what)
            self._bias((x.what,))

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        rows = tuple((part, self.shapes[part][0]) for part in matrix.parts)
        packed = Packed(PACKED_KINDS[matrix.form], matrix.n, matrix.k, head_dim, rows)
        self.add(f"{name}.packed", (packed.nbytes,), np.uint8)
        return Matrix(matrix.parts, matrix.n, matrix.k, matrix.form, packed)


def storage_plans(
    arch: Architecture, form: Format, head: Format | None, heads: HeadPlan | None
) -> dict[Layout, StoragePlan]:
    """The weight file in either layout.

    Args:
        arch: the model, with the tensors of its heads; its own tensors have the shapes that config.json implies.
        form: of its matrices.
        head: of its LM heads; None = ``form``.
        heads: beside the LM head; None = none.
    """
    given = arch, form, head or form, heads or HeadPlan()
    stock, native = StockPlan(*given), NativePlan(*given)
    arch.build(stock)
    arch.build(native)
    return {"stock": stock, "native": native}


def stacked_name(names: Any) -> str:
    """What tensors stored as one are called."""
    return "+".join(map(str, names))
