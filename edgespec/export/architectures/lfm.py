"""LFM 2 and 3: short convolutions in most layers, attention in the others (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.experts import Experts, first_of
from edgespec.export.architectures.formula import ATTENTION, GATE, LAYERS
from edgespec.export.architectures.rope import Rotary, proportional, rotations_by_kind
from edgespec.export.architectures.rows import turned_first, turned_rows
from edgespec.export.architectures.rules import Norms
from edgespec.export.architectures.states import ShortConvolutions
from edgespec.export.source.derived import Extra, original
from edgespec.export.source.source import Checkpoint

MLP = {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
NORMS = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}


@known(
    "lfm2",
    "LFM2-350M, LFM2-1.2B, LFM2.5-1.2B-Instruct",
    "short convolutions in most layers, norms of each head; native operators only",
)
class Lfm2(Architecture):
    """LFM2 and LFM2.5."""

    aliases = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
    outer_names = {"model.norm": "model.embedding_norm"}
    layer_names = {**NORMS, "self_attn.o_proj": "self_attn.out_proj", **MLP}
    epsilon = ("norm_eps", 1e-5)
    tied_by_default = True
    biases = {"conv": ("conv_bias", False)}
    rope_theta = 1_000_000.0
    windows = "none"
    states = ShortConvolutions()
    head_norms = ("q_layernorm", "k_layernorm")

    def inner_size(self, hidden: int) -> int:
        size = self.settings.integer("intermediate_size")
        if self.settings.flag("block_auto_adjust_ff_dim", True):
            size = int(self.settings.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            of = self.settings.integer("block_multiple_of", 256)
            size = -(-size // of) * of
        return size

    def configure(self) -> dict[str, Any]:
        settings, layers = self.settings, range(self.facts.layers)
        kinds = settings.each("layer_types", len(layers), ("conv", "full_attention"))
        full = settings.get("full_attn_idxs", list(layers))
        if kinds is None and isinstance(full, list):
            kinds = ["full_attention" if layer in full else "conv" for layer in layers]
        length = settings.integer("conv_L_cache", 3)
        if not kinds or "full_attention" not in kinds or not 2 <= length <= 16:
            raise UnsupportedModel(f"{settings.file}: expected a layer with attention, and conv_L_cache in 2 to 16")
        convolutions = [layer for layer, kind in enumerate(kinds) if kind == "conv"]
        taps = length if convolutions else 0
        return {"convolutions": convolutions, "taps": taps} | super().configure()


@known(
    "lfm2_moe",
    "LFM2-8B-A1B",
    "as lfm2, with mixtures of experts, chosen by sigmoids and a bias; native operators only",
)
class Lfm2Moe(Lfm2):
    """LFM2 with mixtures of experts; dense MLPs in the first layers."""

    aliases = {"tie_word_embeddings": "tie_embedding"}
    inner_size = Architecture.inner_size
    experts = Experts(
        routers=("feed_forward.gate.weight",),
        fused=(("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),),
        single="feed_forward.experts.{}.{}.weight",
        parts={"gate": "w1", "up": "w3", "down": "w2"},
        size="moe_intermediate_size",
        sigmoid=True,
        normed=("norm_topk_prob", True),
        scale="routed_scaling_factor",
        bias=("feed_forward.expert_bias", ("use_expert_bias", True)),
    )

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.settings.number("num_dense_layers", 2)


@known("lfm3", "LFM3-1.7B", "as lfm2; windows, gates on heads, norms around sub-layers; native operators only")
class Lfm3(Lfm2):
    """LFM3: a gate on each head of attention, [heads, hidden]; half of each head is turned in full layers.

    Attributes:
        kinds: of each layer.
    """

    aliases = {"tie_word_embeddings": "tie_embedding"}
    inner_size = Architecture.inner_size
    layer_names = {**NORMS, **MLP}
    biases = {"conv": ("conv_bias", False), "self_attn": ("attention_bias", False), GATE: False}
    norms = Norms("input_layernorm", "post_attention_layernorm", "post_operator_norm", "post_ffn_norm")
    head_norms = ("q_norm", "k_norm")
    output_gate = ("use_attention_gate", True)
    GATES = "self_attn.gate_proj.weight", "self_attn.g_proj.weight"  # saved, in memory
    KINDS = ("conv", "full_attention", "sliding_attention")
    ROTATIONS = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }

    def configure(self) -> dict[str, Any]:
        settings, layers = self.settings, self.facts.layers
        kinds = settings.each("layer_types", layers, self.KINDS)
        self.kinds = kinds or [self.KINDS[0 if at % 2 or not at else 1 + (at % 4 == 0)] for at in range(layers)]
        length = settings.integer("conv_L_cache", 7)
        convolutions = [at for at, kind in enumerate(self.kinds) if kind == "conv"]
        if len(convolutions) in (0, layers) or not 2 <= length <= 16:
            what = "expected layers with attention and with convolutions, and conv_L_cache in 2 to 16"
            raise UnsupportedModel(f"{settings.file}: {what}")
        settings.values["rope_parameters"] = rotations_by_kind(settings, self.ROTATIONS)
        return {"convolutions": convolutions, "taps": length}

    def width(self, weight: str) -> int | None:
        return self.facts.heads if GATE in weight else None

    def slides(self, layer: int) -> bool:
        return self.kinds[layer] == "sliding_attention"

    def norms_of(self, layer: int) -> Norms:
        around = self.settings.flag("use_sandwich_norm", True)
        return self.norms if around else self.norms._replace(after_attention=None, after_mlp=None)

    def rotations(self) -> dict[str, Rotary]:
        full = self.rotation("full_attention", 1e6, scaled=False)
        return {"rope": self.rotation("sliding_attention", 1e4, scaled=False),
                "rope_full": proportional(full, self.facts.head_dim)}  # fmt: skip

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, facts = dict(super().derived(source)), self.facts
        order = turned_first(facts.head_dim, self.rotaries["rope_full"].dims)
        heads, bias = {"q": facts.heads, "k": facts.kv_heads}, self.bias(ATTENTION)
        for layer, kind in enumerate(self.kinds):
            at = f"{LAYERS}.{layer}."
            if self.on(self.output_gate) and kind != "conv":
                found[f"{at}{GATE}.weight"] = original(source, at + first_of(source, at, self.GATES))
            found |= turned_rows(source, at[:-1], heads, order, bias) if kind == "full_attention" else {}
        return found
