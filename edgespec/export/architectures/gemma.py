"""Gemma 1 to 3: embeddings times the root of their size, norms by 1 + weight, GELU."""

from __future__ import annotations

from typing import Any

from edgespec.export.architectures.base import Architecture, known
from edgespec.export.architectures.ops import Activation, Ops, Value
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rules import AROUND


@known("gemma", "gemma-2b-it", "scaled embedding, norms by 1 + weight, GELU")
class Gemma(Architecture):
    """Gemma (arXiv 2403.08295)."""

    activation_key = "hidden_activation"
    activation_default = "gelu_pytorch_tanh"
    norm_weight_is_offset = True
    tied_by_default = True

    def configure(self) -> dict[str, Any]:
        if not self.both_ways:
            self.settings.refuse("use_bidirectional_attention", "attention to later tokens", "causal attention")
        # the first release says "gelu" under hidden_act and means the approximation
        self.activation: Activation = "gelu_tanh" if self.activation == "gelu" else self.activation
        return super().configure()

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, scale=self.facts.hidden**0.5)


@known("gemma2", "gemma-2-2b-it", "norms after sub-layers, capped scores and logits, windows in every other layer")
class Gemma2(Gemma):
    """Gemma 2 (arXiv 2408.00118)."""

    norms = AROUND
    window_pattern = ("", 2)
    score_size = "query_pre_attn_scalar"
    score_cap = "attn_logit_softcapping"
    logits_cap = ("final_logit_softcapping", 0.0)


@known(
    "gemma3_text",
    "gemma-3-1b-it",
    "norms of each head, local and global layers with a rotation each; text part of larger ones",
)
class Gemma3(Gemma):
    """Gemma 3, the text model: five local layers to a global one (arXiv 2503.19786).

    The text part of the larger ones, which also read images, is exported the same way.
    """

    norms = AROUND
    head_norms = ("q_norm", "k_norm")
    score_size = "query_pre_attn_scalar"
    score_cap = "attn_logit_softcapping"
    logits_cap = ("final_logit_softcapping", 0.0)
    window_pattern = ("sliding_window_pattern", 6)

    def rotations(self) -> dict[str, Rotary]:
        theta, local = self.settings.number("rope_theta", 1e6), self.settings.number("rope_local_base_freq", 1e4)
        full = self.rotation("full_attention", theta, scaled=True)
        return {"rope": full, "rope_local": self.rotation("sliding_attention", local, scaled=False)}
