"""OLMoE: norms of whole rows of q and k, a mixture of experts in every layer (arXiv 2409.02060)."""

from edgespec.export.architectures.experts import MixtureOfExperts
from edgespec.export.architectures.olmo2 import Olmo2


class Olmoe(MixtureOfExperts, Olmo2):
    model_type = "olmoe"
    example = "OLMoE-1B-7B-0125-Instruct"
    features = "norms of whole rows of q and k, mixtures of experts; native operators only"
    attention_norm = "input_layernorm"
    mlp_norm = "post_attention_layernorm"
    after_attention = None
    after_mlp = None

    def check(self) -> None:
        super().check()
        self.settings.refuse("clip_qkv", "clipped queries, keys and values", "OLMoE without clip_qkv")
