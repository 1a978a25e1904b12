"""The target drafts for itself with less of its weights.

Sub-layers are left out (Draft & Verify, Zhang et al., arXiv 2309.08168), or only the high planes of int8 weights are
read: four bits of the same weights, as ML-SpecQD (arXiv 2503.13565) drafts with, but stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import DraftRequest, Proposal, Verdict
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import ChoosingTarget, Pass, SelfDraftTarget, SkipSet
from edgespec.drafters.draw import DrawingDrafter, draw_chain
from edgespec.drafters.registry import Parts
from edgespec.runtimes.files.manifest import MethodPart, SkipSetPart

# The paper's constants (its section 3.3 and its published configuration).
_START = 0.6  # threshold of the first round
_STEP = 0.01  # how far one verification may ask to move it
_WANTED = 0.9  # acceptance rate to steer to
_MATCHED_DECAY, _STOP_DECAY = 0.5, 0.9


class SelfSpec(DrawingDrafter):
    """Draws chains from the target itself; stops after a guess it is not sure of.

    Reads the full model's KV of the committed tokens, and the draft's own for the guesses; the verifying pass
    overwrites the latter.  No extra memory.  ``stop``: the threshold to start from.
    """

    name = "self-spec"
    gamma_max = 12  # longest chain, whatever the budget

    def __init__(self, target: SelfDraftTarget, skip: SkipSet, stop: float = _START) -> None:
        self.target, self.skip, self.vocab = target, skip, target.vocab_size
        self.stop = self._first_stop = stop
        self.matched = 0.0  # smoothed acceptance rate, the paper's m
        self._asked = 0

    def begin(self, request: DraftRequest) -> None:
        """Draft as this request samples.

        The threshold is carried across requests, except where that would make a seeded text depend on earlier ones:
        with rejection sampling the length of a draft decides which random numbers are used.
        """
        super().begin(request)
        if request.params.seeded_rejection:
            self.stop, self.matched = self._first_stop, 0.0

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Draw a chain that ends after the first guess below the threshold."""
        self._asked = min(budget, self.gamma_max)
        return draw_chain(self._steps(tokens), self.how(tokens), self._asked, self.stop, self._choices(tokens))

    def _steps(self, tokens: list[int]) -> Callable[[int | None], NDArray[np.float32]]:
        """Give what runs one draft step after the other: a guess (None at first) -> logits float32 [vocab] after it."""
        run = self._passes(tokens, self.target.forward_skipped)
        return lambda guess: run(guess).logits[-1]

    def _choices(self, tokens: list[int]) -> Callable[[int | None], tuple[int, float]] | None:
        """Do the same where the target chooses: a guess -> the likeliest token after it, and its probability."""
        if not getattr(self.target, "chooses", False):
            return None
        run = self._passes(tokens, cast(ChoosingTarget, self.target).forward_skipped_best)

        def choose(guess: int | None) -> tuple[int, float]:
            found = run(guess)
            assert found.best is not None
            assert found.chance is not None
            return int(found.best[0][-1]), float(found.chance[-1])

        return choose

    def _passes(
        self, tokens: list[int], forward: Callable[[NDArray[np.int64], int, SkipSet], Pass]
    ) -> Callable[[int | None], Pass]:
        offset, skip = count(), self.skip
        return lambda guess: forward(np.array([tokens[-1] if guess is None else guess], np.int64), next(offset), skip)

    def dry_step(self, first: bool = False) -> bool:
        if first:
            return False
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
    """Draft with the skip set that the export found."""
    return SelfSpec(parts.target, skip_set(part.skip or SkipSetPart()))


def skip_set(part: SkipSetPart) -> SkipSet:
    """Convert what a manifest says."""
    attention, mlp, *high = map(tuple, (part.attention, part.mlp, part.high_attention, part.high_mlp))
    return SkipSet(attention, mlp, high[0], high[1], part.high_head)
