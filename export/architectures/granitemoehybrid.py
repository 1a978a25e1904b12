"""Granite 4: attention or state spaces (Mamba-2), and experts beside a shared MLP where there are any."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.fused import stacked
from edgespec.export.architectures.granitemoe import GraniteMoe
from edgespec.export.architectures.mamba import Mamba
from edgespec.export.architectures.ops import AttentionRule, Ops, Value
from edgespec.export.source.derived import Affine
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class GraniteHybrid(Mamba, GraniteMoe):
    model_type = "granitemoehybrid"
    example = "granite-4.0-350m, granite-4.0-h-micro, granite-4.0-h-tiny"
    features = "as granite, with or without positions; state spaces (Mamba-2) and experts on native operators only"
    layer_names: ClassVar[dict[str, str]] = {"mlp.down_proj": "shared_mlp.output_linear"}

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("shared_intermediate_size", 1024)

    def is_mixed(self, layer: int) -> bool:
        return bool(self.settings.get("num_local_experts", 0))

    def bias(self, module: str) -> bool:
        return module.startswith(("self_attn", "linear_attn")) and super().bias(module)

    def rule(self, layer: int) -> AttentionRule:
        turned = self.settings.get("position_embedding_type") == "rope"
        return replace(super().rule(layer), rotary="rope" if turned else None)

    def slides(self, layer: int) -> bool:
        return False

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        if self.facts.experts is None:
            return super().layer(ops, x, layer)
        x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        h = self.normed(ops, x, layer, self.mlp_norm)
        x = ops.sublayer("mlp", layer, x, lambda _: self.transform(ops, h, layer))
        return ops.sublayer("mlp", layer, x, lambda _: Architecture.transform(self, ops, h, layer))

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        inner, times = self.facts.intermediate, self.settings.number("residual_multiplier", 1.0)
        parts = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        found = {
            **stacked(source, self.facts.layers, {"shared_mlp.input_linear": parts}),
            **super().derived(source),
        }
        for layer in self.facts.convolutions:
            for kind in ("weight", "bias") if self.bias("linear_attn") else ("weight",):
                name = f"{LAYERS}.{layer}.linear_attn.out_proj.{kind}"
                found[name] = Affine(found[name], scale=times)
        return found
