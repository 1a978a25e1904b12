"""A caller's own proposer: any object that can say what might come next."""

from __future__ import annotations

from dataclasses import replace
from operator import index

import numpy as np

from edgespec.decoding.drafter import Drafter, Proposer
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass


class Custom(Drafter):
    """A drafter around a caller's proposer.  Whatever it returns is checked: nonsense ends it, not the text.

    Args:
        proposer: the object.
        vocab: tokens that exist.
    """

    def __init__(self, proposer: Proposer, vocab: int) -> None:
        self._own, self.vocab = proposer, vocab
        self.name = proposer_name(proposer)
        self.cheap = bool(getattr(proposer, "cheap", True))
        self._observe = getattr(proposer, "observe", None)

    @property
    def wants_hidden(self) -> bool:
        """If it says so."""
        return bool(getattr(self._own, "wants_hidden", False))

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """How this request samples, for a proposer that wants to know."""
        if bind := getattr(self._own, "bind", None):
            bind(params, noise)

    def begin(self, tokens: list[int]) -> None:
        """The prompt, for a proposer that wants it."""
        if begin := getattr(self._own, "begin", None):
            begin(list(tokens))

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The proposer's guesses.

        Raises:
            TypeError, ValueError: they are not guesses.
        """
        found = self._own.propose(list(tokens), budget)
        if found is None:
            return EMPTY
        if isinstance(found, Proposal):
            found.check(self.vocab)  # before control cuts it
            return replace(found, resume=None).truncated(budget)
        if isinstance(found, (str, bytes)):
            raise TypeError("expected token ids or a Proposal, got text")
        guesses = [index(token) for token in found][:budget]
        return Proposal(np.array(guesses, np.int64)) if guesses else EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Pass the round on."""
        if self._observe is not None:
            self._observe(proposal, verdict, output)


def proposer_name(proposer: Proposer) -> str:
    """What a result calls it."""
    return str(getattr(proposer, "name", type(proposer).__name__))
