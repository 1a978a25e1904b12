"""Layers of sub-layers in a row, whose norms come before them, or after the residuals.

::

    norms before:  x = x + build(norm(x))
    norms after:   x = norm(x + build(x))

The second is the first paper's (Attention Is All You Need, arXiv 1706.03762).  Each sub-layer then norms the stream of
the one before it (``Ops.sublayer``), and the last norm comes after the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.formula import LAYERS
from edgespec.export.architectures.ops import Kind, Ops, Value
from edgespec.export.architectures.rules import Norm

EMBEDDING_NORM = "model.embedding_norm"
FIRST_NORM, LAST_NORM = "input_layernorm", "post_attention_layernorm"  # of a layer
Build = Callable[[Ops, Value, int], Value]


class ResidualLayers(Architecture):
    """An architecture of such layers."""

    late_norms: ClassVar[bool] = False  # norms come after the residuals, the last one at the end
    embedding_norm: ClassVar[bool] = False  # embeddings are normed

    @property
    def sublayers(self) -> list[tuple[Kind, str, Build]]:
        """The sub-layers of a layer in their order, with the modules of their norms."""
        return [("attention", FIRST_NORM, self.attend), ("mlp", LAST_NORM, self.transform)]

    def has_norm(self, layer: int, module: str) -> bool:
        """Whether a sub-layer has a norm before it."""
        return not self.late_norms

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        """Build one layer, sub-layer by sub-layer."""
        before = self.norm_before(layer)
        for kind, module, build in self.sublayers:
            own = self.norm(f"{LAYERS}.{layer}.{module}")
            normed = self.has_norm(layer, module)

            def body(x: Value, build: Build = build, own: Norm = own, normed: bool = normed) -> Value:
                return build(ops, ops.norm(x, own) if normed else x, layer)

            x = ops.sublayer(kind, layer, x, body, norm=before)
            before = own if self.late_norms else None
        return x

    def norm_before(self, layer: int) -> Norm | None:
        """Return the norm of the stream that a layer reads: of embeddings, or a late one of the layer before."""
        if layer == 0:
            return self.norm(EMBEDDING_NORM) if self.embedding_norm else None
        return self.norm(f"{LAYERS}.{layer - 1}.{LAST_NORM}") if self.late_norms else None

    @property
    def final_norm(self) -> Norm:
        return self.norm_before(self.facts.layers) or super().final_norm
