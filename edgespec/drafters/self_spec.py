"""The target drafts for itself with less of its weights.

Sub-layers are left out (Draft & Verify, Zhang et al., arXiv 2309.08168), or only the high planes of int8 weights are
read: four bits of the same weights, as ML-SpecQD (arXiv 2503.13565) drafts with, but stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import count

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import DRAFT_BEST, Output, Pass, SkipSet, Target
from edgespec.drafters.registry import Parts
from edgespec.drafters.sampling_drafts import DrawingDrafter, Weak, draw_chain, spread
from edgespec.formulas.confidence import Confidence
from edgespec.runtimes.files.manifest import MethodPart, SkipSetPart


class SelfSpec(DrawingDrafter):
    """Draws chains from the target itself; under control, stops after a guess that makes a further one not worth it.

    Reads the full model's KV of the committed tokens, and the draft's own for the guesses; the verifying pass
    overwrites the latter.  No extra memory.  ``confidence``: what is known of its guesses.
    """

    name = "self-spec"
    stops = True
    gamma_max = 12  # longest chain, for any budget

    def __init__(self, target: Target, skip: SkipSet, confidence: Confidence | None = None) -> None:
        self.target, self.skip, self.vocab = target, skip, target.vocab_size
        self.confidence = confidence or Confidence()
        self._first_confidence = deepcopy(self.confidence)
        self._sure: list[float] = []  # draft probabilities of the last guesses

    def begin(self, request: DraftRequest) -> None:
        """Draft as this request samples.

        Learned values are carried across requests, unless that would make a seeded text depend on earlier ones: with
        rejection sampling the length of a draft decides which random numbers are used.
        """
        super().begin(request)
        if request.params.seeded_rejection:
            self.confidence = deepcopy(self._first_confidence)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return self._draw(tokens, budget, self._weak(None))

    def propose_until(self, tokens: list[int], budget: int, least_gain: Callable[[int], float]) -> Proposal:
        return self._draw(tokens, budget, self._weak(least_gain))

    def _draw(self, tokens: list[int], budget: int, weak: Weak | None) -> Proposal:
        """Sample a chain that ends where one more draft token is not worth its cost."""
        length = min(budget, self.gamma_max)
        return draw_chain(self._steps(tokens), self.how(tokens), length, weak, self._choices(tokens))

    def _weak(self, least: Callable[[int], float] | None) -> Weak | None:
        """Make the check, after each draft token, that the next one is not worth its cost; None = no required gain."""
        self._sure, reach, confidence = [], 1.0, self.confidence
        if least is None:
            return None

        def weak(probability: float) -> bool:
            nonlocal reach
            self._sure.append(probability)
            reach *= confidence.chance(probability)
            return reach * confidence.mean < least(len(self._sure))

        return weak

    def _steps(self, tokens: list[int]) -> Callable[[int | None], NDArray[np.float32]]:
        """Give what runs one draft step after the other: a guess (None at first) -> logits float32 [vocab] after it."""
        run = self._passes(tokens, False)
        if not self.skip.head_rows or self.params.plain_greedy:
            return lambda guess: run(guess).logits[-1]
        rows = self.skip.head_rows  # what changes logits may name any token
        return lambda guess: spread(run(guess).logits[-1:, :rows], slice(0, rows), self.vocab)[0]

    def _choices(self, tokens: list[int]) -> Callable[[int | None], tuple[int, float]] | None:
        """Do the same where the target chooses: a guess -> the likeliest token after it, and its probability."""
        if DRAFT_BEST not in self.target.can:
            return None
        run = self._passes(tokens, True)

        def choose(guess: int | None) -> tuple[int, float]:
            found = run(guess)
            assert found.best is not None
            assert found.chance is not None
            return int(found.best[0][-1]), float(found.chance[-1])

        return choose

    def _passes(self, tokens: list[int], best: bool) -> Callable[[int | None], Output]:
        offset = count()

        def run(guess: int | None) -> Output:
            return self._step(tokens[-1] if guess is None else guess, next(offset), best)

        return run

    def _step(self, token: int, offset: int, best: bool) -> Output:
        """Run a draft step, ``offset`` rows after the text."""
        ids = np.array([token], np.int64)
        return self.target.run(Pass(ids, None, int(best), draft=True, offset=offset, skip=self.skip))

    def benchmark_step(self, first: bool = False) -> bool:
        if first:
            return False
        self._step(0, 0, False)
        return True

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        """Count which guesses were right, by how sure they were."""
        right, tested = len(verdict.path), proposal.tested(verdict.path)
        for depth, probability in enumerate(self._sure[:tested]):
            self.confidence.learn(probability, depth < right)


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> SelfSpec:
    """Draft with the skip set that the export found."""
    return SelfSpec(parts.target, skip_set(part.skip or SkipSetPart()), known_confidence(part))


def known_confidence(part: MethodPart) -> Confidence:
    """Read what the export measured of a draft's guesses; else assume it."""
    measured = part.measured[0] if part.measured else None
    return Confidence() if measured is None else Confidence(measured.confidence, measured.acceptance[0])


def skip_set(part: SkipSetPart) -> SkipSet:
    """Convert what a manifest says."""
    attention, mlp, *high = map(tuple, (part.attention, part.mlp, part.high_attention, part.high_mlp))
    return SkipSet(attention, mlp, high[0], high[1], part.high_head, part.head_rows)
