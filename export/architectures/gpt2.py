"""GPT-2: learned positions, layer norms, matrices stored the other way round."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, Ops, Value
from edgespec.export.architectures.rope import Rotary
from edgespec.export.source.derived import Own, Rows, Transposed
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Gpt2(Architecture):
    model_type = "gpt2"
    example = "gpt2, distilgpt2"
    features = "learned positions, layer norms, transposed matrices"
    aliases: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
    layers_at = "transformer.h"
    outer_names: ClassVar[dict[str, str]] = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    layer_names: ClassVar[dict[str, str]] = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    positions = "transformer.wpe.weight"
    epsilon = ("layer_norm_epsilon", 1e-5)
    activation_key = "activation_function"
    activation_default = "gelu_new"
    layer_norms = True
    gated_mlp = False
    tied_by_default = True

    def check(self) -> None:
        self.settings.refuse("scale_attn_by_inverse_layer_idx", "a scale for each layer", "plain GPT-2")
        self.settings.refuse("add_cross_attention", "cross attention", "plain GPT-2")

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("intermediate_size", 4 * hidden)

    def bias(self, module: str) -> bool:
        return True

    def rotations(self) -> dict[str, Rotary]:
        return {}

    def rule(self, layer: int) -> AttentionRule:
        return AttentionRule(layer, self.facts.head_dim**-0.5 if self.settings.flag("scale_attn_weights", True) else 1)

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, positions=self.positions)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        names = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
        for layer in range(self.facts.layers):
            ours, theirs = f"{LAYERS}.{layer}", f"{self.layers_at}.{layer}"
            for part, name in names.items():
                found[f"{ours}.{part}.weight"] = Transposed(Own(source, f"{theirs}.{name}.weight"))
                found[f"{ours}.{part}.bias"] = Own(source, f"{theirs}.{name}.bias")
            for number, part in enumerate("qkv"):
                rows = np.arange(self.facts.hidden) + number * self.facts.hidden
                fused = Own(source, f"{theirs}.attn.c_attn.weight"), Own(source, f"{theirs}.attn.c_attn.bias")
                found[f"{ours}.self_attn.{part}_proj.weight"] = Rows(Transposed(fused[0]), rows)
                found[f"{ours}.self_attn.{part}_proj.bias"] = Rows(fused[1], rows)
        return found
