"""Llama, and decoders that differ from it in a few words: biases, windows, norms, activations, rotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.formula import EMBEDDING, LAYERS, QKV
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rules import AFTER, AttentionRule
from edgespec.export.source.derived import Extra, Floats, held, normed, original
from edgespec.export.source.source import Checkpoint

ATTENTION_BIAS = {"self_attn": ("attention_bias", False)}
GATE_AND_UP = ("mlp.gate_proj", "mlp.up_proj")


@known("llama", "Llama-3.2-1B-Instruct, SmolLM2", "grouped heads, biases, any head size")
class Llama(Architecture):
    """Llama 1 to 3 and what shares their layout."""


@known("mistral", "Mistral-7B-Instruct-v0.3", "sliding window in all layers")
class Mistral(Architecture):
    """Mistral and Ministral: all layers have the sliding window, if there is one (arXiv 2310.06825)."""

    biases = {}
    windows = "all"


@known(
    "ministral3",
    "Ministral-3-3B-Instruct-2512",
    "queries that grow beyond the first trained length, YaRN; text part of those with images",
)
class Ministral3(Mistral):
    """Ministral 3, the text part."""

    epsilon = ("rms_norm_eps", 1e-5)


@known("seed_oss", "Seed-OSS-36B-Instruct", "biases on q, k, v")
class SeedOss(Architecture):
    """Seed-OSS: Llama with biases on q, k and v."""

    biases = {
        "self_attn": ("attention_bias", True),
        "self_attn.o_proj": ("attention_out_bias", False),
        "mlp": ("mlp_bias", False),
    }


@known("ernie4_5", "ERNIE-4.5-0.3B-PT", "neighbouring channels rotated")
class Ernie45(Architecture):
    """ERNIE 4.5, the dense ones."""

    epsilon = ("rms_norm_eps", 1e-5)
    tied_by_default = True
    rope_theta = 500_000.0
    pairs = "neighbours"
    biases = {"": ("use_bias", False)}


@known(
    "glm",
    "glm-4-9b-chat-hf, glm-edge-1.5b-chat",
    "neighbouring channels of half of each head rotated, biases on q, k, v, fused gate and up",
)
class Glm(Architecture):
    """GLM 4 9B of 2024."""

    epsilon = ("rms_norm_eps", 1.5625e-07)
    rope_share = 0.5
    pairs = "neighbours"
    biases = dict.fromkeys(QKV, ("attention_bias", True))
    stacked = {"mlp.gate_up_proj": GATE_AND_UP}


@known("glm4", "GLM-4-9B-0414", "as glm; norms before and after sub-layers")
class Glm4(Glm):
    """GLM 4 of 2025."""

    norms = Glm.norms._replace(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


@known("phi3", "Phi-3.5-mini-instruct, Phi-4-mini-instruct", "fused projections, LongRoPE, partly rotated heads")
class Phi3(Architecture):
    """Phi-3, Phi-3.5 and Phi-4; LongRoPE, short or long, is chosen by ``--context`` once."""

    epsilon = ("rms_norm_eps", 1e-5)
    biases = {}
    windows = "all"
    stacked = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_AND_UP}


@known("smollm3", "SmolLM3-3B", "layers without positions (NoPE), windows")
class SmolLm3(Architecture):
    """SmolLM3: some layers are not told positions, which are those with windows."""

    tied_by_default = True
    rope_theta = 2_000_000.0

    def turned(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated."""
        # 1 where they are, in spite of the name
        given = self.settings.each("no_rope_layers", self.facts.layers, (0, 1))
        if given is not None:
            return bool(given[layer])
        return (layer + 1) % self.settings.integer("no_rope_layer_interval", 4) != 0

    def rotary(self, layer: int) -> str | None:
        return "rope" if self.turned(layer) else None

    def slides(self, layer: int) -> bool:
        if not self.settings.flag("use_sliding_window"):
            return False
        return super().slides(layer) if self.layer_types else not self.turned(layer)


@known(
    "exaone4",
    "EXAONE-4.0-1.2B",
    "norms only after sub-layers, norms of each head, windows, global layers without positions",
)
class Exaone4(Architecture):
    """EXAONE 4: layers without windows are not told positions (arXiv 2507.11407)."""

    epsilon = ("rms_norm_eps", 1e-5)
    biases = {}
    norms = AFTER
    head_norms = ("q_norm", "k_norm")
    window_pattern = ("sliding_window_pattern", 4)

    def rotary(self, layer: int) -> str | None:
        turned = self.settings.optional("sliding_window") is None or self.slides(layer)
        return "rope" if turned else None


@known("hunyuan_v1_dense", "Hunyuan-0.5B-Instruct, Hunyuan-4B-Instruct", "norms of each head after rotation")
class HunyuanDense(Architecture):
    """Hunyuan, the dense ones: a base of rotation stretched once."""

    epsilon = ("rms_norm_eps", 1e-5)
    biases = ATTENTION_BIAS
    head_norms = ("query_layernorm", "key_layernorm")
    late_head_norms = True

    def rotations(self) -> dict[str, Rotary]:
        rope = super().rotations()["rope"]
        parameters, dims = dict(rope.parameters), rope.dims
        if parameters["rope_type"] == "dynamic" and (alpha := parameters.get("alpha")) and dims > 2:
            # in spite of its name the same at every length
            theta = float(parameters["rope_theta"]) * float(alpha) ** (dims / (dims - 2))
            parameters |= {"rope_type": "default", "rope_theta": theta}
        return {"rope": Rotary(parameters, dims)}


@known(
    "nanochat",
    "nanochat-d32",
    "norms without weights, norms of each head after rotation, squared ReLU, capped logits",
)
class NanoChat(Architecture):
    """nanochat: the embedding is also normed."""

    layer_names = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    activation_default = "relu2"
    gated_mlp = False
    pairs = "reversed"
    biases = ATTENTION_BIAS
    logits_cap = ("final_logit_softcapping", 15.0)

    def configure(self) -> dict[str, Any]:
        if self.facts.tied:  # the embedding is normed as it is read
            self.settings.refuse("tie_word_embeddings", "an LM head that is the embedding", "one of its own")
        return super().configure()

    def rule(self, layer: int) -> AttentionRule:
        norm = self.norm(f"{LAYERS}.heads_norm")
        return replace(super().rule(layer), q_norm=norm, k_norm=norm, late_norms=True)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        facts, ones = self.facts, held(np.ones(self.facts.hidden, np.float32))
        norms = ["model.norm"]
        for layer in range(facts.layers):
            norms += [f"{LAYERS}.{layer}.{module}" for module in (self.norms.attention, self.norms.mlp)]
        heads = {f"{LAYERS}.heads_norm.weight": held(np.ones(facts.head_dim, np.float32))}
        embedding = {self.embedding: normed(original(source, f"{EMBEDDING}.weight"), self.eps)}
        return {f"{name}.weight": ones for name in norms} | heads | embedding


def xielu_numbers(above: Extra, below: Extra, slope: Extra | None) -> Extra:
    """Compute the numbers of one layer's ``xielu`` as ops.py has them, [3], of what training stores (2411.13010)."""

    def read(rows: slice, columns: slice | None) -> Floats:
        given = [0.5 if each is None else float(each.read(slice(None), None).reshape(())) for each in stored]
        p, n, b = np.logaddexp(0, given[0]), np.logaddexp(0, given[1]), given[2]
        return np.array([p, b + n, b], np.float32)[rows]

    stored = (above, below, slope)
    return Extra(lambda: (3,), read, frozenset[str]().union(*(each.origins for each in stored if each)))


@known("apertus", "Apertus-8B-Instruct-2509", "xIELU without a gate, norms of each head")
class Apertus(Architecture):
    """Apertus: an activation with two learnt numbers a layer (arXiv 2509.14233)."""

    epsilon = ("rms_norm_eps", 1e-5)
    layer_names = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    activation_default = "xielu"
    gated_mlp = False
    rope_theta = 12_000_000.0
    biases = ATTENTION_BIAS
    head_norms = ("q_norm", "k_norm")
    windows = "none"

    def numbers(self, layer: int) -> str | None:
        return f"{LAYERS}.{layer}.mlp.act_fn.numbers" if self.activation == "xielu" else None

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        for layer in range(self.facts.layers):
            if name := self.numbers(layer):
                at = name.removesuffix("numbers")
                above, below, slope = (original(source, f"{at}{part}") for part in ("alpha_p", "alpha_n", "beta"))
                found[name] = xielu_numbers(above, below, slope if source.has(f"{at}beta") else None)
        return found
