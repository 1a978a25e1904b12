"""Compute the training loss of a draft token, and the weight of each draft token of a round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.export.training.options import Loss

ETA = 3.0  # how fast LK losses go from divergence to overlap (arXiv 2602.23881, 4.4)
SMOOTH = 0.5  # of D-PACE's confidences (arXiv 2605.18810, equation 7)


def guess_losses(logits: Tensor, wanted: Tensor, loss: Loss) -> Tensor:
    """Compute the loss of each draft token, [n], in nats.

    ``lk`` is the hybrid of arXiv 2602.23881.  It starts as the divergence.  The more both distributions overlap, the
    more it becomes the overlap, which is the chance that a sampled draft token is accepted.  Neither includes the
    entropy of ``wanted``.  With tokens as ``wanted``, every loss is the cross entropy.

    Args:
        logits: of draft tokens, [n, vocab].
        wanted: the target's distributions, [n, vocab], or tokens, int64 [n].
    """
    losses = F.cross_entropy(logits, wanted, reduction="none")
    if loss != "lk" or not wanted.is_floating_point():
        return losses
    overlap = torch.minimum(logits.softmax(-1), wanted).sum(-1)
    share = torch.exp(-ETA * overlap.detach())
    return share * losses + (1 - share) * (1 - overlap)


def round_weights(losses: Tensor, valid: Tensor, fades: Tensor, loss: Loss) -> Tensor:
    """Weigh the draft tokens of rounds by their position in the round, [..., K], K of them in a round.

    ``d-pace`` (arXiv 2605.18810, equations 7 and 8) weighs a draft token by the later tokens that depend on it, if
    each is accepted with the drafter's probability of the text.

    Args:
        losses: of the draft tokens, [..., K]; valid: where they count.
        fades: default weights of a round's draft tokens, [K]; their sum stays.
    """
    weights = fades * valid / valid.flatten(0, -2).sum(0).clamp(min=1)
    if loss != "d-pace":
        return weights
    chances = (SMOOTH + (1 - SMOOTH) * torch.exp(-losses.detach())) * valid
    paced = chances.cumprod(-1).flip(-1).cumsum(-1).flip(-1) * valid
    return paced * (weights.sum() / paced.sum().clamp(min=1e-6))
