"""Gemma 3, the text model: norms of heads, five local layers to a global one, a rotation for each (arXiv 2503.19786).

The text part of the larger ones, which also read images, is exported the same way.
"""

from dataclasses import replace

from edgespec.export.architectures.base import LAYERS
from edgespec.export.architectures.gemma2 import Gemma2
from edgespec.export.architectures.ops import AttentionRule
from edgespec.export.architectures.rope import Rotary


class Gemma3(Gemma2):
    model_type = "gemma3_text"
    example = "gemma-3-1b-it"
    features = "norms of each head, local and global layers with a rotation each; text part of larger ones"

    def rotations(self) -> dict[str, Rotary]:
        theta, local = self.settings.number("rope_theta", 1e6), self.settings.number("rope_local_base_freq", 1e4)
        full = self.rotation("full_attention", theta, scaled=True)
        return {"rope": full, "rope_local": self.rotation("sliding_attention", local, scaled=False)}

    def rule(self, layer: int) -> AttentionRule:
        at = f"{LAYERS}.{layer}.self_attn"
        q_norm, k_norm = self.norm(f"{at}.q_norm"), self.norm(f"{at}.k_norm")
        rotary = "rope_local" if self.slides(layer) else "rope"
        return replace(super().rule(layer), rotary=rotary, q_norm=q_norm, k_norm=k_norm)

    def slides(self, layer: int) -> bool:
        if self.layer_types:
            return super().slides(layer)
        return (layer + 1) % self.settings.integer("sliding_window_pattern", 6) != 0
