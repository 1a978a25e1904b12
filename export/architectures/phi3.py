"""Phi-3, Phi-3.5 and Phi-4: fused projections; LongRoPE, short or long, is chosen by ``--context`` once."""

from collections.abc import Mapping

import numpy as np

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.source.derived import Own, Rows
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
        query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        fused = {
            "self_attn.qkv_proj": {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
            "mlp.gate_up_proj": {"mlp.gate_proj": facts.intermediate, "mlp.up_proj": facts.intermediate},
        }
        found: dict[str, Extra] = {}
        for layer in range(facts.layers):
            for name, parts in fused.items():
                whole, start = Own(source, f"{LAYERS}.{layer}.{name}.weight"), 0
                for part, size in parts.items():
                    found[f"{LAYERS}.{layer}.{part}.weight"] = Rows(whole, np.arange(start, start + size))
                    start += size
        return found
