"""GPT-NeoX and Pythia: both sub-layers side by side, layer norms, a part of each head is rotated (arXiv 2204.06745)."""

from collections.abc import Mapping
from typing import ClassVar

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.fused import unfused
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class GptNeoX(Architecture):
    model_type = "gpt_neox"
    example = "pythia-160m"
    features = "parallel sub-layers, layer norms, partly rotated heads, fused projections"
    aliases: ClassVar[dict[str, str]] = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    layers_at = "gpt_neox.layers"
    outer_names: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    }
    layer_names: ClassVar[dict[str, str]] = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    epsilon = ("layer_norm_eps", 1e-5)
    activation_default = "gelu"
    layer_norms = True
    rope_share = 0.25
    gated_mlp = False

    def bias(self, module: str) -> bool:
        return module.startswith("mlp") or self.settings.flag("attention_bias", True)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        if self.settings.flag("use_parallel_residual", True):
            return self.parallel_layer(ops, x, layer, self.mlp_norm)
        return super().layer(ops, x, layer)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        for layer in range(self.facts.layers):
            theirs = f"{self.layers_at}.{layer}.attention.query_key_value"
            bias = self.bias("self_attn.q_proj")
            found |= unfused(source, theirs, f"{LAYERS}.{layer}.self_attn", self.facts, bias)
        return found
