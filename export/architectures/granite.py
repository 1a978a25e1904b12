"""Granite 3: Llama with four multipliers, of embeddings, scores, sub-layers and logits."""

from collections.abc import Mapping
from dataclasses import replace

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, LogitsRule, Ops, Value
from edgespec.export.source.derived import Affine, Own
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Granite(Architecture):
    model_type = "granite"
    example = "granite-3.3-2b-instruct"
    features = "multipliers of embedding, scores, sub-layers, logits"

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, scale=self.settings.number("embedding_multiplier", 1.0))

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), scale=self.settings.number("attention_multiplier", 1.0))

    @property
    def logits(self) -> LogitsRule:
        return LogitsRule(scale=1 / self.settings.positive("logits_scaling", 1.0))

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        """What ends a sub-layer carries its multiplier."""
        times, found = self.settings.number("residual_multiplier", 1.0), {}
        for layer in range(self.facts.layers):
            for module in ("self_attn.o_proj", "mlp.down_proj"):
                for kind in ("weight", "bias") if self.bias(module) else ("weight",):
                    stored = f"{LAYERS}.{layer}.{self.names.get(module, module)}.{kind}"
                    found[f"{LAYERS}.{layer}.{module}.{kind}"] = Affine(Own(source, stored), scale=times)
        return found
