"""Qwen3.5: gated delta rules in three of four layers (arXiv 2412.06464), gated attention in the fourth."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import ATTENTION, LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, DeltaRule, Ops, Value
from edgespec.export.architectures.settings import part_of
from edgespec.export.source.derived import Exponential, Own, Rows, Taps
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import DeltaHeads

GATE = "self_attn.output_gate_proj"


class Qwen35(Architecture):
    model_type = "qwen3_5_text"
    example = "Qwen3.5-0.8B, Qwen3.5-2B, Qwen3.5-4B"
    features = "gated delta rules in three of four layers, gated attention in the others; native operators only"
    norm_weight_is_offset = True
    context_default = 32768
    rope_share = 0.25

    def check(self) -> None:
        every = self.settings.integer("full_attention_interval", 4)
        kinds = self.settings.each("layer_types", self.facts.layers, ("linear_attention", "full_attention"))
        kinds = kinds or ["full_attention" if at % every == every - 1 else "linear_attention"
                          for at in range(self.facts.layers)]  # fmt: skip
        if not (recurrent := [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]):
            return  # a layer for predictions further on, alone
        heads = part_of(DeltaHeads, self.settings.file, self.delta_sizes())
        taps = self.settings.integer("linear_conv_kernel_dim", 4)
        odd = any(size % 16 or size > 512 for size in (heads.key_dim, heads.value_dim))
        odd = odd or heads.values % heads.keys != 0 or not 2 <= taps <= 16
        if odd or self.activation != "silu" or len(recurrent) == len(kinds):
            raise UnsupportedModel(
                f"{self.settings.file}: expected layers of both kinds, silu, key heads that divide the value heads, "
                "sizes of heads that are multiples of 16 up to 512, and linear_conv_kernel_dim in 2 to 16"
            )
        self.facts = self.facts.model_copy(update={"convolutions": recurrent, "taps": taps, "delta": heads})

    def delta_sizes(self) -> dict[str, int]:
        """What ``DeltaHeads`` says of the delta rules."""
        sizes = {"keys": ("num_key_heads", 16), "values": ("num_value_heads", 32), "key_dim": ("key_head_dim", 128),
                 "value_dim": ("value_head_dim", 128)}  # fmt: skip
        return {ours: self.settings.integer(f"linear_{key}", usual) for ours, (key, usual) in sizes.items()}

    def bias(self, module: str) -> bool:
        return module.startswith("self_attn") and self.settings.flag("attention_bias")

    def slides(self, layer: int) -> bool:
        return False

    def rule(self, layer: int) -> AttentionRule:
        at, before = f"{LAYERS}.{layer}.self_attn", sum(other < layer for other in self.facts.convolutions)
        q_norm, k_norm = self.norm(f"{at}.q_norm"), self.norm(f"{at}.k_norm")
        return replace(super().rule(layer), layer=layer - before, q_norm=q_norm, k_norm=k_norm)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        if layer not in self.facts.convolutions:
            q, k, v = ops.linear(h, *(self.linear(layer, ATTENTION.format(name)) for name in "qkv"), joined=True)
            (gate,) = ops.linear(h, self.linear(layer, GATE))
            y = ops.sigmoid_gate(ops.attention(q, k, v, self.rule(layer)), gate)
            return ops.linear(y, self.linear(layer, ATTENTION.format("o")))[0]
        x, z, a, b = ops.linear(h, *(self.linear(layer, f"linear_attn.in_proj_{part}") for part in ("qkv", *"zab")))
        y = ops.delta(x, z, a, b, self.delta_rule(layer))
        return ops.linear(y, self.linear(layer, "linear_attn.out_proj"))[0]

    def delta_rule(self, layer: int) -> DeltaRule:
        """The delta rule of a layer."""
        at, number = f"{LAYERS}.{layer}.linear_attn", self.facts.convolutions.index(layer)
        return DeltaRule(number, f"{at}.taps", f"{at}.dt_bias", f"{at}.rate", f"{at}.scale")

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        size, kinds = self.facts.head_dim, ("weight", "bias") if self.bias("self_attn") else ("weight",)
        both = np.arange(self.facts.heads * 2 * size).reshape(self.facts.heads, 2, size)  # q, gate
        for layer in range(self.facts.layers):
            if layer in self.facts.convolutions:
                at = f"{LAYERS}.{layer}.linear_attn"
                found[f"{at}.taps"] = Taps(Own(source, f"{at}.conv1d.weight"))
                found[f"{at}.rate"] = Exponential(Own(source, f"{at}.A_log"))
                found[f"{at}.scale"] = Own(source, f"{at}.norm.weight")  # no offset
                continue
            for part, module in enumerate((ATTENTION.format("q"), GATE)):
                for kind in kinds:
                    own = Own(source, f"{LAYERS}.{layer}.{ATTENTION.format('q')}.{kind}")
                    found[f"{LAYERS}.{layer}.{module}.{kind}"] = Rows(own, both[:, part].ravel())
        return found
