"""Qwen2 and Qwen2.5: biases on q, k and v only; a sliding window in the upper layers, if it is switched on."""

from edgespec.export.architectures.base import Architecture


class Qwen2(Architecture):
    model_type = "qwen2"
    example = "Qwen2.5-0.5B-Instruct"
    features = "biases on q, k, v; windows in upper layers"

    def bias(self, module: str) -> bool:
        return module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def slides(self, layer: int) -> bool:
        if not self.settings.flag("use_sliding_window"):
            return False
        if self.layer_types:
            return super().slides(layer)
        return layer >= self.settings.number("max_window_layers", 28)
