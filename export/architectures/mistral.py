"""Mistral and Ministral: all layers have the sliding window, if there is one (arXiv 2310.06825)."""

from edgespec.export.architectures.base import Architecture


class Mistral(Architecture):
    model_type = "mistral"
    example = "Mistral-7B-Instruct-v0.3"
    features = "sliding window in all layers"

    def bias(self, module: str) -> bool:
        return False

    def slides(self, layer: int) -> bool:
        return True
