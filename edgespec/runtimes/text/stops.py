"""Strings that end a text, looked for in time that does not grow with how many they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """Finds the first of several strings, empty ones left out; a place of the text costs a look by each length."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._known = {string for string in strings if string}
        self._sorted = sorted(self._known)
        self._lengths = sorted({len(string) for string in self._known})

    def find(self, text: str) -> tuple[int, str] | None:
        """Where the first one begins, and which it is; of several that begin there, the shortest."""
        for at in range(len(text) if self._known else 0):
            for length in self._lengths:
                if (piece := text[at : at + length]) in self._known:
                    return at, piece
        return None

    def beginning(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a proper prefix of a stop string."""
        longest = self._lengths[-1] if self._lengths else 0
        for length in range(min(len(text), longest - 1), 0, -1):
            tail = text[-length:]
            at = bisect_left(self._sorted, tail)
            if at < len(self._sorted) and self._sorted[at].startswith(tail):
                return length
        return 0
