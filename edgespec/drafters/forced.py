"""What a grammar forces comes next, whatever the model: guesses that cost nothing and mostly stand."""

from __future__ import annotations

import numpy as np

from edgespec.decoding.constraint import Constraint
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal


class Forced(Drafter):
    """Offers the tokens that a constraint leaves no choice about; they stand unless they can be written otherwise.

    Args:
        constraint: of the request.
    """

    name = "forced"
    cheap = True

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        found = self._constraint.forced(tokens, budget)
        return Proposal(np.array(found, np.int64)) if found else EMPTY
