"""Phi-1.5 and Phi-2: one layer norm for both sub-layers, partly rotated heads, an LM head with a bias."""

from typing import ClassVar

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Ops, Value


class Phi(Architecture):
    model_type = "phi"
    example = "phi-2, phi-1_5"
    features = "parallel sub-layers, layer norms, partly rotated heads, LM head with a bias"
    outer_names: ClassVar[dict[str, str]] = {"model.norm": "model.final_layernorm"}
    layer_names: ClassVar[dict[str, str]] = {
        "self_attn.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
    epsilon = ("layer_norm_eps", 1e-5)
    activation_default = "gelu_new"
    layer_norms = True
    gated_mlp = False
    head_bias = True
    rope_share = 0.5

    def check(self) -> None:
        self.settings.refuse("qk_layernorm", "a layer norm for each head", "phi without it")

    def bias(self, module: str) -> bool:
        return True

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        return self.parallel_layer(ops, x, layer, None)
