"""Qwen3 with mixtures of experts (arXiv 2505.09388)."""

from typing import ClassVar

from edgespec.export.architectures.experts import MixtureOfExperts
from edgespec.export.architectures.qwen3 import Qwen3


class Qwen3Moe(MixtureOfExperts, Qwen3):
    model_type = "qwen3_moe"
    example = "Qwen3-30B-A3B-Instruct-2507"
    features = "as qwen3, with mixtures of experts; native operators only"
    aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}  # as transformers 5 saves it
    expert_size = "moe_intermediate_size"

    def is_mixed(self, layer: int) -> bool:
        dense = self.settings.layers("mlp_only_layers")
        return layer not in dense and (layer + 1) % self.settings.integer("decoder_sparse_step", 1) == 0

    def slides(self, layer: int) -> bool:
        return self.settings.flag("use_sliding_window")
