"""EXAONE 4: norms after sub-layers and of heads; layers without windows are not told positions (arXiv 2507.11407)."""

from dataclasses import replace

from edgespec.export.architectures.ops import AttentionRule
from edgespec.export.architectures.qwen3 import Qwen3


class Exaone4(Qwen3):
    model_type = "exaone4"
    example = "EXAONE-4.0-1.2B"
    features = "norms only after sub-layers, norms of each head, windows, global layers without positions"
    epsilon = ("rms_norm_eps", 1e-5)
    attention_norm = None
    mlp_norm = None
    after_attention = "post_attention_layernorm"
    after_mlp = "post_feedforward_layernorm"

    def bias(self, module: str) -> bool:
        return False

    def rule(self, layer: int) -> AttentionRule:
        turned = self.settings.optional("sliding_window") is None or self.slides(layer)
        return replace(super().rule(layer), rotary="rope" if turned else None)

    def slides(self, layer: int) -> bool:
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return (layer + 1) % self.settings.integer("sliding_window_pattern", 4) != 0
