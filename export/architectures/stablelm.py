"""StableLM 2 and 3: layer norms, a part of each head is rotated; some have both sub-layers side by side."""

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Ops, Value


class StableLm(Architecture):
    model_type = "stablelm"
    example = "stablelm-2-1_6b-chat"
    features = "layer norms, partly rotated heads, parallel sub-layers"
    epsilon = ("layer_norm_eps", 1e-5)
    layer_norms = True
    rope_share = 0.25

    def check(self) -> None:
        self.settings.refuse("qk_layernorm", "a layer norm for each head", "stablelm without it")

    def bias(self, module: str) -> bool:
        return self.settings.flag("use_qkv_bias") and module in (f"self_attn.{name}_proj" for name in "qkv")

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        if self.settings.flag("use_parallel_residual"):
            return self.parallel_layer(ops, x, layer, None)
        return super().layer(ops, x, layer)
