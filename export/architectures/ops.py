"""What an architecture may say: the operations of a decoder, and who interprets them.

``GraphOps`` (emit.py) turns them into ONNX nodes; ``NumpyOps`` (reference.py) computes them from the source weights,
one layer at a time, which is what a bundle's parity is measured against; ``CalibrationOps`` (calibrate.py) quantizes
them on such a run.  ``NativeOps`` (native/emit.py) writes them down for native operators, and ``ShapeOps``
(architectures/shapes.py) finds the tensors and their shapes; of those, ``StockPlan`` and ``NativePlan``
(storage/) say what is stored where.  An architecture file is written once, for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

Value: TypeAlias = Any  # an activation [1, T, width]: a value name in a graph, an array in numpy
Kind = Literal["attention", "mlp", "embedding"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""What config.json calls them: ``gelu`` with the error function, ``gelu_tanh`` by its tanh approximation.

``relu2`` is the square of relu (arXiv 2109.08668).  ``xielu`` (arXiv 2411.13010) reads learnt numbers p, n, b: p x^2 +
b x above zero, n (e^x - 1 - x) + b x below.
"""


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


@dataclass(frozen=True)
class AttentionRule:
    """What one layer's attention does beside the products.

    Attributes:
        layer: whose KV.
        scale: of the scores, before anything else.
        rotary: which of the architecture's rotary tables; None = positions are not told to this layer.
        window: positions a row sees, itself included; 0 = all.
        cap: scores become cap * tanh(score / cap); 0 = they stay (arXiv 2408.00118, 2.2).
        q_norm, k_norm: norms of each head of q and k, before rotation.
        late_norms: after it instead.
        v_norm: of each head of v.
        dim: size of a head; 0 = the model's.
        gives: later layers read this layer's keys and values.
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


@dataclass(frozen=True)
class ConvolutionRule:
    """A short convolution over each channel.

    Attributes:
        layer: which of the layers with one.
        taps: a vector [length * hidden], the taps of the oldest token first.
        bias: [hidden].
        length: tokens that it sees, the row's own among them.
    """

    layer: int
    taps: str
    bias: str | None
    length: int


@dataclass(frozen=True)
class DeltaRule:
    """A gated delta rule or a state space with its short convolution; its sizes are the model's (``facts.delta``).

    Attributes:
        layer: which of the layers with one.
        taps: a vector [taps * (2 * keys * key_dim + values * value_dim)], the taps of the oldest token first.
        bias, rate: [values], what decays are made of.
        norm: [value_dim], the weight of the norm of each head; None = it is a state space (Mamba-2, arXiv 2405.21060).
        skip: [values], of a state space: how much of its values each head adds to what it gives.
        taps_bias: a bias of the convolution, as long as a token's inputs.
        times: what a delta rule's rates of change are multiplied by; 2 lets a state's eigenvalues be negative (arXiv
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
        """The names of what it reads, by what native operators call them."""
        found = {"w": self.taps, "bias": self.bias, "rate": self.rate, "norm": self.norm, "up": self.skip,
                 "upbias": self.taps_bias}  # fmt: skip
        return {key: name for key, name in found.items() if name is not None}


@dataclass(frozen=True)
class LayerEmbedding:
    """A layer's own embedding of each token (per-layer embeddings of Gemma 3n and 4).

    Attributes:
        table: of all layers, [vocab, layers * width].
        layer: whose columns are read.
        layers: of the model.
        width: numbers of a token in one layer.
        scale: what they are multiplied by.
    """

    table: str
    layer: int
    layers: int
    width: int
    scale: float


@dataclass(frozen=True)
class ExpertsRule:
    """A mixture of experts: each row goes to the likeliest few by the router's scores (arXiv 1701.06538).

    Attributes:
        router: [experts, hidden].
        gate, up: [experts * inner, hidden], one expert's rows behind the other's.
        down: [experts * hidden, inner].
        normed: the probabilities of a row's experts are divided by their sum.
        scale: what the weighted sum is multiplied by.
        always: so many of the last experts get every row, by the sigmoid of their score, neither normed nor scaled.
        sigmoid: probabilities are sigmoids of scores instead of their softmax.
        bias: [experts - always], added to probabilities when the best are chosen; not to weights.
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


@dataclass(frozen=True)
class LogitsRule:
    """What becomes of the LM head's products: times ``scale``, then cap * tanh(logit / cap) unless ``cap`` is 0."""

    scale: float = 1.0
    cap: float = 0.0


class Ops(Protocol):
    """The operations."""

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> Value:
        """Rows of the embedding matrix for the ids of this pass, times ``scale`` -> [1, T, hidden].

        Args:
            positions: a matrix [context, hidden] whose rows are added, by position.
        """
        ...

    def token_embeddings(self, weight: str, scale: float) -> Value:
        """The same rows once more -> [1, T, hidden]: those of the ids, whatever the stream began with."""
        ...

    def norm(self, x: Value, norm: Norm) -> Value:
        """Over the last dimension.  Outside a sub-layer it is computed at once, of x as it stands there."""
        ...

    def linear(self, x: Value, *parts: Linear, joined: bool = False) -> tuple[Value, ...]:
        """x @ weight.T + bias for every part.

        Parts given together share their input, which an operator may use (one quantization of x, one fused kernel).

        Args:
            joined: the parts are also consumed together: they may be stored and multiplied as one matrix.
        """
        ...

    def attention(self, q: Value, k: Value | None, v: Value | None, rule: AttentionRule) -> Value:
        """Norms of heads, rotary positions, then causal grouped attention over the layer's KV.

        Args:
            q: [1, T, heads * head_dim].
            k: [1, T, kv_heads * head_dim], appended to the layer's keys after rotation.
            v: [1, T, kv_heads * head_dim], appended to the layer's values.
            rule: how.  Without k and v the queries read what layer ``rule.layer`` has appended, of a drafter's target.

        Returns [1, T, heads * head_dim].
        """
        ...

    def convolution(self, x: Value, rule: ConvolutionRule) -> Value:
        """Causal, over the tokens before a row: x [1, T, 3 * hidden] = b, c, v -> c * conv(b * v), [1, T, hidden]."""
        ...

    def delta(self, x: Value, z: Value, a: Value, b: Value, rule: DeltaRule) -> Value:
        """A gated delta rule, or a state space, over the tokens before a row.

        Args:
            x: [1, T, 2 * keys * key_dim + values * value_dim], queries, keys and values before the convolution.
            z: [1, T, values * value_dim], whose silu gates what comes out.
            a, b: [1, T, values]: of how much is forgotten, and of how much a token changes; state spaces read a alone.
            rule: which vectors go with it.

        Returns [1, T, values * value_dim].
        """
        ...

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """x * sigmoid(gate), for x that attention gives; a gate [1, T, heads] is that of whole heads."""
        ...

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        """activation(gate) * up."""
        ...

    def activate(self, x: Value, activation: Activation, numbers: str | None = None) -> Value:
        """activation(x); ``numbers`` [3]: those of ``xielu``."""
        ...

    def experts(self, h: Value, rule: ExpertsRule, activation: Activation) -> Value:
        """The weighted sum of what a row's experts make of it: down(activation(gate h) * up h), [1, T, hidden].

        The sizes are the model's (``facts.experts``).
        """
        ...

    def layer_embedding(self, gate: Value, given: Value, rule: LayerEmbedding, activation: Activation) -> Value:
        """activation(gate) * (given + the ids' rows of the layer), [1, T, width] each."""
        ...

    def sublayer(
        self, kind: Kind, layer: int, x: Value, body: Callable[[Value], Value], scale: str | None = None
    ) -> Value:
        """(x + body(x)) * scale; in a gated graph all of it can be left out, pass by pass.

        The body ends in a matrix, or in the norm of what a matrix gave.  It may use values made before it.  An
        attention whose keys and values others read, and the sub-layer of a layer's own embedding, are left out only
        with the whole layer.

        Args:
            scale: a tensor of one number; for a body that ends in a norm.
        """
        ...

    def head(self, x: Value, norm: Norm, head: Linear) -> Value:
        """Final norm and LM head on the rows asked for, by the architecture's ``logits`` -> [1, R, vocab]."""
        ...


class DrafterOps(Ops, Protocol):
    """What decoders conditioned on another model's hidden states need beside."""

    def input_slice(self, first: int, width: int) -> Value:
        """Columns of the rows that a drafter's pass is given -> [1, T, width]."""
        ...

    def select_input(self, fused: Callable[[], Value], recycled: Callable[[], Value]) -> Value:
        """A drafter's residual stream: from hidden states of the target, or from its own -> [1, T, hidden]."""
        ...

    def prefill_context(self, context: Callable[[], None]) -> None:
        """What a pass over hidden states of the target does, of which nothing is guessed: entries for later ones."""
        ...

    def append(self, q: Value, k: Value, v: Value, rule: AttentionRule) -> None:
        """Keys and values as ``attention`` makes them, which nothing reads yet."""
        ...

    def join(self, *parts: Value) -> Value:
        """Norms side by side -> [1, T, sum of their widths]."""
        ...
