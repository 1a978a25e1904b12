"""Plain decoding: the baseline and the fall-back of every method."""

from __future__ import annotations

from edgespec.drafters.parts import Parts
from edgespec.proposal import EMPTY, Proposal, Verdict
from edgespec.runtimes.manifest import MethodPart
from edgespec.runtimes.target import Pass
from edgespec.settings import DraftOptions


class Plain:
    """Guesses nothing, so that every round is one token."""

    name = "ar"
    cheap = True

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Nothing to learn."""


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Plain:
    """Plain decoding of a bundle."""
    return Plain()
