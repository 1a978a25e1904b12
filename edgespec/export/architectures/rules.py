"""Parameters of operations: matrices, norms, and the rules of attention and of its replacements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Linear:
    """A matrix of the checkpoint, [n, k], and its bias [n]."""

    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm, or a layer norm (``centered``: less the mean first): weight [n], bias [n]."""

    weight: str
    bias: str | None = None
    centered: bool = False


class Norms(NamedTuple):
    """The norms of a layer, by module, before and after its sub-layers; None = no such norm."""

    attention: str | None = None
    mlp: str | None = None
    after_attention: str | None = None
    after_mlp: str | None = None


BEFORE = Norms("input_layernorm", "post_attention_layernorm")
AFTER = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
AROUND = AFTER._replace(attention="input_layernorm", mlp="pre_feedforward_layernorm")


@dataclass(frozen=True)
class RelativeRule:
    """A bias of scores by head and by the distance of a key from its query (T5, arXiv 1910.10683, 2.1)."""

    # a vector [heads * size]: the biases of a head by clipped distance.  Index ``distance + clip(key - query,
    # -distance, distance)``: a head has 2 * distance + 1 numbers, or distance + 1 if rows see only the past
    table: str
    distance: int  # larger distances have the same bias
    both_ways: bool  # rows also see later rows

    @property
    def size(self) -> int:
        """Numbers of a head."""
        return self.distance * (1 + self.both_ways) + 1


@dataclass(frozen=True)
class MemoryRule:
    """Attention of a decoder's layer over all rows of the encoder, without positions."""

    layer: int  # whose part of the memory
    scale: float  # of the scores


@dataclass(frozen=True)
class AttentionRule:
    """Attention of one layer, without its matrix products.

    Attributes:
        layer: index of its KV.
        scale: of the scores, before anything else.
        rotary: which of the architecture's rotary tables; None = this layer has no positions.
        window: positions a row sees, itself and those before it; 0 = all.
        after: positions after its own that a row sees where rows see later ones; None = all.
        cap: scores become cap * tanh(score / cap); 0 = they stay (arXiv 2408.00118, 2.2).
        q_norm, k_norm: norms of each head of q and k, before rotation.
        late_norms: norms after rotation instead.
        v_norm: of each head of v.
        dim: size of a head; 0 = the model's.
        gives: later layers read this layer's keys and values.
        relative: a bias of scores by distance.
        sinks: a vector [heads]: of each head a score that counts in the softmax, without a value (arXiv 2309.17453).
    """

    layer: int
    scale: float
    rotary: str | None = None
    window: int = 0
    cap: float = 0.0
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    late_norms: bool = False
    v_norm: Norm | None = None
    dim: int = 0
    gives: bool = False
    relative: RelativeRule | None = None
    after: int | None = None
    sinks: str | None = None


@dataclass(frozen=True)
class ConvolutionRule:
    """A short convolution over each channel."""

    layer: int  # which of the layers with one
    taps: str  # a vector [length * hidden], the taps of the oldest token first
    bias: str | None  # [hidden]
    length: int  # tokens that it sees, the row's own among them


@dataclass(frozen=True)
class DepthwiseRule:
    """A convolution of each channel over a row and the rows of its pass before it."""

    taps: str  # a vector [length * width], the taps of the oldest row first
    length: int  # rows that it sees, the row itself among them
    bias: str | None = None  # [width]
    groups: int = 0  # of neighboring channels that share a row's own summands of the taps; 0 = rows have none
    second: bool = False  # of the two convolutions that a row has summands for


@dataclass(frozen=True)
class DeltaRule:
    """A gated delta rule or a state space with its short convolution; its sizes are the model's (``facts.delta``).

    Attributes:
        layer: which of the layers with one.
        taps: a vector [taps * (2 * keys * key_dim + values * value_dim)], the taps of the oldest token first.
        bias, rate: [values], parameters of decays.
        norm: [value_dim], the weight of the norm of each head; None = it is a state space (Mamba-2, arXiv 2405.21060).
        skip: [values], of a state space: how much of its values each head adds to its output.
        taps_bias: a bias of the convolution, as long as a token's inputs.
        times: the factor of a delta rule's rates of change; 2 lets a state's eigenvalues be negative (arXiv
            2411.12537).
        eps: of the norm; None = the model's.
    """

    layer: int
    taps: str
    bias: str
    rate: str
    norm: str | None = None
    skip: str | None = None
    taps_bias: str | None = None
    times: float = 1.0
    eps: float | None = None

    @property
    def vectors(self) -> dict[str, str]:
        """Names of its vectors in the checkpoint, by their names in native operators."""
        found = {"w": self.taps, "bias": self.bias, "rate": self.rate, "norm": self.norm, "up": self.skip,
                 "upbias": self.taps_bias}  # fmt: skip
        return {key: name for key, name in found.items() if name is not None}


@dataclass(frozen=True)
class LayerEmbedding:
    """A layer's own embedding of each token (per-layer embeddings of Gemma 3n and 4)."""

    table: str  # of all layers, [vocab, layers * width]
    layer: int  # whose columns are read
    layers: int  # of the model
    width: int  # numbers of a token in one layer
    scale: float  # their factor


@dataclass(frozen=True)
class ExpertsRule:
    """A mixture of experts (arXiv 1701.06538): each row goes to the likeliest few; sizes are ``facts.experts``.

    Attributes:
        router: [experts, hidden].
        gate, up: [experts * inner, hidden], the rows of all experts in order.
        down: [experts * hidden, inner].
        normed: the probabilities of a row's experts are divided by their sum.
        scale: the factor of the weighted sum.
        always: this many of the last experts get every row, by the sigmoid of their score, neither normed nor scaled.
        sigmoid: probabilities are sigmoids of scores instead of their softmax.
        bias: [experts - always], added to probabilities when the best are chosen; not to weights.
        router_bias: [experts], added to scores.
        factors: [experts - always], what the weight of each is multiplied by in the end.
        gate_bias, up_bias: [experts * inner], added to the products.
        down_bias: [experts * hidden], the same.
    """

    router: str
    gate: str
    up: str
    down: str
    normed: bool
    scale: float
    always: int = 0
    sigmoid: bool = False
    bias: str | None = None
    router_bias: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None
    factors: str | None = None

    @property
    def vectors(self) -> tuple[str | None, ...]:
        """Return the names of its vectors."""
        return self.bias, self.router_bias, self.gate_bias, self.up_bias, self.down_bias, self.factors


@dataclass(frozen=True)
class LogitsRule:
    """Post-processing of the LM head's products: times ``scale``, then cap * tanh(logit / cap) unless ``cap`` is 0."""

    scale: float = 1.0
    cap: float = 0.0
