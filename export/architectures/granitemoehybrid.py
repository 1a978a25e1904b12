"""Granite 4, those with attention in all layers and no experts: as Granite 3, gate and up are one matrix."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.fused import stacked
from edgespec.export.architectures.granite import Granite
from edgespec.export.architectures.ops import AttentionRule
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class GraniteHybrid(Granite):
    model_type = "granitemoehybrid"
    example = "granite-4.0-350m, granite-4.0-1b"
    features = "as granite, with or without positions; not the hybrid ones"
    aliases: ClassVar[dict[str, str]] = {"intermediate_size": "shared_intermediate_size"}
    layer_names: ClassVar[dict[str, str]] = {"mlp.down_proj": "shared_mlp.output_linear"}

    def check(self) -> None:
        self.settings.refuse("num_local_experts", "a mixture of experts", "granitemoehybrid with num_local_experts 0")
        kinds = self.settings.get("layer_types", self.settings.get("layers_block_type")) or ["mamba"]
        if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
            raise UnsupportedModel(
                f"{self.settings.file}: state-space layers (layer_types) are not supported; "
                "supported: granitemoehybrid with attention in all layers"
            )

    def bias(self, module: str) -> bool:
        return module.startswith("self_attn") and super().bias(module)

    def rule(self, layer: int) -> AttentionRule:
        turned = self.settings.get("position_embedding_type") == "rope"
        return replace(super().rule(layer), rotary="rope" if turned else None)

    def slides(self, layer: int) -> bool:
        return False

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        inner = self.facts.intermediate
        parts = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        return {
            **stacked(source, self.facts.layers, {"shared_mlp.input_linear": parts}),
            **super().derived(source),
        }
