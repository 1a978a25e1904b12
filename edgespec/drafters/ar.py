"""Plain decoding: the baseline and the fall-back of every method."""

from __future__ import annotations

from edgespec.proposal import EMPTY, Proposal, Verdict
from edgespec.runtimes.target import Pass


class Plain:
    """Guesses nothing, so that every round is one token."""

    name = "ar"
    cheap = True

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Nothing to learn."""
