"""OLMo Hybrid: gated delta rules in three of four layers, normed before; OLMo 3's attention without windows."""

from collections.abc import Mapping
from dataclasses import replace

from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.olmo2 import Olmo2
from edgespec.export.architectures.ops import AttentionRule, DeltaRule, Ops, Value
from edgespec.export.architectures.qwen3_5 import Qwen35
from edgespec.export.architectures.rope import Rotary
from edgespec.export.source.derived import Exponential, Joined, Own, Taps
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint

EPS = 1e-5  # of the norm behind a delta rule, whatever config.json says of the others

# what files call them; of layers with attention transformers 5 saves the second so, too
SAVED_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


class OlmoHybrid(Qwen35):
    model_type = "olmo_hybrid"
    example = "Olmo-Hybrid-7B"
    features = (
        "gated delta rules with negative eigenvalues in three of four layers, as olmo2 in the others; "
        "native operators only"
    )
    norm_weight_is_offset = False
    context_default = 65536
    rope_share = 1.0

    def delta_sizes(self) -> dict[str, int]:
        heads = self.facts.heads
        keys = self.settings.integer("linear_num_key_heads", heads)
        size = self.settings.integer("linear_key_head_dim", int(0.75 * self.facts.hidden / keys))
        return {"keys": keys, "values": self.settings.integer("linear_num_value_heads", heads), "key_dim": size,
                "value_dim": self.settings.integer("linear_value_head_dim", 2 * size)}  # fmt: skip

    def rotations(self) -> dict[str, Rotary]:
        given = self.settings.get("rope_parameters", {})  # a base of null: no layer is told positions
        positions = isinstance(given, dict) and given.get("rope_theta", self.rope_theta) is not None
        return super().rotations() if positions else {}

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), rotary="rope" if self.rotaries else None, q_norm=None, k_norm=None)

    def delta_rule(self, layer: int) -> DeltaRule:
        twice = 2.0 if self.settings.flag("linear_allow_neg_eigval", True) else 1.0
        return replace(super().delta_rule(layer), times=twice, eps=EPS)

    def attention(self, ops: Ops, x: Value, layer: int) -> Value:
        if layer in self.facts.convolutions:
            return Architecture.attention(self, ops, x, layer)
        y = Olmo2.attend(self, ops, x, layer)  # type: ignore[arg-type]
        return self.normed(ops, y, layer, Olmo2.after_attention)

    def mlp(self, ops: Ops, x: Value, layer: int) -> Value:
        if layer in self.facts.convolutions:
            return super().mlp(ops, x, layer)
        return self.normed(ops, self.transform(ops, x, layer), layer, Olmo2.after_mlp)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {}
        for layer in self.facts.convolutions:
            at = f"{LAYERS}.{layer}.linear_attn"
            for ours, theirs in {"in_proj_z": "g_proj", "in_proj_a": "a_proj", "in_proj_b": "b_proj",
                                 "out_proj": "o_proj"}.items():  # fmt: skip
                found[f"{at}.{ours}.weight"] = Own(source, f"{at}.{theirs}.weight")
            found[f"{at}.in_proj_qkv.weight"] = _joined(source, at, "proj")
            whole = f"{at}.conv1d.weight"
            found[f"{at}.taps"] = Taps(Own(source, whole) if source.has(whole) else _joined(source, at, "conv1d"))
            found[f"{at}.rate"] = Exponential(Own(source, f"{at}.A_log"))
            found[f"{at}.scale"] = Own(source, f"{at}.o_norm.weight")
        for layer in range(self.facts.layers):
            for ours, theirs in SAVED_NORMS.items():
                if source.has(name := f"{LAYERS}.{layer}.{theirs}.weight"):
                    found[f"{LAYERS}.{layer}.{ours}.weight"] = Own(source, name)
        return found


def _joined(source: Checkpoint, at: str, kind: str) -> Joined:
    return Joined(tuple(Own(source, f"{at}.{part}_{kind}.weight") for part in "qkv"))
