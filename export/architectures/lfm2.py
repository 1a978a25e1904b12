"""LFM2 and LFM2.5: short convolutions in most layers, attention in the others (arXiv 2511.23404)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, ConvolutionRule, Ops, Value
from edgespec.export.source.derived import Own, Taps
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


class Lfm2(Architecture):
    model_type = "lfm2"
    example = "LFM2-350M, LFM2-1.2B, LFM2.5-1.2B-Instruct"
    features = "short convolutions in most layers, norms of each head; native operators only"
    aliases: ClassVar[dict[str, str]] = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
    outer_names: ClassVar[dict[str, str]] = {"model.norm": "model.embedding_norm"}
    layer_names: ClassVar[dict[str, str]] = {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    epsilon = ("norm_eps", 1e-5)
    tied_by_default = True
    rope_theta = 1_000_000.0

    def inner_size(self, hidden: int) -> int:
        size = self.settings.integer("intermediate_size")
        if self.settings.flag("block_auto_adjust_ff_dim", True):
            size = int(self.settings.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            of = self.settings.integer("block_multiple_of", 256)
            size = -(-size // of) * of
        return size

    def check(self) -> None:
        kinds = self.settings.each("layer_types", self.facts.layers, ("conv", "full_attention"))
        full = self.settings.get("full_attn_idxs", list(range(self.facts.layers)))
        if kinds is None and isinstance(full, list):
            kinds = ["full_attention" if layer in full else "conv" for layer in range(self.facts.layers)]
        length = self.settings.integer("conv_L_cache", 3)
        if not kinds or "full_attention" not in kinds or not 2 <= length <= 16:
            raise UnsupportedModel(
                f"{self.settings.file}: expected a layer with attention, and conv_L_cache in 2 to 16"
            )
        convolutions = [layer for layer, kind in enumerate(kinds) if kind == "conv"]
        self.facts = self.facts.model_copy(update={"convolutions": convolutions, "taps": length if convolutions else 0})

    def bias(self, module: str) -> bool:
        return module.startswith("conv") and self.settings.flag("conv_bias")

    def slides(self, layer: int) -> bool:
        return False

    def rule(self, layer: int) -> AttentionRule:
        at, before = f"{LAYERS}.{layer}.self_attn", sum(other < layer for other in self.facts.convolutions)
        q_norm, k_norm = self.norm(f"{at}.q_layernorm"), self.norm(f"{at}.k_layernorm")
        return replace(super().rule(layer), layer=layer - before, q_norm=q_norm, k_norm=k_norm)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        if layer not in self.facts.convolutions:
            return super().attend(ops, h, layer)
        taps, at = f"{LAYERS}.{layer}.conv.taps", self.facts.convolutions.index(layer)
        bias = f"{LAYERS}.{layer}.conv.conv.bias" if self.bias("conv.conv") else None
        (x,) = ops.linear(h, self.linear(layer, "conv.in_proj"))
        y = ops.convolution(x, ConvolutionRule(at, taps, bias, self.facts.taps))
        return ops.linear(y, self.linear(layer, "conv.out_proj"))[0]

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        names = (f"{LAYERS}.{layer}.conv" for layer in self.facts.convolutions)
        return {f"{name}.taps": Taps(Own(source, f"{name}.conv.weight")) for name in names}
