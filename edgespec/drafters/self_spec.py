"""The target drafts for itself with some sub-layers left out: Draft & Verify (Zhang et al., arXiv 2309.08168)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import ChoosingTarget, Pass, SelfDraftTarget, SkipSet
from edgespec.drafters.drawing.chain import draw_chain
from edgespec.drafters.parts import Parts
from edgespec.runtimes.files.manifest import MethodPart, SkipSetPart

# The paper's constants (its section 3.3 and its published configuration).
_START = 0.6  # threshold of the first round
_STEP = 0.01  # how far one verification may ask to move it
_WANTED = 0.9  # acceptance rate to steer to
_MATCHED_DECAY, _STOP_DECAY = 0.5, 0.9


class SelfSpec(Drafter):
    """Draws chains from the target itself; stops after a guess it is not sure of.

    Reads the full model's KV of the committed tokens, and the draft's own for the guesses; the verifying pass
    overwrites the latter.  No extra memory.

    Args:
        target: the model, whose sub-layers can be left out.
        skip: which.
        params: how requests sample; the loop sets it for each (``bind``).
        noise: likewise.
        gamma_max: longest chain, whatever the budget.
        stop: threshold to start from: draft no further after a guess of a smaller draft probability.
    """

    name = "self-spec"

    def __init__(
        self,
        target: SelfDraftTarget,
        skip: SkipSet,
        params: SamplingParams | None = None,
        noise: Noise | None = None,
        gamma_max: int = 12,
        stop: float = _START,
    ) -> None:
        self.target = target
        self.skip = skip
        self.gamma_max = gamma_max
        self.stop = self._first_stop = stop
        self.matched = 0.0  # smoothed acceptance rate, the paper's m
        self._asked = 0
        self.bind(params or SamplingParams(), noise or Noise())

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """Draft as this request samples.

        The threshold is carried across requests, except where that would make a seeded text depend on earlier ones:
        with rejection sampling the length of a draft decides which random numbers are used.
        """
        self.params, self.noise = params, noise
        if params.seeded_rejection:
            self.stop, self.matched = self._first_stop, 0.0

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """A chain that ends after the first guess below the threshold."""
        self._asked = min(budget, self.gamma_max)
        step, vocab = self._steps(tokens), self.target.vocab_size
        sure = self._choices(tokens) if getattr(self.target, "chooses", False) else None
        return draw_chain(step, tokens, self._asked, vocab, self.params, self.noise, self.stop, sure=sure)

    def _choices(self, tokens: list[int]) -> Callable[[int | None], tuple[int, float]]:
        """The same where the target chooses: a guess -> the likeliest token after it, and its probability."""
        target, skip = cast(ChoosingTarget, self.target), self.skip
        offset = 0

        def step(guess: int | None) -> tuple[int, float]:
            nonlocal offset
            feed = np.array([tokens[-1] if guess is None else guess], np.int64)  # [1]
            found = target.forward_skipped_best(feed, offset, skip)
            assert found.best is not None
            assert found.chance is not None
            offset += 1
            return int(found.best[0][-1]), float(found.chance[-1])

        return step

    def _steps(self, tokens: list[int]) -> Callable[[int | None], NDArray[np.float32]]:
        """What runs one draft step after the other: a guess (None at first) -> logits float32 [vocab] after it."""
        target, skip = self.target, self.skip
        offset = 0

        def step(guess: int | None) -> NDArray[np.float32]:
            nonlocal offset
            feed = np.array([tokens[-1] if guess is None else guess], np.int64)  # [1]
            logits: NDArray[np.float32] = target.forward_skipped(feed, offset, skip).logits[-1]
            offset += 1
            return logits

        return step

    def step_once(self) -> bool:
        """One pass without the skip set."""
        self.target.forward_skipped(np.zeros(1, np.int64), 0, self.skip)
        return True

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Move the threshold after a verification (the paper's equation for the adaptive exit)."""
        drafted = len(proposal)
        if not drafted:
            return
        rate = len(verdict.path) / drafted
        self.matched = _MATCHED_DECAY * self.matched + (1 - _MATCHED_DECAY) * rate
        wanted = self.stop
        if self.matched < _WANTED:
            wanted += _STEP
        elif drafted < self._asked:  # else the length, not the threshold, ended the draft
            wanted -= _STEP
        self.stop = min(max(_STOP_DECAY * self.stop + (1 - _STOP_DECAY) * wanted, 0.0), 1.0)


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> SelfSpec:
    """Drafting with the skip set that the export found."""
    skip = part.skip or SkipSetPart()
    return SelfSpec(parts.target, SkipSet(tuple(skip.attention), tuple(skip.mlp)))
