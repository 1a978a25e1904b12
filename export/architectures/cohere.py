"""Command R: sub-layers side by side behind one norm, layer norms without biases, scaled logits."""

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import LogitsRule, Ops, Value


class Cohere(Architecture):
    model_type = "cohere"
    example = "c4ai-command-r-v01, aya-23-8B"
    features = "parallel sub-layers, layer norms without biases, neighbouring channels rotated, scaled logits"
    epsilon = ("layer_norm_eps", 1e-5)
    layer_norms = True
    norm_bias = False
    tied_by_default = True
    rope_theta = 500_000.0
    pairs = "neighbours"

    def check(self) -> None:
        self.settings.refuse("use_qk_norm", "a layer norm for each head", "cohere without it")

    def bias(self, module: str) -> bool:
        return module.startswith("self_attn") and super().bias(module)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        return self.parallel_layer(ops, x, layer, None)

    @property
    def logits(self) -> LogitsRule:
        return LogitsRule(scale=self.settings.number("logit_scale", 0.0625))
