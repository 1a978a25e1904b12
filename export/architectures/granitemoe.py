"""Granite 3 with mixtures of experts: as granite, an expert's gate and up are one matrix."""

from edgespec.export.architectures.experts import MixtureOfExperts
from edgespec.export.architectures.granite import Granite


class GraniteMoe(MixtureOfExperts, Granite):
    model_type = "granitemoe"
    example = "granite-3.1-1b-a400m-instruct"
    features = "as granite, with mixtures of experts; native operators only"
    routers = ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight")
    fused = (
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    )
    single = ""
    expert_count = "num_local_experts"

    @property
    def weights_normed(self) -> bool:
        return True

    @property
    def expert_scale(self) -> float:
        return self.settings.number("residual_multiplier", 1.0)
