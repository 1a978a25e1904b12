"""The bytes of a weight file in the layout of native operators; see ``export.sizes``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.export.architectures.ops import Activation, AttentionRule, Kind, Linear, Norm
from edgespec.export.heads.description import cut_head, group_matrices
from edgespec.export.storage.layout import PACKED_KINDS
from edgespec.export.storage.sizes import Sizes
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.files.packing import Packed


@dataclass(frozen=True)
class _Normed:
    """A norm that waits for what reads it."""

    norm: Norm


@dataclass(frozen=True)
class _Product:
    """A product that waits for what happens to it."""

    x: object
    parts: tuple[Linear, ...]
    part: int

    @property
    def own(self) -> tuple[Linear, ...]:
        """Its matrix alone."""
        return (self.parts[self.part],)


class NativeSizes(Sizes):
    """As ``NativeOps`` stores: norms and matrices when something reads them."""

    inside = False  # a sub-layer

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> object:
        if positions is not None:
            self._positions(positions)
        if self._looked_up(weight):
            self._matrix((Linear(weight),))
        else:
            self._table(weight)
        return None

    def norm(self, x: object, norm: Norm) -> object:
        self._ready(x)
        if self.inside:
            return _Normed(norm)
        self._vectors(norm)
        return None

    def linear(self, x: object, *parts: Linear, joined: bool = False) -> tuple[object, ...]:
        if joined:
            return tuple(_Product(x, parts, i) for i in range(len(parts)))
        return tuple(_Product(x, (part,), 0) for part in parts)

    def attention(self, q: object, k: object, v: object, rule: AttentionRule) -> object:
        if rule.rotary:
            self._angles(rule.rotary)
        if rule.q_norm and rule.k_norm:
            self._vector(rule.q_norm.weight)
            self._vector(rule.k_norm.weight)
        if isinstance(q, _Product) and isinstance(k, _Product) and isinstance(v, _Product):
            self._ready(q.x)
            parts = *q.own, *k.own, *v.own
            self._matrix(parts, self.arch.facts.head_dim)
            self._bias(parts)
        else:
            for x in (q, k, v):
                self._ready(x)
        return None

    def gated(self, gate: object, up: object, activation: Activation) -> object:
        products = [product for product in (gate, up) if isinstance(product, _Product)]
        self._ready(products[0].x)
        for product in products:
            self._matrix(product.own)
        for product in products:
            self._bias(product.own)
        return None

    def activate(self, x: object, activation: Activation, numbers: str | None = None) -> object:
        self._ready(x)
        return super().activate(None, activation, numbers)

    def sublayer(self, kind: Kind, layer: int, x: object, body: Callable[[object], object]) -> object:
        self.inside = True
        self._ready(body(x))
        self.inside = False
        return x

    def head(self, x: object, norm: Norm, head: Linear) -> object:
        self._vectors(norm)
        own, shared = (cut_head(self.arch) if cut else head for cut in (self.plan.only, self.plan.cut))
        self._logits(own)
        for group in self.plan.groups:
            self._group(group, shared)
        return x

    def _group(self, group: HeadGroup, shared: Linear) -> None:
        matrices = group_matrices(group)
        for parts in (matrices.first, matrices.second and (matrices.second,)):
            if parts:
                self._matrix(parts)
                self._bias(parts)
        for head in matrices.heads or (shared,):
            self._logits(head)

    def _logits(self, head: Linear) -> None:
        self._bias((head,))
        self._matrix((head,))

    def _ready(self, x: object) -> None:
        """What computing a value stores."""
        if isinstance(x, _Product):
            self._ready(x.x)
            self._matrix(x.own)
            self._bias(x.own)
        elif isinstance(x, _Normed):
            self._vectors(x.norm)

    def _matrix(self, parts: Sequence[Linear], head_dim: int = 0) -> None:
        name, n, k = self._stacked(parts)
        if self.file.once(name):
            self.file.put(Packed(PACKED_KINDS[self._form(parts[0].weight)], n, k, head_dim).nbytes)
