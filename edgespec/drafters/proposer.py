"""A caller's own proposer: any object that can say what might come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Protocol

import numpy as np

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass


class Proposer(Protocol):
    """What ``engine.generate(..., proposer=...)`` takes.

    It may also have: ``name`` (else its class's); ``cheap = False``, if it is dear, so that it is asked only where its
    guesses pay; ``begin(tokens)``, called with the prompt; ``observe(proposal, verdict, output)``, called after every
    round, and ``bind(params, noise)``, as for any drafter (``edgespec.decoding.drafter``).
    """

    def propose(self, tokens: list[int], budget: int) -> Sequence[int] | Proposal | None:
        """Guess what follows.

        Args:
            tokens: prompt and text so far, a copy.
            budget: most guesses, >= 1; more are cut.

        Returns:
            Token ids, in order; none to pass.  Or a ``Proposal``, for trees and for guesses drawn from a distribution;
            the text has the model's distribution only if they were drawn from the ``probs`` it reports.
        """
        ...


class Custom:
    """A drafter around a caller's proposer.  Whatever it returns is checked: nonsense ends it, not the text.

    Args:
        proposer: the object.
        vocab: tokens that exist.

    Attributes:
        drew: whether it reported a distribution in this request.
        trees: whether it offered a tree.
    """

    def __init__(self, proposer: Proposer, vocab: int) -> None:
        self.proposer, self.vocab = proposer, vocab
        self.name = proposer_name(proposer)
        self.cheap = bool(getattr(proposer, "cheap", True))
        self.drew = self.trees = False
        self._observe = getattr(proposer, "observe", None)

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """How this request samples, for a proposer that wants to know."""
        self.drew = self.trees = False
        if bind := getattr(self.proposer, "bind", None):
            bind(params, noise)

    def begin(self, tokens: list[int]) -> None:
        """The prompt, for a proposer that wants it."""
        if begin := getattr(self.proposer, "begin", None):
            begin(list(tokens))

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The proposer's guesses.

        Raises:
            TypeError, ValueError: they are not guesses.
        """
        found = self.proposer.propose(list(tokens), budget)
        if found is None:
            return EMPTY
        if isinstance(found, Proposal):
            return self._checked(replace(found, resume=None)).truncated(budget)
        if isinstance(found, (str, bytes)):
            raise TypeError("expected token ids or a Proposal, got text")
        guesses = [index(token) for token in found][:budget]
        return Proposal(np.array(guesses, np.int64)) if guesses else EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Pass the round on."""
        if self._observe is not None:
            self._observe(proposal, verdict, output)

    def _checked(self, proposal: Proposal) -> Proposal:
        """What the loop does not check before it cuts a tree.

        Raises:
            ValueError: the tree or its distributions are none.
        """
        count, parents, probs = len(proposal), proposal.parents, proposal.probs
        if parents is not None and (parents.shape != (count,) or (parents >= np.arange(count)).any()):
            raise ValueError("expected parents before their children")
        self.trees = self.trees or parents is not None
        if probs is None or not count:
            return proposal
        self.drew = True
        if probs.shape != (count, self.vocab) or (probs < 0).any() or not np.allclose(probs.sum(1), 1, atol=1e-3):
            raise ValueError(f"expected probs of shape {(count, self.vocab)}, every row a distribution")
        return proposal


def proposer_name(proposer: Proposer) -> str:
    """What a result calls it."""
    return str(getattr(proposer, "name", type(proposer).__name__))
