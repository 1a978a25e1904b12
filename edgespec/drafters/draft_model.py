"""A separate small model that shares the target's vocabulary (Leviathan arXiv 2211.17192, Chen arXiv 2302.01318)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.chain import draw_chain
from edgespec.drafters.parts import Parts
from edgespec.noise import Noise
from edgespec.proposal import EMPTY, Proposal, Verdict
from edgespec.runtimes.manifest import MethodPart
from edgespec.runtimes.target import GreedyTarget, Pass, Target
from edgespec.sampling import SamplingParams
from edgespec.settings import DraftOptions

# Tokens the draft has not seen yet are fed in one pass with the pending one up to this many, because each row also pays
# for the LM head; more are prefilled first.  After full acceptance it is two: the last guess and the bonus.
_FEED = 4


class DraftModel:
    """Draws chains from a draft model.

    The draft's slot follows the committed tokens by longest common prefix, so that accepted, refused and never run
    guesses need no special cases.

    Args:
        model: the draft.
        vocab_size: the target's; the draft's may differ from it by padding.
        params: how requests sample; the loop sets it for each (``bind``).
        noise: likewise.
    """

    name = "speculative"

    def __init__(
        self, model: Target, vocab_size: int, params: SamplingParams | None = None, noise: Noise | None = None
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.bind(params or SamplingParams(), noise or Noise())

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """Draft as this request samples."""
        self.params, self.noise = params, noise

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """A chain; shorter than ``budget`` where the draft's own context ends."""
        model = self.model
        length = min(budget, model.context - len(tokens))
        if length < 1:
            return EMPTY
        known = model.follow(tokens[:-1])
        if max(tokens[known:]) >= model.vocab_size:  # a padding row of the target's vocabulary: the draft has no such
            return EMPTY
        if len(tokens) - known > _FEED:
            model.prefill(tokens[known:-1])
            known = len(tokens) - 1

        def step(guess: int | None) -> NDArray[np.float32]:
            feed = np.array(tokens[known:] if guess is None else [guess], np.int64)  # [n]
            logits: NDArray[np.float32] = model.forward(feed).logits[-1]
            model.keep(range(len(feed)))
            return logits

        def best(guess: int | None) -> tuple[int, float]:
            assert isinstance(model, GreedyTarget)
            feed = np.array(tokens[known:] if guess is None else [guess], np.int64)  # [n]
            found = model.forward_best(feed).best
            assert found is not None
            model.keep(range(len(feed)))
            return int(found[0][-1]), float(found[1][-1])

        # the likeliest token may not be one of the draft's padding, which the target does not know
        direct = isinstance(model, GreedyTarget) and model.vocab_size <= self.vocab_size
        return draw_chain(step, tokens, length, self.vocab_size, self.params, self.noise, best=best if direct else None)

    def step_once(self) -> None:
        """One draft step, to be timed."""
        self.model.forward(np.zeros(1, np.int64))

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Nothing to learn: the next ``propose`` crops the slot to what was accepted."""


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> DraftModel:
    """Drafting by the bundle's draft model."""
    return DraftModel(parts.draft(), parts.target.vocab_size)
