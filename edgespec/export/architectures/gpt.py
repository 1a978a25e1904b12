"""Decoders with layer norms: GPT-2, GPT-NeoX, Falcon, StarCoder2, Phi-2, StableLM and Command R."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.formula import LAYERS, QKV
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import BEFORE, LogitsRule
from edgespec.export.source.derived import Extra, original, rows_of, transposed
from edgespec.export.source.source import Checkpoint

NEOX_MLP = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}


@known("phi", "phi-2, phi-1_5", "parallel sub-layers, layer norms, partly rotated heads, LM head with a bias")
class Phi(Architecture):
    """Phi-1.5 and Phi-2."""

    epsilon = ("layer_norm_eps", 1e-5)
    layer_norms = True
    parallel = True
    outer_names = {"model.norm": "model.final_layernorm"}
    layer_names = {"self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    activation_default = "gelu_new"
    gated_mlp = False
    biases = {"": True}
    head_bias = True
    rope_share = 0.5
    refused = (("qk_layernorm", "a layer norm for each head", "phi without it"),)


@known("stablelm", "stablelm-2-1_6b-chat", "layer norms, partly rotated heads, parallel sub-layers")
class StableLm(Architecture):
    """StableLM 2 and 3: some have both sub-layers side by side."""

    epsilon = ("layer_norm_eps", 1e-5)
    layer_norms = True
    parallel = ("use_parallel_residual", False)
    biases = dict.fromkeys(QKV, ("use_qkv_bias", False))
    rope_share = 0.25
    refused = (("qk_layernorm", "a layer norm for each head", "stablelm without it"),)


@known(
    "cohere",
    "c4ai-command-r-v01, aya-23-8B",
    "parallel sub-layers, layer norms without biases, neighbouring channels rotated, scaled logits",
)
class Cohere(Architecture):
    """Command R."""

    epsilon = ("layer_norm_eps", 1e-5)
    layer_norms = True
    norm_bias = False
    parallel = True
    tied_by_default = True
    rope_theta = 500_000.0
    pairs = "neighbours"
    biases = {"self_attn": ("attention_bias", False)}
    refused = (("use_qk_norm", "a layer norm for each head", "cohere without it"),)

    @property
    def logits(self) -> LogitsRule:
        return LogitsRule(scale=self.settings.number("logit_scale", 0.0625))


@known(
    "cohere2",
    "c4ai-command-r7b-12-2024",
    "as cohere; windows in three of four layers, no positions (NoPE) in the others",
)
class Cohere2(Cohere):
    """Command R7B and Aya."""

    rope_theta = 10_000.0
    window_pattern = ("sliding_window_pattern", 4)

    def rotary(self, layer: int) -> str | None:
        return "rope" if self.slides(layer) else None


@known("starcoder2", "starcoder2-3b", "layer norms, biases, sliding window")
class StarCoder2(Architecture):
    """StarCoder2 (arXiv 2402.19173)."""

    layer_names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    epsilon = ("norm_epsilon", 1e-5)
    activation_default = "gelu_pytorch_tanh"
    layer_norms = True
    gated_mlp = False
    tied_by_default = True
    biases = {"": ("use_bias", True)}
    windows = "all"


@known("gpt_neox", "pythia-160m", "parallel sub-layers, layer norms, partly rotated heads, fused projections")
class GptNeoX(Architecture):
    """GPT-NeoX and Pythia (arXiv 2204.06745)."""

    aliases = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    layers_at = "gpt_neox.layers"
    outer_names = {"model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm",
                   "lm_head": "embed_out"}  # fmt: skip
    layer_names = {**{name: name for name in BEFORE if name}, "self_attn.o_proj": "attention.dense", **NEOX_MLP}
    grouped_qkv = "attention.query_key_value"
    epsilon = ("layer_norm_eps", 1e-5)
    activation_default = "gelu"
    layer_norms = True
    parallel = ("use_parallel_residual", True)
    one_norm = False
    biases = {"": ("attention_bias", True), "mlp": True}
    rope_share = 0.25
    gated_mlp = False


@known("falcon", "falcon-7b-instruct, Falcon-11B", "parallel sub-layers, one key head or groups, fused projections")
class Falcon(Architecture):
    """Falcon: one key head for all or for a group (arXiv 2311.16867)."""

    aliases = {"num_key_value_heads": "num_kv_heads"}
    layers_at = "transformer.h"
    outer_names = {"model.embed_tokens": "transformer.word_embeddings", "model.norm": "transformer.ln_f"}
    grouped_qkv = "self_attention.query_key_value"
    epsilon = ("layer_norm_epsilon", 1e-5)
    activation_key = "activation"
    activation_default = "gelu"
    layer_norms = True
    biases = {"": ("bias", False)}
    gated_mlp = False
    tied_by_default = True
    context_default = 2048
    refused = (("alibi", "linear position biases", "falcon with rotary positions"),)

    def configure(self) -> dict[str, Any]:
        new = self.settings.flag("new_decoder_architecture")
        self.parallel = new or self.settings.flag("parallel_attn", True)
        self.one_norm = not (new and self.settings.integer("num_ln_in_parallel_attn", 2) == 2)
        norms = ("input_layernorm", "post_attention_layernorm") if self.one_norm else ("ln_attn", "ln_mlp")
        named = dict(zip(("input_layernorm", "post_attention_layernorm"), norms, strict=True))
        self.layer_names = {**named, "self_attn.o_proj": "self_attention.dense", **NEOX_MLP}
        return super().configure()

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("ffn_hidden_size", 4 * hidden)

    def key_heads(self, heads: int) -> int:
        if self.settings.flag("new_decoder_architecture"):
            return super().key_heads(heads)
        return 1 if self.settings.flag("multi_query", True) else heads


@known("gpt2", "gpt2, distilgpt2", "learned positions, layer norms, transposed matrices")
class Gpt2(Architecture):
    """GPT-2: matrices are stored the other way round."""

    aliases = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
    layers_at = "transformer.h"
    outer_names = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    layer_names = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    positions = "transformer.wpe.weight"
    epsilon = ("layer_norm_epsilon", 1e-5)
    activation_key = "activation_function"
    activation_default = "gelu_new"
    layer_norms = True
    biases = {"": True}
    gated_mlp = False
    windows = "none"
    rope_share = 0
    tied_by_default = True
    refused = (
        ("scale_attn_by_inverse_layer_idx", "a scale for each layer", "plain GPT-2"),
        ("add_cross_attention", "cross attention", "plain GPT-2"),
    )

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("intermediate_size", 4 * hidden)

    @property
    def score_scale(self) -> float:
        return super().score_scale if self.settings.flag("scale_attn_weights", True) else 1

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, positions=self.positions)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        names = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
        for layer in range(self.facts.layers):
            ours, theirs = f"{LAYERS}.{layer}", f"{self.layers_at}.{layer}"
            if source.has(f"{ours}.{QKV[0]}.weight"):  # one by one, outputs first, as in GGUF
                continue
            for part, name in names.items():
                found[f"{ours}.{part}.weight"] = transposed(original(source, f"{theirs}.{name}.weight"))
                found[f"{ours}.{part}.bias"] = original(source, f"{theirs}.{name}.bias")
            for number, module in enumerate(QKV):
                rows = np.arange(self.facts.hidden) + number * self.facts.hidden
                fused = original(source, f"{theirs}.attn.c_attn.weight"), original(source, f"{theirs}.attn.c_attn.bias")
                found[f"{ours}.{module}.weight"] = rows_of(transposed(fused[0]), rows)
                found[f"{ours}.{module}.bias"] = rows_of(fused[1], rows)
        return found
