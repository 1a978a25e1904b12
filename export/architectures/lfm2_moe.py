"""LFM2 with mixtures of experts: short convolutions as in LFM2, dense MLPs in the first layers."""

from typing import ClassVar

from edgespec.export.architectures.experts import MixtureOfExperts
from edgespec.export.architectures.lfm2 import Lfm2


class Lfm2Moe(MixtureOfExperts, Lfm2):
    model_type = "lfm2_moe"
    example = "LFM2-8B-A1B"
    features = "as lfm2, with mixtures of experts, chosen by sigmoids and a bias; native operators only"
    aliases: ClassVar[dict[str, str]] = {"tie_word_embeddings": "tie_embedding"}
    routers = ("feed_forward.gate.weight",)
    fused = (("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),)
    single = "feed_forward.experts.{}.{}.weight"
    parts: ClassVar[dict[str, str]] = {"gate": "w1", "up": "w3", "down": "w2"}
    expert_size = "moe_intermediate_size"
    sigmoid = True

    @property
    def score_bias(self) -> str:
        return "feed_forward.expert_bias" if self.settings.flag("use_expert_bias", True) else ""

    @property
    def weights_normed(self) -> bool:
        return self.settings.flag("norm_topk_prob", True)

    @property
    def expert_scale(self) -> float:
        return self.settings.number("routed_scaling_factor", 1.0)

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("intermediate_size")

    def is_mixed(self, layer: int) -> bool:
        return layer >= self.settings.number("num_dense_layers", 2)
