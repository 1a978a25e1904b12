"""Gemma: embeddings times the root of their size, norms by 1 + weight, GELU (arXiv 2403.08295)."""

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, Ops, Value


class Gemma(Architecture):
    model_type = "gemma"
    example = "gemma-2b-it"
    features = "scaled embedding, norms by 1 + weight, GELU"
    activation_key = "hidden_activation"
    activation_default = "gelu_pytorch_tanh"
    norm_weight_is_offset = True
    tied_by_default = True

    def check(self) -> None:
        self.settings.refuse("use_bidirectional_attention", "attention to later tokens", "causal attention")
        # the first release says "gelu" under hidden_act and means the approximation
        self.activation: Activation = "gelu_tanh" if self.activation == "gelu" else self.activation

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, scale=self.facts.hidden**0.5)
