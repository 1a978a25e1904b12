"""StarCoder2: layer norms, biases, no gate in the MLP, a sliding window (arXiv 2402.19173)."""

from typing import ClassVar

from edgespec.export.architectures.base import Architecture


class StarCoder2(Architecture):
    model_type = "starcoder2"
    example = "starcoder2-3b"
    features = "layer norms, biases, sliding window"
    layer_names: ClassVar[dict[str, str]] = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    epsilon = ("norm_epsilon", 1e-5)
    activation_default = "gelu_pytorch_tanh"
    layer_norms = True
    gated_mlp = False
    tied_by_default = True

    def bias(self, module: str) -> bool:
        return self.settings.flag("use_bias", True)

    def slides(self, layer: int) -> bool:
        return True
