"""What a weight file holds for native operators, packed as they read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
from edgespec.export.drafters.heads import cut_head, group_matrices
from edgespec.export.emit.plan import Matrix, StoragePlan
from edgespec.runtimes.files.formats import SPECS
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.files.packing import Packed


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

    def token_embeddings(self, weight: str, scale: float) -> None: ...

    def input_slice(self, first: int, width: int) -> None: ...

    def select_input(self, fused: Callable[[], _Waiting | None], recycled: Callable[[], _Waiting | None]) -> None:
        self.inside = True
        self._ready(fused())
        self._ready(recycled())
        self.inside = False

    def prefill_context(self, context: Callable[[], None]) -> None:
        self.inside = True
        context()
        self.inside = False

    def append(self, q: _Waiting | None, k: _Waiting | None, v: _Waiting | None, rule: AttentionRule) -> None:
        self.attention(q, k, v, rule)

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
        self._vectors(*(norm.weight for norm in (rule.q_norm, rule.k_norm, rule.v_norm) if norm))
        parts = [x.what for x in (q, k, v) if x is not None and isinstance(x.what, Linear)]
        if q is not None and len(parts) == sum(x is not None for x in (q, k, v)):
            self._ready(q.x)
            self._matrix(*parts, head_dim=rule.dim or self.arch.facts.head_dim)
            self._bias(parts)
        else:
            for x in (q, k, v):
                self._ready(x)

    def convolution(self, x: _Waiting | None, rule: ConvolutionRule) -> None:
        self._ready(x)
        self._vectors(rule.taps, rule.bias)

    def delta(
        self, x: _Waiting | None, z: _Waiting | None, a: _Waiting | None, b: _Waiting | None, rule: DeltaRule
    ) -> None:
        for value in (x, z, a, b):
            self._ready(value)
        self._vectors(*rule.vectors.values())

    def sigmoid_gate(self, x: _Waiting | None, gate: _Waiting | None) -> None:
        self._ready(gate)

    def gated(self, gate: _Waiting | None, up: _Waiting | None, activation: Activation) -> None:
        products = [x for x in (gate, up) if x is not None]
        parts = [x.what for x in products if isinstance(x.what, Linear)]
        self._ready(products[0].x)
        for part in parts:
            self._matrix(part)
        for part in parts:
            self._bias((part,))

    def experts(self, h: _Waiting | None, rule: ExpertsRule, activation: Activation) -> None:
        self._ready(h)
        self._experts(rule)

    def layer_embedding(
        self, gate: _Waiting | None, given: _Waiting | None, rule: LayerEmbedding, activation: Activation
    ) -> None:
        self._ready(gate)
        self._ready(given)
        self._layer_embedding(rule)

    def activate(self, x: _Waiting | None, activation: Activation, numbers: str | None = None) -> None:
        self._ready(x)
        self._vectors(numbers)

    def sublayer(
        self,
        kind: Kind,
        layer: int,
        x: _Waiting | None,
        body: Callable[[_Waiting | None], _Waiting | None],
        scale: str | None = None,
    ) -> None:
        self._ready(x)
        self.inside = True
        self._ready(body(None))
        self.inside = False

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
        packed = Packed(SPECS[matrix.form].kind, matrix.n, matrix.k, head_dim, rows)
        self.add(f"{name}.packed", (packed.nbytes,), np.uint8)
        return Matrix(matrix.parts, matrix.n, matrix.k, matrix.form, packed)
