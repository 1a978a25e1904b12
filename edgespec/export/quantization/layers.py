"""Operations of layers in float32 numpy: activations, recurrences, the choice of experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.rules import ExpertsRule
from edgespec.export.source.activations import relu
from edgespec.runtimes.files.facts import DeltaHeads, ExpertFacts

Array = NDArray[np.float32]
TINY = np.float32(1e-6)


def capped(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap); x itself if ``cap`` is 0."""
    return np.tanh(x / np.float32(cap)) * np.float32(cap) if cap else x


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) may overflow to inf, which gives the right 0
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def xielu(x: Array, numbers: Array) -> Array:  # numbers [3]: see settings.ACTIVATIONS
    """Compute xIELU of Apertus."""
    above, below, slope = numbers
    low = np.minimum(x, 0)
    return above * np.square(relu(x)) + below * (np.expm1(low) - low) + slope * x


def mixed(x: Array, taps: Array, bias: Array | None = None) -> Array:  # [B, T, k], [length, k], [k] -> [B, T, k]
    """Convolve each channel causally, then take silu."""
    length = len(taps)
    seen = np.pad(x, ((0, 0), (length - 1, 0), (0, 0)))
    y = np.zeros_like(x) if bias is None else np.broadcast_to(bias, x.shape).copy()
    for at in range(length):
        y += taps[at] * seen[:, at : at + x.shape[1]]
    return y * sigmoid(y)


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True) + TINY), np.float32)


def _projections(x: Array, heads: DeltaHeads) -> tuple[Array, Array, Array]:  # [B, T, value heads, dim] each
    """Split q, k and v, and repeat q and k for the heads of values."""
    q, k, v = np.split(x, np.cumsum([heads.keys * heads.key_dim] * 2), -1)
    q, k = (np.repeat(part.reshape(*x.shape[:2], heads.keys, -1), heads.values // heads.keys, 2) for part in (q, k))
    return q, k, v.reshape(*x.shape[:2], heads.values, -1)


def gated_delta(
    x: Array,  # [B, T, k]: q, k, v after the convolution
    a: Array,  # [B, T, value heads]
    b: Array,  # [B, T, value heads]
    bias: Array,  # [value heads]
    rate: Array,  # [value heads]
    heads: DeltaHeads,
    times: float = 1.0,
) -> Array:  # [B, T, value heads, value_dim]
    """Compute the outputs of a gated delta rule (arXiv 2412.06464), one token after the other.

    S = decay S + k (beta (v - decay S^T k))^T, then S^T q; decay = exp(-rate ln(1 + exp(a + bias))), beta =
    times sigmoid(b); q and k have length 1, q over the root of its size.
    """
    q, k, v = _projections(x, heads)
    q, k = _unit(q) / np.float32(heads.key_dim**0.5), _unit(k)
    decay, beta = np.exp(-rate * np.logaddexp(0, a + bias, dtype=np.float32)), np.float32(times) * sigmoid(b)
    state = np.zeros((len(x), heads.values, heads.key_dim, heads.value_dim), np.float32)
    out = np.empty_like(v)
    for at in range(x.shape[1]):
        state *= decay[:, at, :, None, None]
        known = np.einsum("bhkv,bhk->bhv", state, k[:, at])
        state += k[:, at, :, :, None] * (beta[:, at, :, None] * (v[:, at] - known))[:, :, None]
        out[:, at] = np.einsum("bhkv,bhk->bhv", state, q[:, at])
    return out


def state_space(
    x: Array,  # [B, T, k]: q, k, v after the convolution
    a: Array,  # [B, T, value heads]
    bias: Array,  # [value heads]
    rate: Array,  # [value heads]
    skip: Array,  # [value heads]
    heads: DeltaHeads,
) -> Array:  # [B, T, value heads, value_dim]
    """Compute the outputs of a state space (arXiv 2405.21060), one token after the other.

    S = decay S + k (step v)^T, then S^T q + skip v; step = ln(1 + exp(a + bias)), decay = exp(-rate step).
    """
    q, k, v = _projections(x, heads)
    step = np.logaddexp(0, a + bias, dtype=np.float32)
    state = np.zeros((len(x), heads.values, heads.key_dim, heads.value_dim), np.float32)
    out = v * skip[:, None]
    for at in range(x.shape[1]):
        state *= np.exp(-rate * step[:, at])[:, :, None, None]
        state += k[:, at, :, :, None] * (step[:, at, :, None] * v[:, at])[:, :, None]
        out[:, at] += np.einsum("bhkv,bhk->bhv", state, q[:, at])
    return out


def routed(
    scores: Array, facts: ExpertFacts, rule: ExpertsRule, bias: Array | None
) -> tuple[NDArray[np.int64], Array]:  # [rows, experts] -> [rows, chosen], [rows, chosen]
    """Choose the experts of each row, and their weights."""
    others = facts.count - rule.always
    chance = np.exp(scores[:, :others] - scores[:, :others].max(-1, keepdims=True))
    if rule.sigmoid:
        chance = sigmoid(scores[:, :others])
    order = chance if bias is None else chance + bias
    chosen = np.argsort(-order, -1, "stable")[:, : facts.chosen - rule.always]
    weights = np.take_along_axis(chance, chosen, -1)
    if rule.normed or not rule.sigmoid:
        weights /= (weights if rule.normed else chance).sum(-1, keepdims=True)
    always = np.broadcast_to(np.arange(others, facts.count), (len(scores), rule.always))
    weights = np.concatenate([weights * np.float32(rule.scale), sigmoid(scores[:, others:])], -1)
    return np.concatenate([chosen, always], -1), weights
