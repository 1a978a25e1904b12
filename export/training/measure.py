"""How good guesses are on text that nothing was trained on: right guesses by rank, and acceptance of drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgespec.export.training.data import Windows
from edgespec.export.training.learners import Learner
from edgespec.export.training.target import Target

RANKS = 10
TOGETHER = 8  # windows of a pass


def _batches(windows: Windows, device: Any) -> list[tuple[Tensor, Tensor]]:
    found = []
    for start in range(0, len(windows), TOGETHER):
        tokens = torch.from_numpy(windows.tokens[start : start + TOGETHER]).to(device)
        found.append((tokens, torch.from_numpy(windows.lengths[start : start + TOGETHER]).to(device)))
    return found


@torch.no_grad()
def rank_shares(learner: Learner, windows: Windows, start: int = 1) -> list[list[float]]:
    """[head][rank]: share of positions where the head's guess of that rank is right.

    Args:
        learner: trained heads.
        windows: held-out text.
        start: given tokens: position ``start - 1`` is the first that is measured.
    """
    hits: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    for tokens, lengths in _batches(windows, learner.target.device):
        for head, (logits, wanted, valid) in enumerate(learner.guesses(tokens, lengths)):
            valid = valid.clone()
            valid[:, : start - 1] = False
            best = logits[valid].topk(min(RANKS, logits.shape[-1]), -1).indices  # [n, ranks]
            right = (best == wanted[valid][:, None]).sum(0).cpu()
            hits[head] = hits.get(head, torch.zeros_like(right)) + right
            counts[head] = counts.get(head, 0) + len(best)
    return [[round(int(hit) / max(1, counts[head]), 4) for hit in hits[head]] for head in sorted(hits)]


@torch.no_grad()
def draft_acceptance(
    logits_of: Callable[[Tensor], Tensor], target: Target, windows: Windows, start: int = 1
) -> dict[str, float]:
    """How often a draft's guesses would be accepted, teacher-forced.

    Args:
        logits_of: the draft's logits [B, T, vocab] of tokens [B, T].
        windows: text, typically the target's own.
        start: as of ``rank_shares``.

    Returns:
        ``overlap``: mean of sum min(p, q), the acceptance rate of speculative sampling at temperature 1 (arXiv
        2211.17192); ``agreement``: share of equal likeliest tokens; ``positions``.
    """
    overlap = agreement = positions = 0.0
    for tokens, lengths in _batches(windows, target.device):
        valid = torch.arange(tokens.shape[1], device=tokens.device)[None] + 1 < lengths[:, None]
        valid[:, : start - 1] = False
        theirs = target.logits(target.hidden(tokens)[valid])  # [n, V]
        ours = logits_of(tokens)[valid].float()
        overlap += float(torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum())
        agreement += float((theirs.argmax(-1) == ours.argmax(-1)).sum())
        positions += len(ours)
    whole = max(1.0, positions)
    return {
        "overlap": round(overlap / whole, 4),
        "agreement": round(agreement / whole, 4),
        "positions": int(positions),
    }
