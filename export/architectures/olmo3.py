"""OLMo 3: OLMo 2 with windows in three of four layers; scaled rotation only in the others."""

from dataclasses import replace

from edgespec.export.architectures.olmo2 import Olmo2
from edgespec.export.architectures.ops import AttentionRule
from edgespec.export.architectures.rope import Rotary


class Olmo3(Olmo2):
    model_type = "olmo3"
    example = "Olmo-3-7B-Instruct"
    features = "as olmo2; local and global layers with a rotation each"

    def rotations(self) -> dict[str, Rotary]:
        theta = self.settings.number("rope_theta", 500_000.0)
        full = self.rotation("full_attention", theta, scaled=True)
        return {"rope": full, "rope_local": self.rotation("sliding_attention", theta, scaled=False)}

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), rotary="rope_local" if self.slides(layer) else "rope")

    def slides(self, layer: int) -> bool:
        return super().slides(layer) if self.layer_types else (layer + 1) % 4 != 0
