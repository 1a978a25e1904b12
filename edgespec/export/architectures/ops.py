"""Operations of a model, recorded once as a list.

``Architecture.trace`` runs ``build`` with an ``Ops``, which records an ``Operation`` for every call.  All code that
uses a model is a pass over that list (``trace.Pass``): shapes, plans of weight files, ONNX graphs, programs of native
operators, the numpy reference, calibration, and the choice of parts that become int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from edgespec.export.architectures.rules import (
    AttentionRule,
    ConvolutionRule,
    DeltaRule,
    DepthwiseRule,
    ExpertsRule,
    LayerEmbedding,
    Linear,
    MemoryRule,
    Norm,
)

Kind = Literal["attention", "memory", "mlp", "embedding"]
"""Kind of a sub-layer; "memory": attention over an encoder's rows, which is left out only together with "attention"."""
OF_EACH_LAYER = "layers that share keys and values, or have embeddings of their own"
OVER_ROWS, BLOCKS = "attention over an encoder's rows", "drafts of whole blocks"
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_oai", "clamp"]


class Value(NamedTuple):
    """An activation [1, T, width], by its number in the trace."""

    number: int


class Block(NamedTuple):
    """Operations that belong together, with the values that each makes, and the value that they end in."""

    steps: tuple[tuple[Operation, tuple[Value, ...]], ...]
    result: Value | None


@dataclass(frozen=True)
class Operation:
    """One operation."""

    method: str  # of the passes that handle it; its parameters have the names of the fields
    what: str  # it computes, in the plural, for messages: "this model has ..."
    fields: dict[str, Any]  # values, blocks, rules and names of tensors

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Values that it reads; for a block, its last value."""
        given = (each.result if isinstance(each, Block) else each for each in self.fields.values())
        several = (each if type(each) is tuple else (each,) for each in given)
        return tuple(one for each in several for one in each if isinstance(one, Value))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks inside it, in order."""
        return tuple(each for each in self.fields.values() if isinstance(each, Block))


class Ops:
    """Records the calls of an architecture.  Values are activations [1, T, width]."""

    def __init__(self) -> None:
        self._steps: list[tuple[Operation, tuple[Value, ...]]] = []
        self._count = 0

    def record(self, operation: Operation, results: int) -> tuple[Value, ...]:
        """Record an operation; returns the values that it makes."""
        made = tuple(Value(self._count + number) for number in range(results))
        self._count += results
        self._steps.append((operation, made))
        return made

    def add(self, method: str, what: str = "", **fields: Any) -> Value:
        """Record an operation that makes one value, or none; for the arguments see ``Operation``."""
        return self.record(Operation(method, what, fields), 1)[0]

    def block(self, body: Callable[[], Value | None]) -> Block:
        """Record the calls of ``body`` as a block."""
        outer, self._steps = self._steps, []
        result = body()
        steps, self._steps = tuple(self._steps), outer
        return Block(steps, result)

    def embed(self, weight: str, scale: float = 1.0, positions: str | None = None) -> Value:
        """Look up the ids' rows of a matrix, times ``scale``, plus those of ``positions`` [context, hidden]."""
        return self.add("embed", weight=weight, scale=scale, positions=positions)

    def token_embeddings(self, weight: str, scale: float) -> Value:
        """Look up token embeddings [1, T, hidden], even if the pass started from hidden states."""
        return self.add("token_embeddings", OF_EACH_LAYER, weight=weight, scale=scale)

    def norm(self, x: Value, norm: Norm) -> Value:
        """Norm over the last dimension.  Outside a sub-layer it is computed immediately, from the current x."""
        return self.add("norm", x=x, norm=norm)

    def linear(self, x: Value, *parts: Linear, joined: bool = False) -> tuple[Value, ...]:
        """Compute x @ weight.T + bias for every part.

        Parts given together share their input, which an operator may use (one quantization of x, one fused kernel).
        ``joined`` ones are also consumed together: they may be stored and multiplied as one matrix.
        """
        operation = Operation("linear", "", {"x": x, "parts": parts, "joined": joined})
        return self.record(operation, len(parts))

    def attention(self, q: Value, k: Value | None, v: Value | None, rule: AttentionRule) -> Value:
        """Norm heads, rotate positions, then attend causally over the layer's keys and values, grouped by heads.

        Args:
            q: [1, T, heads * head_dim], like the result.
            k: [1, T, kv_heads * head_dim], appended to the layer's keys after rotation.
            v: [1, T, kv_heads * head_dim], appended to the layer's values.
            rule: its parameters.  Without k and v, queries read the KV of layer ``rule.layer`` of a drafter's target.
        """
        if k is None or v is None:
            return self.add("attention_over", "layers that read the model's keys and values", q=q, rule=rule)
        return self.add("attention", "attention", q=q, k=k, v=v, rule=rule)

    def convolution(self, x: Value, rule: ConvolutionRule) -> Value:
        """Convolve causally, over the tokens before a row: x [1, T, 3 * hidden] = b, c, v -> c * conv(b * v)."""
        return self.add("convolution", "short convolutions", x=x, rule=rule)

    def depthwise(self, x: Value, rule: DepthwiseRule, by: Value | None = None) -> Value:
        """Convolve each channel over a row and the rows of its pass before it: x [1, T, width], like the result.

        Args:
            by: what a row adds to the taps of two convolutions, [1, T, 2 * length * groups]: of each, the taps of the
                row itself first.
        """
        return self.add("depthwise", "depthwise convolutions", x=x, rule=rule, by=by)

    def delta(self, x: Value, z: Value, a: Value, b: Value, rule: DeltaRule) -> Value:
        """Run a gated delta rule (linear attention), or a state space, over the tokens before a row.

        Args:
            x: [1, T, 2 * keys * key_dim + values * value_dim], queries, keys and values before the convolution.
            z: [1, T, values * value_dim] like the result, which its silu gates.
            a: [1, T, values]: decay of the state.
            b: [1, T, values]: rate of change by a token; state spaces do not read it.
        """
        what = "state spaces" if rule.norm is None else "gated delta rules"
        return self.add("delta", what, x=x, z=z, a=a, b=b, rule=rule)

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """Compute x * sigmoid(gate), for x from attention; a gate [1, T, heads] applies to whole heads."""
        return self.add("sigmoid_gate", "gates on the output of attention", x=x, gate=gate)

    def gated(self, gate: Value, up: Value, activation: Activation) -> Value:
        """Compute activation(gate) * up; of ``swiglu_oai`` see ``source.activations``."""
        return self.add("gated", gate=gate, up=up, activation=activation)

    def activate(self, x: Value, activation: Activation, numbers: str | None = None) -> Value:
        """Compute activation(x); ``numbers`` [3]: those of ``xielu``, or of ``clamp`` least, most and 0."""
        return self.add("activate", x=x, activation=activation, numbers=numbers)

    def experts(self, h: Value, rule: ExpertsRule, activation: Activation, by: Value | None = None) -> Value:
        """Compute the weighted sum of a row's experts: down(activation(gate h) * up h), [1, T, hidden].

        Args:
            by: what the router reads instead of ``h``.
        """
        return self.add("experts", "mixtures of experts", h=h, rule=rule, activation=activation, by=by)

    def sum(self, x: Value, y: Value) -> Value:
        """Add two norms, [1, T, hidden] each."""
        return self.add("sum", "sums of norms", x=x, y=y)

    def layer_embedding(self, gate: Value, base: Value, rule: LayerEmbedding, activation: Activation) -> Value:
        """Compute activation(gate) * (base + the ids' rows of the layer), [1, T, width] each."""
        return self.add("layer_embedding", OF_EACH_LAYER, gate=gate, base=base, rule=rule, activation=activation)

    def sublayer(
        self,
        kind: Kind,
        layer: int,
        x: Value,
        body: Callable[[Value], Value],
        scale: str | None = None,
        norm: Norm | None = None,
    ) -> Value:
        """Compute (x + body(x)) * scale; in a gated graph all of it can be left out, pass by pass.

        With ``norm`` the stream itself is normed first, x = norm(x).  Layers with norms after their residuals use it:
        each sub-layer has the norm of the one before it, and the head has the last one.

        The body ends in a matrix, or in the norm of a matrix product; in an encoder also in a clamp.  It may use
        earlier values.  An attention whose keys and values others read, and the sub-layer of a layer's own embedding,
        are left out only with the whole layer.

        ``scale`` is a tensor of one number, for a body that ends in a norm.
        """
        return self.add(
            "sublayer",
            "sub-layers",
            kind=kind,
            layer=layer,
            x=x,
            body=self.block(lambda: body(x)),
            scale=scale,
            norm=norm,
        )

    def head(self, x: Value, norm: Norm | None, head: Linear) -> Value:
        """Compute final norm and LM head of the rows asked for, by the architecture's ``logits`` -> [1, R, vocab].

        Without a norm, ``x`` is the input of the head, computed from the stream's rows after their last norm.
        """
        return self.add("head", x=x, norm=norm, head=head)

    # -- of encoders, and of decoders that attend over an encoder's output --------------------------------------------

    def encoded(self, x: Value, norm: Norm | None) -> Value:
        """End an encoder, whose rows see each other: every row of the stream after its last norm, [1, T, hidden].

        Without a norm, the rows are unchanged.
        """
        return self.add("encoded", "an encoder", x=x, norm=norm)

    def insert(self, x: Value, first: int) -> Value:
        """Add columns from ``first`` on of rows of images at their positions in the stream."""
        return self.add("insert", "rows of images that are added after layers", x=x, first=first)

    def plus(self, x: Value, product: Value) -> Value:
        """Add a product to rows of numbers, [1, T, width] both, which begins a stream."""
        return self.add("plus", "rows of numbers that are added to a product", x=x, product=product)

    def place(self, x: Value, positions: str) -> Value:
        """Add the first rows of ``positions`` [context, hidden] to a stream of float rows."""
        return self.add("place", "positions that are added to rows of numbers", x=x, positions=positions)

    def fill_memory(self, memory: Callable[[], None]) -> None:
        """Fill the memory: a separate pass without logits over the encoder's output (``input_slice``).

        ``memory`` ends each layer in ``append_memory``; passes over tokens leave it out.
        """
        self.add("fill_memory", OVER_ROWS, memory=self.block(memory))

    def append_memory(self, k: Value, v: Value, rule: MemoryRule) -> None:
        """Append to a layer's part of the memory, [1, S, kv_heads * head_dim] both, unchanged."""
        self.add("append_memory", OVER_ROWS, k=k, v=v, rule=rule)

    def attend_memory(self, q: Value, rule: MemoryRule) -> Value:
        """Attend over all rows of a layer's part of the memory: q [1, T, heads * head_dim], like the result."""
        return self.add("attend_memory", OVER_ROWS, q=q, rule=rule)

    # -- of decoders conditioned on another model's hidden states ------------------------------------------------------

    def input_slice(self, first: int, width: int) -> Value:
        """Take columns of the float rows that a drafter's pass reads -> [1, T, width]."""
        return self.add("input_slice", first=first, width=width)

    def select_input(self, fused: Callable[[], Value], recycled: Callable[[], Value]) -> Value:
        """Take fused target states on a drafter's first step, its own last state afterwards -> [1, T, hidden]."""
        return self.add("select_input", fused=self.block(fused), recycled=self.block(recycled))

    def prefill_context(self, context: Callable[[], None]) -> None:
        """Fill the drafter's KV cache from target states: a pass without logits."""
        self.add("prefill_context", BLOCKS, context=self.block(context))

    def append(self, q: Value, k: Value, v: Value, rule: AttentionRule) -> None:
        """Append keys and values as ``attention`` makes them, without attending."""
        self.add("append", BLOCKS, q=q, k=k, v=v, rule=rule)

    def join(self, *parts: Value) -> Value:
        """Put norms side by side -> [1, T, sum of their widths]."""
        return self.add("join", parts=parts)
