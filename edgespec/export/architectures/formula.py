"""A decoder as a formula: what is computed, in order.

::

    x = embed(ids)
    for each layer:
        x = x + norm(mix(norm(x)))          attention, or a mixer in its place
        x = x + norm(transform(norm(x)))    the MLP, or experts in its place
    logits = head(norm(x))

``base.Architecture`` says which norms and biases a model has, how it rotates positions, and the names of tensors in its
checkpoint.  A flag here is a difference between papers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from edgespec.export.architectures.ops import Activation, Ops, Value
from edgespec.export.architectures.rules import BEFORE, AttentionRule, Linear, Norm, Norms
from edgespec.export.source.derived import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import ModelFacts

EMBEDDING, FINAL_NORM, HEAD, LAYERS = "model.embed_tokens", "model.norm", "lm_head", "model.layers"
ATTENTION, MLP, GATE = "self_attn.{}_proj", "mlp.{}_proj", "self_attn.output_gate_proj"
QKV = tuple(ATTENTION.format(part) for part in "qkv")

Switch = bool | tuple[str, bool]
"""On or off; or a key of config.json and its default."""


class Part:
    """Replacement of attention (``Decoder.states``) or of the MLP (``Decoder.experts``) in some layers."""

    def configure(self, arch: Any) -> dict[str, Any]:
        """Return facts that config.json implies."""
        return {}

    def run(self, arch: Any, ops: Ops, h: Value, layer: int) -> Value:
        """Compute the sub-layer of a layer, [1, T, hidden], from a normed stream h of that shape."""
        raise NotImplementedError

    def derived(self, arch: Any, source: Checkpoint) -> dict[str, Extra]:
        """Return the part's tensors, by Llama's name, where the checkpoint has others."""
        return {}


class Decoder(ABC):
    """A decoder, or an encoder, over tensors by Llama's names; see the module.  Streams are [1, T, hidden]."""

    facts: ModelFacts
    activation: Activation
    norms: ClassVar[Norms] = BEFORE  # before and after sub-layers
    parallel: Switch = False  # attention and MLP read the same stream
    one_norm: bool = True  # then both read attention's norm
    row_norms: ClassVar[bool] = False  # q and k are normed as whole rows, by ``q_norm`` and ``k_norm``
    output_gate: ClassVar[Switch] = False  # attention is multiplied by the sigmoid of a projection (GATE) of its input
    gated_mlp: bool = True  # activation(gate) * up, not only activation(up)
    states: ClassVar[Part | None] = None  # replaces attention in ``facts.convolutions``
    experts: Part | None = None  # replaces the MLP in ``facts.experts.layers``
    both_ways: bool = False  # rows see each other: it is an encoder, which ends in rows (``Ops.encoded``)
    inserts: int = 0  # columns of rows without a token's embedding, as an image's; 0 = none

    def build(self, ops: Ops) -> Value:
        """Compute logits of ids, or an encoder's rows."""
        x = self.embed(ops)
        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
            if (first := self.facts.hidden * (1 + layer)) < self.inserts:
                x = ops.insert(x, first)
        return self.end(ops, x)

    def embed(self, ops: Ops) -> Value:
        """Compute the stream before the first layer."""
        return ops.embed(self.embedding)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        """Compute one layer: attention, then the MLP."""
        if self.on(self.parallel):
            return self.parallel_layer(ops, x, layer)
        x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        return ops.sublayer("mlp", layer, x, lambda x: self.mlp(ops, x, layer))

    def parallel_layer(self, ops: Ops, x: Value, layer: int) -> Value:
        """Compute one layer whose attention and MLP read the same stream."""
        norms = self.norms_of(layer)
        h = self.normed(ops, x, layer, norms.attention if self.one_norm else norms.mlp)
        if self.one_norm:
            x = ops.sublayer("attention", layer, x, lambda x: self.mix(ops, h, layer))
        else:
            x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        return ops.sublayer("mlp", layer, x, lambda x: self.transform(ops, h, layer))

    def attention(self, ops: Ops, x: Value, layer: int) -> Value:
        """Compute what attention adds to the stream: norm, mixer, norm."""
        norms = self.norms_of(layer)
        y = self.mix(ops, self.normed(ops, x, layer, norms.attention), layer)
        return self.normed(ops, y, layer, norms.after_attention)

    def mlp(self, ops: Ops, x: Value, layer: int) -> Value:
        """Compute what the MLP adds to the stream: norm, MLP, norm."""
        norms = self.norms_of(layer)
        y = self.transform(ops, self.normed(ops, x, layer, norms.mlp), layer)
        return self.normed(ops, y, layer, norms.after_mlp)

    def mix(self, ops: Ops, h: Value, layer: int) -> Value:
        """Mix rows of h: attention, or the mixer in its place."""
        if self.states is not None and layer in self.facts.convolutions:
            return self.states.run(self, ops, h, layer)
        return self.attend(ops, h, layer)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        """Attend: q, k and v of h, attention over them, and the output projection."""
        q, k, v = ops.linear(h, *(self.linear(layer, module) for module in QKV), joined=not self.row_norms)
        if self.row_norms:
            at = f"{LAYERS}.{layer}.self_attn"
            q, k = ops.norm(q, self.norm(f"{at}.q_norm")), ops.norm(k, self.norm(f"{at}.k_norm"))
        gates = ops.linear(h, self.linear(layer, GATE)) if self.on(self.output_gate) else ()
        y = ops.attention(q, k, v, self.rule(layer))
        for gate in gates:
            y = ops.sigmoid_gate(y, gate)
        return ops.linear(y, self.linear(layer, ATTENTION.format("o")))[0]

    def transform(self, ops: Ops, h: Value, layer: int) -> Value:
        """Transform each row of h: the MLP, or the experts in its place."""
        mixed = self.facts.experts
        if self.experts is not None and mixed is not None and layer in mixed.layers:
            return self.experts.run(self, ops, h, layer)
        return self.dense(ops, h, layer)

    def dense(self, ops: Ops, h: Value, layer: int) -> Value:
        """Compute the MLP: down(activation(gate h) * up h), or down(activation(up h))."""
        if self.gated_mlp:
            gate, up = ops.linear(h, *(self.linear(layer, MLP.format(name)) for name in ("gate", "up")))
            inner = ops.gated(gate, up, self.activation)
        else:
            (up,) = ops.linear(h, self.linear(layer, MLP.format("up")))
            inner = ops.activate(up, self.activation, self.numbers(layer))
        return ops.linear(inner, self.linear(layer, MLP.format("down")))[0]

    def end(self, ops: Ops, x: Value) -> Value:
        """Compute the last norm and the LM head; of an encoder the last norm."""
        return ops.encoded(x, self.final_norm) if self.both_ways else ops.head(x, self.final_norm, self.head)

    def normed(self, ops: Ops, x: Value, layer: int, module: str | None) -> Value:
        """Apply a norm of a layer to x; x itself without such a norm."""
        return x if module is None else ops.norm(x, self.norm(f"{LAYERS}.{layer}.{module}"))

    def norms_of(self, layer: int) -> Norms:
        """Return the modules of a layer's norms."""
        return self.norms

    def numbers(self, layer: int) -> str | None:
        """Return the learnt numbers of a layer's activation; None = it has none."""
        return None

    # -- which tensors, and how: see ``base.Architecture`` -----------------------------------------------------------

    @property
    @abstractmethod
    def embedding(self) -> str:
        """Name the embedding matrix [vocab, hidden]."""

    @property
    @abstractmethod
    def final_norm(self) -> Norm:
        """Return the last norm, [hidden]."""

    @property
    @abstractmethod
    def head(self) -> Linear:
        """Return the LM head."""

    @abstractmethod
    def norm(self, name: str) -> Norm:
        """Return a norm by its name."""

    @abstractmethod
    def linear(self, layer: int, module: str) -> Linear:
        """Return a projection of a layer."""

    @abstractmethod
    def rule(self, layer: int) -> AttentionRule:
        """Say how a layer attends."""

    @abstractmethod
    def on(self, switch: Switch) -> bool:
        """Whether a switch is on in this configuration."""
