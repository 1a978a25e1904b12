"""Guess from a fixed book of phrases: once the text has begun one, the rest of it is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.registry import Method, Parts
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.text.codec import TextCodec

BOOK = ("My lord, I will not be", "KING RICHARD III:\nWhat, ", "DUKE OF YORK:\nI will not", "First Citizen:\n")


class Phrases(Drafter):
    """Guesses the rest of a phrase that the text has begun; of several, the one that the text has most of.

    Args:
        book: the tokens of each phrase.
    """

    name = "phrases"
    cheap = True

    def __init__(self, book: Sequence[list[int]]) -> None:
        self.book = book

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Return a chain of at most ``budget`` guesses."""
        found: tuple[int, list[int]] = (0, [])
        for phrase in self.book:
            for begun in range(len(phrase) - 1, found[0], -1):
                if tokens[-begun:] == phrase[:begun]:
                    found = begun, phrase[begun : begun + budget]
                    break
        begun, rest = found
        return Proposal(np.array(rest, np.int64), bucket=begun) if rest else EMPTY


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Phrases:
    """Build the drafter of a bundle: its tokenizer cuts the phrases."""
    codec = TextCodec(parts.bundle)
    return Phrases([codec.encode(phrase) for phrase in BOOK])


METHOD = Method("phrases of a fixed book", "edgespec_phrases:build", gamma=8)
