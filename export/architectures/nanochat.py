"""nanochat: norms without weights, also of the embedding and of rotated heads, squared ReLU, capped logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from edgespec.export.architectures.base import EMBEDDING, LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, LogitsRule
from edgespec.export.source.derived import Normed, Own
from edgespec.export.source.extended import Extra, Held
from edgespec.export.source.source import Checkpoint


class NanoChat(Architecture):
    model_type = "nanochat"
    example = "nanochat-d32"
    features = "norms without weights, norms of each head after rotation, squared ReLU, capped logits"
    layer_names: ClassVar[dict[str, str]] = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    activation_default = "relu2"
    gated_mlp = False
    pairs = "reversed"

    def check(self) -> None:
        if self.facts.tied:  # the embedding is normed as it is read
            self.settings.refuse("tie_word_embeddings", "an LM head that is the embedding", "one of its own")

    def bias(self, module: str) -> bool:
        return module.startswith("self_attn") and super().bias(module)

    def rule(self, layer: int) -> AttentionRule:
        norm = self.norm(f"{LAYERS}.heads_norm")
        return replace(super().rule(layer), q_norm=norm, k_norm=norm, late_norms=True)

    @property
    def logits(self) -> LogitsRule:
        return LogitsRule(cap=self.settings.number("final_logit_softcapping", 15.0))

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        facts, ones = self.facts, Held(np.ones(self.facts.hidden, np.float32))
        norms = ["model.norm"]
        for layer in range(facts.layers):
            norms += [f"{LAYERS}.{layer}.{module}" for module in (self.attention_norm, self.mlp_norm)]
        heads = {f"{LAYERS}.heads_norm.weight": Held(np.ones(facts.head_dim, np.float32))}
        embedding = {self.embedding: Normed(Own(source, f"{EMBEDDING}.weight"), self.eps)}
        return {f"{name}.weight": ones for name in norms} | heads | embedding
