"""ERNIE 4.5, the dense ones: Llama whose neighbouring channels are rotated."""

from edgespec.export.architectures.base import Architecture


class Ernie45(Architecture):
    model_type = "ernie4_5"
    example = "ERNIE-4.5-0.3B-PT"
    features = "neighbouring channels rotated"
    epsilon = ("rms_norm_eps", 1e-5)
    tied_by_default = True
    rope_theta = 500_000.0
    pairs = "neighbours"

    def bias(self, module: str) -> bool:
        return self.settings.flag("use_bias")
