"""Drafters that need no model: none at all, and what a grammar forces."""

from __future__ import annotations

import numpy as np

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import Constraint
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.registry import Parts
from edgespec.runtimes.files.manifest import MethodPart


class Plain(Drafter):
    """Plain decoding, the baseline and the fall-back of every method: it guesses nothing."""

    name = "ar"
    cheap = True

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return EMPTY


class Forced(Drafter):
    """Offers the tokens that a constraint leaves no choice about; only another spelling of the text rejects them."""

    name = "forced"
    cheap = True

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        found = self._constraint.forced(tokens, budget)
        return Proposal(np.array(found, np.int64)) if found else EMPTY


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Plain:
    """Build plain decoding."""
    return Plain()
