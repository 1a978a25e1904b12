"""The source model in float32 numpy, streamed: one matrix in memory at a time.

What a bundle is compared with.  It reads the source weights itself and shares only the architecture file with the
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import Architecture
from edgespec.export.ops import Kind, Linear
from edgespec.export.rope import rope_tables

Array = NDArray[np.float32]


class NumpyOps:
    """Computes a decoder on one text, causally, from an empty past.

    Args:
        arch: the architecture with its checkpoint.
        tokens: int [T].
        rows: which positions get logits; None = all.
        progress: called after every sub-layer with the number done so far.
    """

    def __init__(
        self,
        arch: Architecture,
        tokens: Sequence[int],
        rows: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.arch, self.source = arch, arch.source
        self.tokens = np.asarray(tokens, np.int64)  # [T]
        self.rows = np.arange(len(self.tokens)) if rows is None else np.asarray(rows)  # [R]
        self.progress, self.done = progress, 0
        self.cos, self.sin = rope_tables(arch.rope, arch.facts.head_dim, len(self.tokens))

    def embed(self, weight: str) -> Array:  # [1, T, hidden]
        wanted, inverse = np.unique(self.tokens, return_inverse=True)
        rows = np.concatenate([self.source.read(weight, slice(int(token), int(token) + 1)) for token in wanted])
        return rows[inverse][None]

    def norm(self, x: Array, weight: str) -> Array:
        mean = np.mean(np.square(x), -1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self.arch.eps)) * self.source.read(weight)

    def linear(self, x: Array, *parts: Linear, joined: bool = False) -> tuple[Array, ...]:
        return tuple(self._linear(x, part) for part in parts)

    def attention(self, q: Array, k: Array, v: Array, layer: int) -> Array:
        facts = self.arch.facts
        q, k = self._rotate(self._heads(q, facts.heads)), self._rotate(self._heads(k, facts.kv_heads))
        v = self._heads(v, facts.kv_heads)  # [kv_heads, T, head_dim]
        length, group = q.shape[1], facts.heads // facts.kv_heads
        hidden = np.triu(np.ones((length, length), bool), 1)
        out = np.empty_like(q)
        for head in range(facts.heads):
            scores = q[head] @ k[head // group].T * np.float32(facts.head_dim**-0.5)
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[head] = (scores / scores.sum(-1, keepdims=True)) @ v[head // group]
        return out.transpose(1, 0, 2).reshape(1, length, -1)

    def gated(self, gate: Array, up: Array) -> Array:
        with np.errstate(over="ignore"):  # exp(-x) may overflow to inf, which gives the right 0
            return gate / (1 + np.exp(-gate)) * up

    def sublayer(self, kind: Kind, layer: int, x: Array, body: Callable[[Array], Array]) -> Array:
        y = x + body(x)
        self.done += 1
        if self.progress:
            self.progress(self.done)
        return y

    def head(self, x: Array, norm: str, head: Linear) -> Array:  # [1, R, vocab]
        return self._linear(self.norm(x[:, self.rows], norm), head)

    def _linear(self, x: Array, part: Linear) -> Array:
        y = np.concatenate([x @ piece.T for piece in self.source.pieces(part.weight)], -1)
        if part.bias is not None:
            y += self.source.read(part.bias)
        return y

    @staticmethod
    def _heads(x: Array, heads: int) -> Array:  # [1, T, heads * head_dim] -> [heads, T, head_dim]
        return x.reshape(x.shape[1], heads, -1).transpose(1, 0, 2)

    def _rotate(self, x: Array) -> Array:  # [heads, T, head_dim]
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1)


def reference_logits(
    arch: Architecture,
    tokens: Sequence[int],
    rows: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Array:  # [R, vocab]
    """Float32 logits of the source model at the given rows of a text."""
    logits: Array = arch.build(NumpyOps(arch, tokens, rows, progress))[0]
    return logits
