"""The source model in float32 numpy, streamed: one matrix in memory at a time.

Bundles are compared with it.  It reads the source weights itself and shares only the architecture file with the
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, Kind
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
    RelativeRule,
)
from edgespec.export.architectures.shapes import Shapes
from edgespec.export.architectures.trace import Pass
from edgespec.export.quantization.layers import Array, capped, gated_delta, mixed, routed, sigmoid, state_space, xielu
from edgespec.export.source.activations import ACTIVATE, silu, swiglu_oai
from edgespec.export.source.source import Checkpoint


class NumpyOps(Pass[Array]):
    """Computes a decoder on one text, causally, from an empty past; or an encoder, whose rows see each other.

    Args:
        tokens: of the text; of an encoder over float rows as many of any as there are rows.
        rows: positions whose logits are computed; None = all.
        floats: [B, S, width]: float rows that an encoder reads, or what one gave, for a decoder's memory.
    """

    handled_fields: ClassVar[dict[type, str]] = Shapes.handled_fields

    def __init__(
        self,
        arch: Architecture,
        tokens: Sequence[int],
        rows: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
        floats: Array | None = None,
    ) -> None:
        self.arch, self.source, self.floats = arch, arch.source, floats
        self.tokens = np.asarray(tokens, np.int64)  # [T]
        self.sequences = self.tokens[None]  # [S, T], each from an empty past
        self.rows = np.arange(len(self.tokens)) if rows is None else np.asarray(rows)  # [R]
        self.progress, self.done = progress, 0
        self.angles = {
            name: rotary.tables(len(self.tokens), arch.facts.context) for name, rotary in arch.rotaries.items()
        }
        self.given: MutableMapping[int, tuple[Array, Array]] = {}  # keys and values that later layers read, by layer
        self._memory: dict[int, tuple[Array, Array]] = {}  # by layer, [B, kv_heads, S, head_dim] both

    def turn_by(self, positions: NDArray[np.int64]) -> None:
        """Rotate heads by three positions of each row, [3, T], where rotations have axes."""
        for name, rotary in self.arch.rotaries.items():
            if rotary.axes:
                at = positions[list(rotary.axes)].T  # [T, dims / 2]
                cos, sin = rotary.tables(int(positions.max()) + 1, self.arch.facts.context)
                self.angles[name] = np.take_along_axis(cos, at, 0), np.take_along_axis(sin, at, 0)

    def embed(self, weight: str, scale: float, positions: str | None) -> Array:  # [1, T, hidden]
        return self._placed(self._rows(weight, self.sequences, slice(None)), scale, positions)

    def token_embeddings(self, weight: str, scale: float) -> Array:
        return self.embed(weight, scale, None)

    def norm(self, x: Array, norm: Norm) -> Array:
        x = x - x.mean(-1, keepdims=True) if norm.centered else x
        mean = np.mean(np.square(x), -1, keepdims=True)
        y = x / np.sqrt(mean + np.float32(self.arch.eps)) * self.source.read(norm.weight)
        return y if norm.bias is None else y + self.source.read(norm.bias)

    def linear(self, x: Array, parts: tuple[Linear, ...], joined: bool) -> tuple[Array, ...]:
        return tuple(self._linear(x, part) for part in parts)

    def attention_over(self, q: Array, rule: AttentionRule) -> Array:
        return self.attention(q, None, None, rule)

    def attention(self, q: Array, k: Array | None, v: Array | None, rule: AttentionRule) -> Array:
        """Attend; without k and v over those of another layer."""
        facts = self.arch.facts
        q = self._placed_heads(self._heads(q, facts.heads), rule.q_norm, rule)
        if k is None or v is None:
            k, v = self.given[rule.layer]
        else:
            k = self._placed_heads(self._heads(k, facts.kv_heads), rule.k_norm, rule)
            v = self._heads(v, facts.kv_heads)  # [kv_heads, T, head_dim]
            v = self.norm(v, rule.v_norm) if rule.v_norm else v
        if rule.gives:
            self.given[rule.layer] = k, v
        if rule.rotary and (growth := self.arch.rotaries[rule.rotary].growth(q.shape[1])) is not None:
            q = q * growth[:, None]
        length, group = q.shape[1], facts.heads // facts.kv_heads
        hidden = np.triu(np.ones((length, length), bool), 1) & (not self.arch.both_ways)
        if rule.window:
            hidden |= np.tril(np.ones((length, length), bool), -rule.window)
        if rule.after is not None:
            hidden |= np.triu(np.ones((length, length), bool), rule.after + 1)
        biases, sinks = self._biases(rule.relative, length), rule.sinks and self.source.read(rule.sinks)
        out = np.empty_like(q)
        for head in range(facts.heads):
            scores = capped(q[head] @ k[head // group].T * np.float32(rule.scale), rule.cap)
            if biases is not None:
                scores += biases[head]
            scores[hidden] = -np.inf
            most, sink = scores.max(-1, keepdims=True), 0
            if sinks is not None:
                most = np.maximum(most, sinks[head])
                sink = np.exp(sinks[head] - most)
            scores = np.exp(scores - most)
            out[head] = (scores / (scores.sum(-1, keepdims=True) + sink)) @ v[head // group]
        return out.transpose(1, 0, 2).reshape(1, length, -1)

    def _biases(self, rule: RelativeRule | None, length: int) -> Array | None:  # [heads, T, T]
        """Read the biases of all scores by distance; None without such biases."""
        if rule is None:
            return None
        places = np.arange(length) - np.arange(length)[:, None]
        number = rule.distance + np.clip(places, -rule.distance, rule.distance if rule.both_ways else 0)
        return self.source.read(rule.table).reshape(-1, rule.size)[:, number]

    def input_slice(self, first: int, width: int) -> Array:  # [B, S, width]
        assert self.floats is not None
        return self.floats[..., first : first + width]

    def join(self, parts: tuple[Array, ...]) -> Array:
        return np.concatenate(parts, -1)

    def fill_memory(self, memory: Callable[[], None]) -> None:
        memory()

    def append_memory(self, k: Array, v: Array, rule: MemoryRule) -> None:
        self._memory[rule.layer] = self._split(k, self.arch.facts.kv_heads), self._split(v, self.arch.facts.kv_heads)

    def attend_memory(self, q: Array, rule: MemoryRule) -> Array:
        k, v = (np.repeat(each, self.arch.facts.heads // each.shape[1], 1) for each in self._memory[rule.layer])
        scores = self._split(q, self.arch.facts.heads) @ k.swapaxes(2, 3) * np.float32(rule.scale)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        found: Array = (scores / scores.sum(-1, keepdims=True)) @ v
        return found.swapaxes(1, 2).reshape(q.shape)

    def place(self, x: Array, positions: str) -> Array:
        return self._placed(x, 1, positions)

    def insert(self, x: Array, first: int) -> Array:
        return x  # a text only

    def plus(self, x: Array, product: Array) -> Array:
        return x + product

    def encoded(self, x: Array, norm: Norm | None) -> Array:
        return x if norm is None else self.norm(x, norm)

    @staticmethod
    def _split(x: Array, heads: int) -> Array:  # [B, T, heads * head_dim] -> [B, heads, T, head_dim]
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    def convolution(self, x: Array, rule: ConvolutionRule) -> Array:  # [B, T, 3 * hidden] -> [B, T, hidden]
        b, c, v = np.split(x, 3, -1)
        seen = np.pad(b * v, ((0, 0), (rule.length - 1, 0), (0, 0)))
        taps = self.source.read(rule.taps).reshape(rule.length, -1)
        y = sum(taps[at] * seen[:, at : at + x.shape[1]] for at in range(rule.length))
        return c * (y if rule.bias is None else y + self.source.read(rule.bias))

    def depthwise(self, x: Array, rule: DepthwiseRule, by: Array | None) -> Array:  # [B, T, width]
        seen = np.pad(x, ((0, 0), (rule.length - 1, 0), (0, 0)))
        taps: Array = self.source.read(rule.taps).reshape(rule.length, 1, 1, -1)
        if by is not None:  # [B, T, 2 * length * groups]
            own = by.reshape(*by.shape[:2], 2, rule.length, rule.groups)[:, :, int(rule.second), ::-1]
            taps = taps + np.repeat(np.moveaxis(own, 2, 0), x.shape[-1] // rule.groups, -1)
        found: Array = sum(taps[at] * seen[:, at : at + x.shape[1]] for at in range(rule.length))
        return found if rule.bias is None else found + self.source.read(rule.bias)

    def delta(self, x: Array, z: Array, a: Array, b: Array, rule: DeltaRule) -> Array:
        heads = self.arch.facts.delta
        assert heads is not None
        read = {key: self.source.read(name) for key, name in rule.vectors.items()}
        x, bias, rate = (
            mixed(x, read["w"].reshape(self.arch.facts.taps, -1), read.get("upbias")),
            read["bias"],
            read["rate"],
        )
        if rule.skip:
            return state_space(x, a, bias, rate, read["up"], heads).reshape(z.shape) * silu(z)
        y = gated_delta(x, a, b, bias, rate, heads, rule.times)
        eps = self.arch.eps if rule.eps is None else rule.eps
        y /= np.sqrt(np.square(y).mean(-1, keepdims=True) + np.float32(eps))
        return (y * read["norm"]).reshape(z.shape) * silu(z)

    def sigmoid_gate(self, x: Array, gate: Array) -> Array:
        return x * np.repeat(sigmoid(gate), x.shape[-1] // gate.shape[-1], -1)

    def gated(self, gate: Array, up: Array, activation: Activation) -> Array:
        return swiglu_oai(gate, up) if activation == "swiglu_oai" else self.activate(gate, activation, None) * up

    def activate(self, x: Array, activation: Activation, numbers: str | None) -> Array:
        if numbers is None:
            return ACTIVATE[activation](x)
        own = self.source.read(numbers)
        return np.clip(x, own[0], own[1]) if activation == "clamp" else xielu(x, own)

    def sum(self, x: Array, y: Array) -> Array:
        return x + y

    def experts(self, h: Array, rule: ExpertsRule, activation: Activation, by: Array | None = None) -> Array:
        facts, x = self.arch.facts.experts, h.reshape(-1, h.shape[-1])
        assert facts is not None
        chosen, weights = self.routed(h if by is None else by, rule)
        y = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, ranks = np.nonzero(chosen == expert)
            inner = slice(expert * facts.inner, (expert + 1) * facts.inner)
            outer = slice(expert * x.shape[1], (expert + 1) * x.shape[1])
            gate = self._biased(x[rows] @ self.source.read(rule.gate, inner).T, rule.gate_bias, inner)
            up = self._biased(x[rows] @ self.source.read(rule.up, inner).T, rule.up_bias, inner)
            made = NumpyOps.gated(self, gate, up, activation) @ self.source.read(rule.down, outer).T
            made = self._biased(made, rule.down_bias, outer)
            y[rows] += made * weights[rows, ranks][:, None]
        return y.reshape(h.shape)

    def routed(self, x: Array, rule: ExpertsRule) -> tuple[NDArray[np.int64], Array]:
        """Choose the experts of rows [.., hidden], and their weights: [n, chosen] both."""
        assert self.arch.facts.experts is not None
        bias = None if rule.bias is None else self.source.read(rule.bias)
        scores = self._biased(
            x.reshape(-1, x.shape[-1]) @ self.source.read(rule.router).T, rule.router_bias, slice(None)
        )
        chosen, weights = routed(scores, self.arch.facts.experts, rule, bias)
        if rule.factors is not None:
            assert not rule.always
            weights = weights * self.source.read(rule.factors)[chosen]
        return chosen, weights

    def _biased(self, x: Array, bias: str | None, own: slice) -> Array:
        """Add a part of a bias, if there is one, to products [rows, n]."""
        return x if bias is None else x + self.source.read(bias, own)

    def layer_embedding(self, gate: Array, base: Array, rule: LayerEmbedding, activation: Activation) -> Array:
        columns = slice(rule.layer * rule.width, (rule.layer + 1) * rule.width)
        rows = self._rows(rule.table, self.sequences, columns) * np.float32(rule.scale)
        return self.gated(gate, base + np.concatenate([rows] * (len(base) // len(rows))), activation)

    def _rows(self, name: str, ids: NDArray[np.int64], columns: slice) -> Array:  # [..] -> [.., columns]
        """Read some columns of the rows of a matrix that belong to tokens."""
        wanted, inverse = np.unique(ids, return_inverse=True)
        rows = [self.source.read(name, slice(int(token), int(token) + 1), columns) for token in wanted]
        return np.concatenate(rows)[inverse.reshape(ids.shape)]

    def sublayer(
        self, kind: Kind, layer: int, x: Array, body: Callable[[Array], Array], scale: str | None, norm: Norm | None
    ) -> Array:
        x = x if norm is None else self.norm(x, norm)
        y = x + body(x)
        if kind in ("attention", "mlp"):  # the others are left out only with these
            self.done += 1
            if self.progress:
                self.progress(self.done)
        return y if scale is None else y * self.source.read(scale)

    def head(self, x: Array, norm: Norm | None, head: Linear) -> Array:  # [1, R, vocab]
        rule = self.arch.logits
        return capped(self._linear(self.encoded(x[:, self.rows], norm), head) * np.float32(rule.scale), rule.cap)

    def _placed(self, x: Array, scale: float, positions: str | None) -> Array:  # [.., T, hidden]
        x = x * np.float32(scale)
        return x if positions is None else x + self.source.read(positions, slice(0, x.shape[-2]))

    def _linear(self, x: Array, part: Linear) -> Array:
        flat = x.reshape(-1, x.shape[-1])  # in one product, for BLAS
        y = np.concatenate([flat @ piece.T for piece in self.source.pieces(part.weight)], -1)
        if part.bias is not None:
            y += self.source.read(part.bias)
        return y.reshape(*x.shape[:-1], -1)

    @staticmethod
    def _heads(x: Array, heads: int) -> Array:  # [1, T, heads * head_dim] -> [heads, T, head_dim]
        return x.reshape(x.shape[1], heads, -1).transpose(1, 0, 2)

    def _placed_heads(self, x: Array, norm: Norm | None, rule: AttentionRule) -> Array:  # [heads, T, head_dim]
        x = self.norm(x, norm) if norm and not rule.late_norms else x
        x = self._rotate(x, rule.rotary)
        return self.norm(x, norm) if norm and rule.late_norms else x

    def _rotate(self, x: Array, rotary: str | None) -> Array:  # [heads, T, head_dim]
        if rotary is None:
            return x
        cos, sin = self.angles[rotary]
        half = cos.shape[1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


class SequenceOps(NumpyOps):
    """Computes a decoder on several texts of one length, so that every matrix is read once.

    Activations are [B, T, width], B a multiple of S: each stream of them begins with the first sequence.

    Args:
        sequences: int [S, T], each from an empty past.
        rows: positions whose logits are computed; None = all.
        source: read instead of the architecture's checkpoint.
        floats: [B, R, width], see ``NumpyOps``, different for each sequence.
    """

    def __init__(
        self,
        arch: Architecture,
        sequences: NDArray[np.int64],
        rows: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
        source: Checkpoint | None = None,
        floats: Array | None = None,
    ) -> None:
        super().__init__(arch, sequences[0].tolist(), rows, progress, floats)
        self.sequences, self.source = sequences, source or arch.source
        self._given: dict[int, dict[int, tuple[Array, Array]]] = {}  # see NumpyOps, by sequence

    def attention(self, q: Array, k: Array | None, v: Array | None, rule: AttentionRule) -> Array:
        found = []
        for s in range(len(q)):
            self.given = self._given.setdefault(s, {})
            own = slice(s, s + 1)
            keys, values = None if k is None else k[own], None if v is None else v[own]
            found.append(super().attention(q[own], keys, values, rule))
        return np.concatenate(found)

    def gated(self, gate: Array, up: Array, activation: Activation) -> Array:
        for s in range(len(gate)):  # in place: the widest of all activations
            gate[s] = super().gated(gate[s], up[s], activation)
        return gate

    def activate(self, x: Array, activation: Activation, numbers: str | None) -> Array:
        for s in range(len(x)):
            x[s] = super().activate(x[s], activation, numbers)
        return x


def split_sources(sources: NDArray[np.int64] | Array) -> tuple[NDArray[np.int64], Array | None]:
    """Return the sequences and the floats for an encoder's ``SequenceOps``.

    Args:
        sources: int64 [S, R], token ids, or float32 [S, R, columns].
    """
    if sources.ndim == 2:
        return sources.astype(np.int64, copy=False), None
    return np.zeros(sources.shape[:2], np.int64), sources.astype(np.float32, copy=False)


def reference_logits(
    arch: Architecture,
    tokens: Sequence[int],
    rows: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
    floats: Array | None = None,
) -> Array:  # [R, vocab]
    """Float32 logits of the source model at the given rows of a text.

    Args:
        floats: [1, S, width], what the encoder gave (``reference_rows``).
    """
    logits: Array = NumpyOps(arch, tokens, rows, progress, floats).run(arch.trace())[0]
    return logits


def reference_rows(
    encoder: Architecture, given: Sequence[int] | Array, places: NDArray[np.int64] | None = None
) -> Array:  # [1, S, width]
    """Compute an encoder's output, in float32, from token ids or from float rows [S, columns].

    Args:
        places: [2, S], line and column of each row, of a tower that turns heads by them.
    """
    floats = given[None] if isinstance(given, np.ndarray) else None
    tokens = [0] * len(given) if isinstance(given, np.ndarray) else given
    ops = NumpyOps(encoder, tokens, floats=floats)
    if places is not None:
        ops.turn_by(np.concatenate([np.arange(len(given))[None], places]))
    rows: Array = ops.run(encoder.trace())
    return rows
