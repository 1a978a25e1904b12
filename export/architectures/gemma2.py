"""Gemma 2: norms before and after each sub-layer, capped scores, windows in every other layer (arXiv 2408.00118)."""

from dataclasses import replace

from edgespec.export.architectures.gemma import Gemma
from edgespec.export.architectures.ops import AttentionRule, LogitsRule


class Gemma2(Gemma):
    model_type = "gemma2"
    example = "gemma-2-2b-it"
    features = "norms after sub-layers, capped scores and logits, windows in every other layer"
    mlp_norm = "pre_feedforward_layernorm"
    after_attention = "post_attention_layernorm"
    after_mlp = "post_feedforward_layernorm"

    def rule(self, layer: int) -> AttentionRule:
        size = self.settings.positive("query_pre_attn_scalar", self.facts.head_dim)
        cap = self.settings.number("attn_logit_softcapping", 0.0)
        return replace(super().rule(layer), scale=size**-0.5, cap=cap)

    def slides(self, layer: int) -> bool:
        return super().slides(layer) if self.layer_types else layer % 2 == 0

    @property
    def logits(self) -> LogitsRule:
        return LogitsRule(cap=self.settings.number("final_logit_softcapping", 0.0))
