"""Which tensors a decoder reads and what shapes they must have: a pass over the widths of its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from edgespec.export.architectures.ops import Activation, Kind
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
    RelativeRule,
)
from edgespec.export.architectures.trace import Pass
from edgespec.runtimes.files.manifest import ModelFacts


class Shapes(Pass[int]):
    """The tensors of an architecture; an activation is its width.

    Args:
        width: rows of a matrix that are others, by its name; None = they are not.

    Attributes:
        found: shapes by name, in the order of the trace.
    """

    handled_fields: ClassVar[dict[type, str]] = {
        Linear: "weight bias",
        Norm: "weight bias centered",
        AttentionRule: "layer scale rotary window cap q_norm k_norm late_norms v_norm dim gives relative after sinks",
        RelativeRule: "table distance both_ways",
        MemoryRule: "layer scale",
        ConvolutionRule: "layer taps bias length",
        DepthwiseRule: "taps length bias groups second",
        DeltaRule: "layer taps bias rate norm skip taps_bias times eps",
        LayerEmbedding: "table layer layers width scale",
        ExpertsRule: "router gate up down normed scale always sigmoid bias router_bias gate_bias up_bias "
        "down_bias factors",
    }

    def __init__(self, facts: ModelFacts, width: Callable[[str], int | None]) -> None:
        self.facts, self._own_width = facts, width
        self.found: dict[str, tuple[int, ...]] = {}
        query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        self._widths = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": facts.hidden,
                        "gate_proj": facts.intermediate, "up_proj": facts.intermediate,
                        "down_proj": facts.hidden, "in_proj": 3 * facts.hidden, "out_proj": facts.hidden,
                        "output_gate_proj": query, "fc": facts.hidden}  # fmt: skip
        if facts.delta is not None:
            values, inner = facts.delta.values, facts.delta.values * facts.delta.value_dim
            self._widths |= {"in_proj_qkv": facts.delta.mixed, "in_proj_z": inner, "in_proj_a": values,
                             "in_proj_b": values}  # fmt: skip

    def embed(self, weight: str, scale: float, positions: str | None) -> int:
        self.found[weight] = self.facts.vocab, self.facts.hidden
        if positions is not None:
            self.found[positions] = self.facts.context, self.facts.hidden
        return self.facts.hidden

    def token_embeddings(self, weight: str, scale: float) -> int:
        return self.facts.hidden

    def norm(self, x: int, norm: Norm) -> int:
        self._vectors(x, norm.weight, norm.bias)
        return x

    def linear(self, x: int, parts: tuple[Linear, ...], joined: bool) -> tuple[int, ...]:
        return tuple(
            self._linear(x, part, self._own_width(part.weight) or self._widths[part.weight.split(".")[-2]])
            for part in parts
        )

    def attention(self, q: int, k: int, v: int, rule: AttentionRule) -> int:
        return self.attention_over(q, rule)

    def attention_over(self, q: int, rule: AttentionRule) -> int:
        for norm in (rule.q_norm, rule.k_norm, rule.v_norm):
            if norm is not None:
                self.norm(rule.dim or self.facts.head_dim, norm)
        if rule.relative is not None:
            self._vectors(self.facts.heads * rule.relative.size, rule.relative.table)
        self._vectors(self.facts.heads, rule.sinks)
        return q

    def append(self, q: int, k: int, v: int, rule: AttentionRule) -> None:
        self.attention_over(q, rule)

    def fill_memory(self, memory: Callable[[], None]) -> None:
        memory()

    def append_memory(self, k: int, v: int, rule: MemoryRule) -> None: ...

    def attend_memory(self, q: int, rule: MemoryRule) -> int:
        return q

    def place(self, x: int, positions: str) -> int:
        self.found[positions] = self.facts.context, x
        return x

    def insert(self, x: int, first: int) -> int:
        return x

    def plus(self, x: int, product: int) -> int:
        return product

    def encoded(self, x: int, norm: Norm | None) -> int:
        return x if norm is None else self.norm(x, norm)

    def convolution(self, x: int, rule: ConvolutionRule) -> int:
        self._vectors(rule.length * self.facts.hidden, rule.taps)
        self._vectors(self.facts.hidden, rule.bias)
        return self.facts.hidden

    def depthwise(self, x: int, rule: DepthwiseRule, by: int | None) -> int:
        self._vectors(rule.length * x, rule.taps)
        self._vectors(x, rule.bias)
        return x

    def delta(self, x: int, z: int, a: int, b: int, rule: DeltaRule) -> int:
        assert self.facts.delta is not None
        sizes = {"w": self.facts.taps * x, "norm": self.facts.delta.value_dim, "upbias": x}
        for key, name in rule.vectors.items():
            self._vectors(sizes.get(key, a), name)
        return z

    def sigmoid_gate(self, x: int, gate: int) -> int:
        return x

    def gated(self, gate: int, up: int, activation: Activation) -> int:
        return up

    def activate(self, x: int, activation: Activation, numbers: str | None) -> int:
        self._vectors(3, numbers)
        return x

    def sum(self, x: int, y: int) -> int:
        return x

    def experts(self, h: int, rule: ExpertsRule, activation: Activation, by: int | None = None) -> int:
        facts = self.facts.experts
        assert facts is not None
        self.found[rule.router] = facts.count, h
        self.found |= dict.fromkeys((rule.gate, rule.up), (facts.count * facts.inner, h))
        self.found[rule.down] = facts.count * h, facts.inner
        self._vectors(facts.count - rule.always, rule.bias, rule.factors)
        self._vectors(facts.count, rule.router_bias)
        self._vectors(facts.count * facts.inner, rule.gate_bias, rule.up_bias)
        self._vectors(facts.count * h, rule.down_bias)
        return h

    def layer_embedding(self, gate: int, base: int, rule: LayerEmbedding, activation: Activation) -> int:
        self.found[rule.table] = self.facts.vocab, rule.layers * rule.width
        return rule.width

    def sublayer(
        self, kind: Kind, layer: int, x: int, body: Callable[[int], int], scale: str | None, norm: Norm | None
    ) -> int:
        body(x if norm is None else self.norm(x, norm))
        self._vectors(1, scale)
        return x

    def head(self, x: int, norm: Norm | None, head: Linear) -> int:
        return self._linear(self.encoded(x, norm), head, self.facts.vocab)

    def input_slice(self, first: int, width: int) -> int:
        return width

    def select_input(self, fused: Callable[[], int], recycled: Callable[[], int]) -> int:
        fused()
        return recycled()

    def prefill_context(self, context: Callable[[], int]) -> None:
        context()

    def join(self, parts: tuple[int, ...]) -> int:
        return sum(parts)

    def _linear(self, x: int, part: Linear, width: int) -> int:
        self.found[part.weight] = width, x
        self._vectors(width, part.bias)
        return width

    def _vectors(self, size: int, *names: str | None) -> None:
        self.found |= {name: (size,) for name in names if name is not None}
