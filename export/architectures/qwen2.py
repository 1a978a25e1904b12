"""Qwen2 and Qwen2.5: biases on q, k and v only."""

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture


class Qwen2(Architecture):
    model_type = "qwen2"
    attention_bias = True
    output_bias = False

    def _refuse_unknown(self) -> None:
        super()._refuse_unknown()
        if self.config.get("use_sliding_window"):
            raise UnsupportedModel("qwen2 with use_sliding_window is not supported; supported: full attention")
