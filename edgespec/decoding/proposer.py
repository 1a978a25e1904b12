"""A caller's object that guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.decoding.proposal import Proposal


class Proposer(Protocol):
    """The argument ``proposer`` of ``engine.generate``.

    It may also have: ``name`` (else its class's); ``cheap = False``, if it is expensive, so that it is asked only where
    its guesses help; ``wants_hidden = True``, if ``observe`` needs ``output.hidden`` (None still where a graph cannot
    say hidden states); ``bind(params, noise)``, called with how a request samples, ``begin(tokens)``, called with the
    prompt, and ``observe(proposal, verdict, output)``, called after every round.
    """

    def propose(self, tokens: list[int], budget: int) -> Sequence[int] | Proposal | None:
        """Guess what follows ``tokens``, a copy of prompt and text so far; guesses beyond ``budget`` >= 1 are cut.

        Returns token ids, in order, none to pass; or a ``Proposal``, for trees and for guesses sampled from a
        distribution: the text has the model's distribution only if they were sampled from the ``probs`` it reports.
        """
