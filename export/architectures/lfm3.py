"""LFM3: as LFM2, with windows in some layers, a gate on each head of attention, and norms around sub-layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import ATTENTION, LAYERS
from edgespec.export.architectures.experts import first_of
from edgespec.export.architectures.lfm2 import Lfm2
from edgespec.export.architectures.ops import AttentionRule, Ops, Value
from edgespec.export.architectures.proportional import proportional, rotations_by_kind, turned_first, turned_rows
from edgespec.export.architectures.rope import Rotary
from edgespec.export.source.derived import Own
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint

GATE = "self_attn.output_gate_proj"  # [heads, hidden]
GATES = "self_attn.gate_proj.weight", "self_attn.g_proj.weight"  # saved, in memory
KINDS = ("conv", "full_attention", "sliding_attention")
ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


class Lfm3(Lfm2):
    model_type = "lfm3"
    example = "LFM3-1.7B"
    features = "as lfm2; windows, gates on heads, norms around sub-layers; native operators only"
    aliases: ClassVar[dict[str, str]] = {"tie_word_embeddings": "tie_embedding"}
    layer_names: ClassVar[dict[str, str]] = {k: v for k, v in Lfm2.layer_names.items() if not k.startswith("self_attn")}
    after_attention = "post_operator_norm"
    after_mlp = "post_ffn_norm"

    def inner_size(self, hidden: int) -> int:
        return self.settings.integer("intermediate_size")

    def check(self) -> None:
        settings, layers = self.settings, self.facts.layers
        kinds = settings.each("layer_types", layers, KINDS)
        self.gated = settings.flag("use_attention_gate", True)
        self.kinds = kinds or [KINDS[0 if at % 2 or not at else 1 + (at % 4 == 0)] for at in range(layers)]
        length = settings.integer("conv_L_cache", 7)
        convolutions = [at for at, kind in enumerate(self.kinds) if kind == "conv"]
        if len(convolutions) in (0, layers) or not 2 <= length <= 16:
            what = "expected layers with attention and with convolutions, and conv_L_cache in 2 to 16"
            raise UnsupportedModel(f"{settings.file}: {what}")
        settings.values["rope_parameters"] = rotations_by_kind(settings, ROTATIONS)
        self.facts = self.facts.model_copy(update={"convolutions": convolutions, "taps": length})

    def bias(self, module: str) -> bool:
        attention = module.startswith("self_attn") and module != GATE
        return super().bias(module) or (attention and self.settings.flag("attention_bias"))

    def width(self, weight: str) -> int | None:
        return self.facts.heads if GATE in weight else None

    def slides(self, layer: int) -> bool:
        return self.kinds[layer] == "sliding_attention"

    def rotations(self) -> dict[str, Rotary]:
        full = self.rotation("full_attention", 1e6, scaled=False)
        return {"rope": self.rotation("sliding_attention", 1e4, scaled=False),
                "rope_full": proportional(full, self.facts.head_dim)}  # fmt: skip

    def rule(self, layer: int) -> AttentionRule:
        at, rotary = f"{LAYERS}.{layer}.self_attn", "rope" if self.slides(layer) else "rope_full"
        q_norm, k_norm = self.norm(f"{at}.q_norm"), self.norm(f"{at}.k_norm")
        return replace(super().rule(layer), rotary=rotary, q_norm=q_norm, k_norm=k_norm)

    def normed(self, ops: Ops, x: Value, layer: int, module: str | None) -> Value:
        around = module in (self.after_attention, self.after_mlp)
        absent = around and not self.settings.flag("use_sandwich_norm", True)
        return super().normed(ops, x, layer, None if absent else module)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        if self.kinds[layer] == "conv" or not self.gated:
            return super().attend(ops, h, layer)
        q, k, v = ops.linear(h, *(self.linear(layer, ATTENTION.format(name)) for name in "qkv"), joined=True)
        (gate,) = ops.linear(h, self.linear(layer, GATE))
        y = ops.sigmoid_gate(ops.attention(q, k, v, self.rule(layer)), gate)
        return ops.linear(y, self.linear(layer, ATTENTION.format("o")))[0]

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found, facts = dict(super().derived(source)), self.facts
        order = turned_first(facts.head_dim, self.rotaries["rope_full"].dims)
        heads, bias = {"q": facts.heads, "k": facts.kv_heads}, self.bias(ATTENTION)
        for layer, kind in enumerate(self.kinds):
            at = f"{LAYERS}.{layer}."
            if self.gated and kind != "conv":
                found[f"{at}{GATE}.weight"] = Own(source, at + first_of(source, at, GATES))
            found |= turned_rows(source, at[:-1], heads, order, bias) if kind == "full_attention" else {}
        return found
