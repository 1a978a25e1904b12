"""What a weight file holds for ONNX Runtime's operators, in their layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgespec.export.architectures.base import Architecture
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
from edgespec.export.drafters.heads import HeadPlan, cut_head, group_matrices
from edgespec.export.emit.plan import Matrix, StoragePlan
from edgespec.export.quantization.levels import BLOCKS
from edgespec.runtimes.files.formats import Format


class StockPlan(StoragePlan):
    """As ``GraphOps`` reads: every operation stores at once."""

    def __init__(
        self, arch: Architecture, form: Format, head: Format, heads: HeadPlan, fine: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(arch, form, head, heads, fine)
        for layer in range(arch.facts.layers):
            if rotary := arch.rule(layer).rotary:
                self._angles(rotary)

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> None:
        self._embedding(weight)
        self._positions(positions)

    def token_embeddings(self, weight: str, scale: float) -> None: ...

    def input_slice(self, first: int, width: int) -> None: ...

    def select_input(self, fused: Callable[[], None], recycled: Callable[[], None]) -> None:
        fused()
        recycled()

    def prefill_context(self, context: Callable[[], None]) -> None:
        context()

    def append(self, q: None, k: None, v: None, rule: AttentionRule) -> None:
        self.attention(q, k, v, rule)

    def join(self, *parts: None) -> None: ...

    def norm(self, x: None, norm: Norm) -> None:
        self._norm(norm)

    def linear(self, x: None, *parts: Linear, joined: bool = False) -> tuple[None, ...]:
        # a float matrix [k, n] is written whole: two would be held at once
        for together in (parts,) if joined and self.form != "fp32" else ((part,) for part in parts):
            self._multiply(*together)
        return (None,) * len(parts)

    def attention(self, q: None, k: None, v: None, rule: AttentionRule) -> None:
        for norm in (rule.q_norm, rule.k_norm, rule.v_norm):
            if norm is not None:
                self._norm(norm)

    def convolution(self, x: None, rule: ConvolutionRule) -> None:
        self._vectors(rule.taps, rule.bias)

    def delta(self, x: None, z: None, a: None, b: None, rule: DeltaRule) -> None:
        self._vectors(*rule.vectors.values())

    def sigmoid_gate(self, x: None, gate: None) -> None: ...

    def gated(self, gate: None, up: None, activation: Activation) -> None: ...

    def activate(self, x: None, activation: Activation, numbers: str | None = None) -> None:
        self._vectors(numbers)

    def experts(self, h: None, rule: ExpertsRule, activation: Activation) -> None:
        self._experts(rule)

    def layer_embedding(self, gate: None, given: None, rule: LayerEmbedding, activation: Activation) -> None:
        self._layer_embedding(rule)

    def sublayer(self, kind: Kind, layer: int, x: None, body: Callable[[None], None], scale: str | None = None) -> None:
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
            _, blocks, width = BLOCKS[matrix.form].stock_shape(n, k)
            self.add(f"{name}.levels", (n, blocks, width), np.uint8)
            self.add(f"{name}.scales", (n, blocks), np.float32)
            self.alias(f"{name}.rows", f"{name}.levels", (n, blocks * width))
        return matrix
