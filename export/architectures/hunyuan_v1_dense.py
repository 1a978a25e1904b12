"""Hunyuan, the dense ones: norms of each head after rotation, a base of rotation stretched once."""

from dataclasses import replace

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule
from edgespec.export.architectures.rope import Rotary


class HunyuanDense(Architecture):
    model_type = "hunyuan_v1_dense"
    example = "Hunyuan-0.5B-Instruct, Hunyuan-4B-Instruct"
    features = "norms of each head after rotation"
    epsilon = ("rms_norm_eps", 1e-5)

    def bias(self, module: str) -> bool:
        return module.startswith("self_attn") and super().bias(module)

    def rotations(self) -> dict[str, Rotary]:
        rope = super().rotations()["rope"]
        parameters, dims = dict(rope.parameters), rope.dims
        if parameters["rope_type"] == "dynamic" and (alpha := parameters.get("alpha")) and dims > 2:
            # in spite of its name the same at every length
            theta = float(parameters["rope_theta"]) * float(alpha) ** (dims / (dims - 2))
            parameters |= {"rope_type": "default", "rope_theta": theta}
        return {"rope": Rotary(parameters, dims)}

    def rule(self, layer: int) -> AttentionRule:
        at = f"{LAYERS}.{layer}.self_attn"
        q_norm, k_norm = self.norm(f"{at}.query_layernorm"), self.norm(f"{at}.key_layernorm")
        return replace(super().rule(layer), q_norm=q_norm, k_norm=k_norm, late_norms=True)
