"""GLM 4 9B of 2024: neighbouring channels of half of each head are rotated, gate and up are one matrix."""

from collections.abc import Mapping

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.fused import stacked
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Glm(Architecture):
    model_type = "glm"
    example = "glm-4-9b-chat-hf, glm-edge-1.5b-chat"
    features = "neighbouring channels of half of each head rotated, biases on q, k, v, fused gate and up"
    epsilon = ("rms_norm_eps", 1.5625e-07)
    rope_share = 0.5
    pairs = "neighbours"

    def bias(self, module: str) -> bool:
        return module in (f"self_attn.{name}_proj" for name in "qkv") and self.settings.flag("attention_bias", True)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        inner = self.facts.intermediate
        return stacked(source, self.facts.layers, {"mlp.gate_up_proj": {"mlp.gate_proj": inner, "mlp.up_proj": inner}})
