"""Drafts from a text that the caller expects: an edited file is mostly unchanged (OpenAI's predicted outputs).

Drafting continues at the request's current place in the expected text.  If the texts differ, drafting stops until a few
new tokens in a row occur in the expected text again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.proposal import EMPTY, Proposal

_EQUAL = 3  # tokens in a row that say where the text is


class Predicted(Drafter):
    """Offers the ``expected`` token ids after the first ``prompt`` tokens."""

    name = "predicted"
    cheap = True

    def __init__(self, expected: Sequence[int], prompt: int) -> None:
        self._expected, self._prompt, self._read = np.array(expected, np.int64), prompt, prompt
        self._at: int | None = 0  # index of the next draft token; None = not known
        self._last = 0  # where it was last

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        for token in tokens[self._read :]:
            if self._at is not None and self._at < len(self._expected) and self._expected[self._at] == token:
                self._at = self._last = self._at + 1
            else:
                self._at = None
        self._read = len(tokens)
        if self._at is None and self._read - self._prompt >= _EQUAL:
            self._at = self._found(tokens[-_EQUAL:])
            self._last = self._last if self._at is None else self._at
        guesses = self._expected[:0] if self._at is None else self._expected[self._at : self._at + budget]
        return Proposal(guesses.copy()) if len(guesses) else EMPTY

    def _found(self, last: list[int]) -> int | None:
        """Find where these tokens end in the expected text: after the last place, or else the first occurrence."""
        starts = len(self._expected) - _EQUAL + 1
        if starts < 1:
            return None
        equal = [self._expected[at : at + starts] == token for at, token in enumerate(last)]
        ends = np.flatnonzero(np.logical_and.reduce(equal)) + _EQUAL
        if not len(ends):
            return None
        at = int(np.searchsorted(ends, self._last))
        return int(ends[at] if at < len(ends) else ends[0])
