"""Qwen3.5 with mixtures of experts: one more expert gets every row, through a gate."""

from edgespec.export.architectures.experts import MixtureOfExperts
from edgespec.export.architectures.qwen3_5 import Qwen35


class Qwen35Moe(MixtureOfExperts, Qwen35):
    model_type = "qwen3_5_moe_text"
    example = "Qwen3.5-35B-A3B"
    features = "as qwen3_5_text, with mixtures of experts and a shared expert; native operators only"
    expert_size = "moe_intermediate_size"
    shared = ("mlp.shared_expert", "shared_expert_intermediate_size")
    opening = "mlp.shared_expert_gate.weight"

    @property
    def weights_normed(self) -> bool:
        return self.settings.flag("norm_topk_prob", True)

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("intermediate_size", self.settings.integer(self.expert_size))
