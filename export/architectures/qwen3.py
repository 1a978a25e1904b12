"""Qwen3: norms of each head of q and k, no biases by default, a head size of its own (arXiv 2505.09388)."""

from dataclasses import replace

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule
from edgespec.export.architectures.qwen2 import Qwen2


class Qwen3(Qwen2):
    model_type = "qwen3"
    example = "Qwen3-0.6B"
    features = "norms of each head, windows in upper layers"

    def bias(self, module: str) -> bool:
        return Architecture.bias(self, module)

    def rule(self, layer: int) -> AttentionRule:
        at = f"{LAYERS}.{layer}.self_attn"
        return replace(super().rule(layer), q_norm=self.norm(f"{at}.q_norm"), k_norm=self.norm(f"{at}.k_norm"))
