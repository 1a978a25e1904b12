"""Drawing a chain of guesses from draft logits: what ``speculative``, ``self_spec`` and ``entries`` share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import DRAFT, TARGET, Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, log_softmax_at, support
from edgespec.decoding.text import Prefix
from edgespec.errors import EdgespecError


def draw_chain(
    step: Callable[[int | None], NDArray[np.float32]],
    tokens: Sequence[int],
    length: int,
    vocab: int,
    params: SamplingParams,
    noise: Noise,
    stop: float = 0.0,
    best: Callable[[int | None], tuple[int, float]] | None = None,
    sure: Callable[[int | None], tuple[int, float]] | None = None,
) -> Proposal:
    """Draw up to ``length`` guesses, one after the other.

    Greedy guesses are deterministic.  ``rejection`` draws from q = the draft's adjusted distribution with noise of its
    own and reports q.  ``coupled`` draws with the target's noise (arXiv 2408.07978) and needs no q: verification is by
    matching.

    Args:
        step: draft logits float32 [any] after one guess more (None = after the committed tokens); not called for the
            last guess, whose own continuation nobody needs.
        tokens: committed tokens.
        length: most guesses.
        vocab: the target's vocabulary: draft logits beyond it are padding and ignored, missing ones have q = 0.
        params: how the request samples.
        noise: its randomness.
        stop: draft no further AFTER a guess whose unadjusted draft probability is below this.
        best: instead of ``step`` for greedy requests without ``stop``: the likeliest token and its logit.
        sure: instead of ``step`` for greedy requests: the likeliest token and its probability.

    Raises:
        EdgespecError: the draft's logits are not finite.
    """
    if length < 1:
        return EMPTY
    sampled = params.rejects
    # A draft of its own for each round: where a later round drafts the same position again, it must not see the same
    # noise, on which what has happened since may depend.
    stream = DRAFT + len(tokens) if sampled else TARGET
    guesses: list[int] = []
    prefix = Prefix(tokens, guesses)
    probs = np.zeros((length, vocab)) if sampled else None  # float64 [length, vocab]
    least = math.log(stop) if stop > 0 else -math.inf
    while True:
        last = guesses[-1] if guesses else None
        if sure is not None and params.plain_greedy:
            guess, chance = sure(last)
            if not math.isfinite(chance):
                raise EdgespecError("expected a finite probability of a draft's guess, got NaN or infinity")
            guesses.append(guess)
            if len(guesses) == length or chance < stop:
                return Proposal(np.array(guesses, np.int64))
            continue
        if best is not None and params.plain_greedy and stop <= 0:
            guess, logit = best(last)
            if not math.isfinite(logit):
                raise EdgespecError("expected finite draft logits, got NaN or infinity")
            guesses.append(guess)
            if len(guesses) == length:
                return Proposal(np.array(guesses, np.int64))
            continue
        logits = step(last)[:vocab]
        if params.plain_greedy:
            guess = int(logits.argmax())
            if not math.isfinite(logits[guess]):
                raise EdgespecError("expected finite draft logits, got NaN or infinity")
        else:
            found = support(logits, params, prefix)
            guess = found.draw(noise, len(prefix), stream)
            if probs is not None:
                probs[len(guesses), found.ids] = found.probs()
        guesses.append(guess)
        if len(guesses) == length or (stop > 0 and log_softmax_at(logits, guess) < least):
            count = len(guesses)
            return Proposal(np.array(guesses, np.int64), None, None if probs is None else probs[:count])
