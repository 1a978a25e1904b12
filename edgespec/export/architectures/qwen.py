"""Qwen 2, 3 and 3.5, dense and with mixtures of experts, with attention only or with gated delta rules."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.experts import Experts
from edgespec.export.architectures.formula import ATTENTION, GATE, LAYERS, QKV
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.states import DeltaRules, FusedDeltaRules
from edgespec.export.source.derived import Extra, original, rows_of
from edgespec.export.source.source import Checkpoint


def sparse(arch: Architecture, layer: int) -> bool:
    """Whether a layer has experts, where config.json lists the dense ones and says every how many layers has some."""
    dense = arch.settings.layers("mlp_only_layers")
    return layer not in dense and (layer + 1) % arch.settings.integer("decoder_sparse_step", 1) == 0


@known("qwen2", "Qwen2.5-0.5B-Instruct", "biases on q, k, v; windows in upper layers")
class Qwen2(Architecture):
    """Qwen2 and Qwen2.5: a sliding window in the upper layers, if it is switched on."""

    biases = dict.fromkeys(QKV, True)

    def slides(self, layer: int) -> bool:
        if not self.settings.flag("use_sliding_window"):
            return False
        if self.layer_types:
            return super().slides(layer)
        return layer >= self.settings.number("max_window_layers", 28)


@known("qwen3", "Qwen3-0.6B", "norms of each head, windows in upper layers")
class Qwen3(Qwen2):
    """Qwen3: no biases by default, an explicit head size (arXiv 2505.09388)."""

    biases = dict(Architecture.biases)
    head_norms = ("q_norm", "k_norm")


@known("qwen3_moe", "Qwen3-30B-A3B-Instruct-2507", "as qwen3, with mixtures of experts; native operators only")
class Qwen3Moe(Architecture):
    """Qwen3 with mixtures of experts."""

    aliases = {"num_experts": "num_local_experts"}  # as transformers 5 saves it
    head_norms = ("q_norm", "k_norm")
    experts = Experts(size="moe_intermediate_size")

    def is_moe_layer(self, layer: int) -> bool:
        return sparse(self, layer)

    def slides(self, layer: int) -> bool:
        return self.settings.flag("use_sliding_window")


@known(
    "mellum",
    "Mellum2-12B-A2.5B-Base",
    "as qwen3_moe; local and global layers with a rotation each; native operators only",
)
class Mellum(Qwen3Moe):
    """Mellum 2: Qwen3's mixture with OLMo 3's rotations."""

    experts = Experts(size="moe_intermediate_size", normed=("norm_topk_prob", True))

    def is_moe_layer(self, layer: int) -> bool:
        kinds = self.settings.each("mlp_layer_types", self.facts.layers, ("dense", "sparse"))
        return kinds is None or kinds[layer] == "sparse"

    def slides(self, layer: int) -> bool:
        return Architecture.slides(self, layer)

    def rotations(self) -> dict[str, Rotary]:
        full = self.rotation("full_attention", 500_000.0, scaled=True)
        return {"rope": full, "rope_local": self.rotation("sliding_attention", 10_000.0, scaled=False)}


@known(
    "qwen3_5_text",
    "Qwen3.5-0.8B, Qwen3.5-2B, Qwen3.5-4B",
    "gated delta rules in three of four layers, gated attention in the others; native operators only",
)
class Qwen35(Architecture):
    """Qwen3.5: the gate of attention is stored between the heads of q."""

    norm_weight_is_offset = True
    context_default = 32768
    rope_share = 0.25
    biases = {"self_attn": ("attention_bias", False)}
    windows = "none"
    head_norms = ("q_norm", "k_norm")
    output_gate = True
    states = DeltaRules()

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("intermediate_size", self.settings.optional("moe_intermediate_size"))

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        size, kinds = self.facts.head_dim, ("weight", "bias") if self.bias("self_attn") else ("weight",)
        both = np.arange(self.facts.heads * 2 * size).reshape(self.facts.heads, 2, size)  # q, gate
        for layer in set(range(self.facts.layers)) - set(self.facts.convolutions):
            at = f"{LAYERS}.{layer}"
            for part, module in enumerate((ATTENTION.format("q"), GATE)):
                for kind in kinds:
                    own = original(source, f"{at}.{ATTENTION.format('q')}.{kind}")
                    found[f"{at}.{module}.{kind}"] = rows_of(own, both[:, part].ravel())
        return found


@known(
    "qwen3_5_moe_text",
    "Qwen3.5-35B-A3B",
    "as qwen3_5_text, with mixtures of experts and a shared expert; native operators only",
)
class Qwen35Moe(Qwen35):
    """Qwen3.5 with mixtures of experts: one more expert gets every row, through a gate."""

    experts = Experts(
        size="moe_intermediate_size",
        shared=("mlp.shared_expert", "shared_expert_intermediate_size"),
        shared_gate="mlp.shared_expert_gate.weight",
        normed=("norm_topk_prob", True),
    )


@known(
    "qwen2_moe",
    "Qwen1.5-MoE-A2.7B-Chat",
    "as qwen2, with mixtures of experts and a shared expert; native operators only",
)
class Qwen2Moe(Qwen2):
    """Qwen2 with mixtures of experts: one more expert gets every row, through a gate."""

    biases = {"self_attn.o": False, "self_attn": ("qkv_bias", True)}
    experts = Experts(
        size="moe_intermediate_size",
        shared=("mlp.shared_expert", "shared_expert_intermediate_size"),
        shared_gate="mlp.shared_expert_gate.weight",
    )

    def is_moe_layer(self, layer: int) -> bool:
        return sparse(self, layer)


@known("qwen3_next", "Qwen3-Next-80B-A3B-Instruct", "as qwen3_5_moe_text; native operators only")
class Qwen3Next(Qwen35):
    """Qwen3-Next: as Qwen3.5 with experts, some layers without."""

    experts = Qwen35Moe.experts
    states = FusedDeltaRules()

    def is_moe_layer(self, layer: int) -> bool:
        return sparse(self, layer)
