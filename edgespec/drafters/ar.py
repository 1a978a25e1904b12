"""Plain decoding: the baseline and the fall-back of every method."""

from __future__ import annotations

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.parts import Parts
from edgespec.runtimes.files.manifest import MethodPart


class Plain(Drafter):
    """Guesses nothing, so that every round is one token."""

    name = "ar"
    cheap = True

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return EMPTY


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Plain:
    """Plain decoding of a bundle."""
    return Plain()
