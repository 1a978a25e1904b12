"""OLMo 2: norms only after the sub-layers, and of whole rows of q and k (arXiv 2501.00656)."""

from typing import ClassVar

from edgespec.export.architectures.base import ATTENTION, LAYERS, Architecture
from edgespec.export.architectures.ops import Ops, Value


class Olmo2(Architecture):
    model_type = "olmo2"
    example = "OLMo-2-0425-1B-Instruct"
    features = "norms only after sub-layers, of whole rows of q and k"
    epsilon = ("rms_norm_eps", 1e-5)
    attention_norm: ClassVar[str | None] = None
    mlp_norm: ClassVar[str | None] = None
    after_attention: ClassVar[str | None] = "post_attention_layernorm"
    after_mlp: ClassVar[str | None] = "post_feedforward_layernorm"

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        at = f"{LAYERS}.{layer}.self_attn"
        q, k, v = ops.linear(h, *(self.linear(layer, ATTENTION.format(name)) for name in "qkv"))
        q, k = ops.norm(q, self.norm(f"{at}.q_norm")), ops.norm(k, self.norm(f"{at}.k_norm"))
        (y,) = ops.linear(ops.attention(q, k, v, self.rule(layer)), self.linear(layer, ATTENTION.format("o")))
        return y
