"""SmolLM3: some layers are not told positions (NoPE)."""

from dataclasses import replace

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import AttentionRule


class SmolLm3(Architecture):
    model_type = "smollm3"
    example = "SmolLM3-3B"
    features = "layers without positions (NoPE), windows"
    tied_by_default = True
    rope_theta = 2_000_000.0

    def turned(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated."""
        given = self.settings.each(
            "no_rope_layers", self.facts.layers, (0, 1)
        )  # 1 where they are, in spite of the name
        if given is not None:
            return bool(given[layer])
        return (layer + 1) % self.settings.integer("no_rope_layer_interval", 4) != 0

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), rotary="rope" if self.turned(layer) else None)

    def slides(self, layer: int) -> bool:
        if not self.settings.flag("use_sliding_window"):
            return False
        return super().slides(layer) if self.layer_types else not self.turned(layer)
