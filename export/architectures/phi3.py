"""Phi-3, Phi-3.5 and Phi-4: fused projections; LongRoPE, short or long, is chosen by ``--context`` once."""

from collections.abc import Mapping

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.fused import stacked
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Phi3(Architecture):
    model_type = "phi3"
    example = "Phi-3.5-mini-instruct, Phi-4-mini-instruct"
    features = "fused projections, LongRoPE, partly rotated heads"
    epsilon = ("rms_norm_eps", 1e-5)

    def bias(self, module: str) -> bool:
        return False

    def slides(self, layer: int) -> bool:
        return True

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        facts = self.facts
        query, key, inner = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim, facts.intermediate
        attention = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
        mlp = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        return stacked(source, facts.layers, {"self_attn.qkv_proj": attention, "mlp.gate_up_proj": mlp})
