"""Command R7B and Aya: as Command R; three layers with windows to one without, which is not told positions."""

from dataclasses import replace

from edgespec.export.architectures.cohere import Cohere
from edgespec.export.architectures.ops import AttentionRule


class Cohere2(Cohere):
    model_type = "cohere2"
    example = "c4ai-command-r7b-12-2024"
    features = "as cohere; windows in three of four layers, no positions (NoPE) in the others"
    rope_theta = 10_000.0

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), rotary="rope" if self.slides(layer) else None)

    def slides(self, layer: int) -> bool:
        if self.layer_types:
            return super().slides(layer)
        return (layer + 1) % self.settings.integer("sliding_window_pattern", 4) != 0
