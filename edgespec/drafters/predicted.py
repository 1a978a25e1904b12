"""A text that the caller expects, as guesses: an edited file is mostly what it was (OpenAI's predicted outputs).

Guesses go on from where the request's text has got to in the expected one.  Where the two part, there are none until a
few new tokens in a row are found in it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.decoding.drafter import EMPTY, Drafter, Proposal

_EQUAL = 3  # tokens in a row that say where the text is


class Predicted(Drafter):
    """Offers what is expected, token ids, behind so many tokens of the ``prompt``."""

    name = "predicted"
    cheap = True

    def __init__(self, expected: Sequence[int], prompt: int) -> None:
        self._expected, self._prompt, self._read = list(expected), prompt, prompt
        self._at: int | None = 0  # of the guess that comes next; None = nobody knows
        self._last = 0  # where it was last
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(_EQUAL, len(self._expected) + 1):
            self._places.setdefault(tuple(self._expected[end - _EQUAL : end]), []).append(end)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        for token in tokens[self._read :]:
            if self._at is not None and self._expected[self._at : self._at + 1] == [token]:
                self._at = self._last = self._at + 1
            else:
                self._at = None
        self._read = len(tokens)
        if self._at is None and self._read - self._prompt >= _EQUAL:
            found = self._places.get(tuple(tokens[-_EQUAL:]), [])
            self._at = next((end for end in found if end >= self._last), found[0] if found else None)
            self._last = self._last if self._at is None else self._at
        guesses = [] if self._at is None else self._expected[self._at : self._at + budget]
        return Proposal(np.array(guesses, np.int64)) if guesses else EMPTY
