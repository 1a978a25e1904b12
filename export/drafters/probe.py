"""A drafter in float32 numpy with the settings that checkpoints get wrong, to say which of them would help."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import FINAL_NORM, LAYERS
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.eagle3 import EMBEDDED, FUSED
from edgespec.export.drafters.read import HEAD, TAPS
from edgespec.export.heads.description import CUT, FUSE
from edgespec.runtimes.slots.slot import Slot

Array = NDArray[np.float32]
HELPS = 0.05  # how much more often first guesses must be right


def best_setting(drafter: Drafter, target: Slot, texts: Sequence[Sequence[int]], given: int) -> str:
    """Which setting would make first guesses better, in words; "" = none of those that are tried.

    Args:
        drafter: what was read.
        target: gives its residual stream after any number of layers.
        texts: written by the target.
        given: how many tokens of each it was given; guesses of those do not count.
    """
    wanted_at = {0} | {at + shift for at in drafter.tapped for shift in (-1, 0, 1) if 0 <= at + shift <= target.layers}
    found_at = [streams(target, text, wanted_at) for text in texts]
    ends = np.concatenate([[number] * (len(text) - 2) for number, text in enumerate(texts)])  # [N]: which text's
    wanted = np.concatenate([np.asarray(text)[2:] for text in texts])  # [N]
    counted = np.concatenate([np.arange(2, len(text)) >= given for text in texts])  # [N]

    def rows(at: int, first: int) -> Array:  # [N, hidden]
        return np.concatenate([found[at][first : len(found[at]) - 2 + first] for found in found_at])

    shares: dict[tuple[int, bool, bool, int], float] = {}
    before = drafter.arch.settings.flag("norm_before_residual")
    orders = (1, -1) if len(set(drafter.tapped)) > 1 else (1,)
    for shift, swapped, residual, order in product((0, -1, 1), (False, True), (before, not before), orders):
        if not all(0 <= at + shift <= target.layers for at in drafter.tapped):
            continue
        taps = np.concatenate([rows(at + shift, 0) for at in drafter.tapped[::order]], -1)  # [N, k * hidden]
        guesses = _guesses(drafter, rows(0, 1), taps, ends, swapped, residual)  # [N]
        shares[shift, swapped, residual, order] = float((guesses == wanted)[counted].mean())
    best = max(shares, key=lambda each: shares[each])
    if shares[best] < shares[0, False, before, 1] + HELPS:
        return ""
    shift, swapped, residual, order = best
    words = [f"{TAPS}: {[at + shift for at in drafter.tapped[::order]]}"] if shift or order < 0 else []
    words += [f"norm_before_residual: {str(residual).lower()}"] if residual != before else []
    words += ["the hidden state before the embedding, which this layout does not have"] if swapped else []
    return f"{shares[best]:.0%} would be right with {', '.join(words)} in its config.json"


def streams(target: Slot, text: Sequence[int], boundaries: Collection[int]) -> dict[int, Array]:
    """The residual stream [T, hidden] after so many layers, by boundary; the slot is overwritten."""
    tokens = np.asarray(text, np.int64)
    target.follow([])
    target.reserve(len(text))
    return {at: target.forward_layers(tokens, 0, 0, at) for at in sorted(set(boundaries))}


def _guesses(
    drafter: Drafter,
    embedded: Array,  # [n, hidden]
    taps: Array,  # [n, k * hidden]
    ends: NDArray[np.int64],  # [n]
    swapped: bool,
    residual: bool,
) -> NDArray[np.int64]:
    """First guesses [n] of entries [n] of several texts, one after the other; ``ends`` says whose each is.

    Of the first layer alone, which is all that most drafters have.
    """
    arch, source = drafter.arch, drafter.arch.source
    facts, layer = arch.facts, f"{LAYERS}.0"

    def read(name: str) -> Array:
        return source.read(f"{name}.weight")

    def norm(x: Array, name: str) -> Array:
        y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(arch.eps)) * read(name)
        return y

    if arch.settings.flag("norm_before_fc"):
        taps = norm(taps, "input_norm")
    g: Array = taps @ source.read(FUSE).T
    halves = [norm(embedded, f"{layer}.{EMBEDDED}"), norm(g, f"{layer}.{FUSED}")]
    x = np.concatenate(halves[::-1] if swapped else halves, -1)
    n, dim = len(x), facts.head_dim
    q, k, v = ((x @ read(f"{layer}.self_attn.{part}_proj").T).reshape(n, -1, dim) for part in "qkv")
    rule = arch.rule(0)
    if rule.q_norm and rule.k_norm:
        q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
    cos, sin = (np.tile(table[:, None], (1, 1, 2)) for table in arch.rotaries["rope"].tables(n, facts.context))
    q, k = (each * cos + np.concatenate((-each[..., dim // 2 :], each[..., : dim // 2]), -1) * sin for each in (q, k))
    out = np.zeros((n, facts.heads, dim), np.float32)
    above = np.triu(np.ones((n, n), bool), 1) | (ends[:, None] != ends)  # [n, n]: not to be seen
    for head in range(facts.heads):
        kv = head * facts.kv_heads // facts.heads
        scores = q[:, head] @ k[:, kv].T * np.float32(dim**-0.5)
        scores[above] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, kv]
    u = (halves[1] if residual else g) + out.reshape(n, -1) @ read(f"{layer}.self_attn.o_proj").T
    b = norm(u, f"{layer}.post_attention_layernorm")
    gate = b @ read(f"{layer}.mlp.gate_proj").T
    y = u + (gate / (1 + np.exp(-gate)) * (b @ read(f"{layer}.mlp.up_proj").T)) @ read(f"{layer}.mlp.down_proj").T
    head_name = HEAD if drafter.tokens is None else CUT
    best = (norm(y, FINAL_NORM) @ source.read(head_name).T).argmax(-1)
    found: NDArray[np.int64] = best if drafter.tokens is None else drafter.tokens[best]
    return found
