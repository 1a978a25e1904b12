"""What a guess costs while it is learnt, and how much each guess of a round counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.export.training.options import Loss

ETA = 3.0  # how fast LK losses go from divergence to overlap (arXiv 2602.23881, 4.4)
SMOOTH = 0.5  # of D-PACE's confidences (arXiv 2605.18810, equation 7)


def guess_losses(logits: Tensor, wanted: Tensor, loss: Loss) -> Tensor:
    """Compute the loss of each guess, [n], in nats.

    ``lk`` is the hybrid of arXiv 2602.23881: at first the divergence, and the more both distributions overlap, the more
    the overlap itself, which is the chance that a drawn guess is accepted.  Both are without the entropy of ``wanted``.
    Of tokens it is the cross entropy, as every other loss.

    Args:
        logits: of guesses, [n, vocab].
        wanted: the target's distributions, [n, vocab], or tokens, int64 [n].
    """
    losses = F.cross_entropy(logits, wanted, reduction="none")
    if loss != "lk" or not wanted.is_floating_point():
        return losses
    overlap = torch.minimum(logits.softmax(-1), wanted).sum(-1)
    share = torch.exp(-ETA * overlap.detach())
    return share * losses + (1 - share) * (1 - overlap)


def round_weights(losses: Tensor, valid: Tensor, fades: Tensor, loss: Loss) -> Tensor:
    """Weigh the guesses of rounds by their place in them, [..., K], K of them in a round.

    ``d-pace`` (arXiv 2605.18810, equations 7 and 8) weighs a guess by the tokens that stand or fall with it, if each is
    right with the chance that the drafter gives the text.

    Args:
        losses: of the guesses, [..., K]; valid: where they count.
        fades: weights of the guesses of a round, [K], where nothing else says them; their sum stays.
    """
    weights = fades * valid / valid.flatten(0, -2).sum(0).clamp(min=1)
    if loss != "d-pace":
        return weights
    chances = (SMOOTH + (1 - SMOOTH) * torch.exp(-losses.detach())) * valid
    paced = chances.cumprod(-1).flip(-1).cumsum(-1).flip(-1) * valid
    return paced * (weights.sum() / paced.sum().clamp(min=1e-6))
