"""Falcon: sub-layers side by side, one key head for all or for a group, fused projections (arXiv 2311.16867)."""

from collections.abc import Mapping
from typing import ClassVar

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.fused import unfused
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Falcon(Architecture):
    model_type = "falcon"
    example = "falcon-7b-instruct, Falcon-11B"
    features = "parallel sub-layers, one key head or groups, fused projections"
    aliases: ClassVar[dict[str, str]] = {"num_key_value_heads": "num_kv_heads"}
    layers_at = "transformer.h"
    outer_names: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f",
    }
    epsilon = ("layer_norm_epsilon", 1e-5)
    activation_key = "activation"
    activation_default = "gelu"
    layer_norms = True
    gated_mlp = False
    tied_by_default = True
    context_default = 2048

    def check(self) -> None:
        self.settings.refuse("alibi", "linear position biases", "falcon with rotary positions")

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("ffn_hidden_size", 4 * hidden)

    def key_heads(self, heads: int) -> int:
        if self.settings.flag("new_decoder_architecture"):
            return super().key_heads(heads)
        return 1 if self.settings.flag("multi_query", True) else heads

    @property
    def two_norms(self) -> bool:
        """Whether the MLP beside attention has a norm of its own."""
        return (
            self.settings.flag("new_decoder_architecture") and self.settings.integer("num_ln_in_parallel_attn", 2) == 2
        )

    def bias(self, module: str) -> bool:
        return self.settings.flag("bias")

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        if self.settings.flag("new_decoder_architecture") or self.settings.flag("parallel_attn", True):
            return self.parallel_layer(ops, x, layer, self.mlp_norm if self.two_norms else None)
        return super().layer(ops, x, layer)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        for layer in range(self.facts.layers):
            theirs = f"{self.layers_at}.{layer}.self_attention.query_key_value"
            bias = self.bias("self_attn.q_proj")
            found |= unfused(source, theirs, f"{LAYERS}.{layer}.self_attn", self.facts, bias)
        return found

    @property
    def names(self) -> dict[str, str]:
        norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
        if self.two_norms:
            norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
        return {
            **norms,
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        }
