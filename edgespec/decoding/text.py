"""A request's committed tokens, and the prefix of a row: a text with draft tokens after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

INSERTED = 1 << 62
"""Token ids from here on name embeddings of other inputs, such as an image; they are never drafted or sampled."""


class Text(list[int]):
    """Committed tokens.  The list only grows, so that what was found out of its beginning stays true."""

    __slots__ = ("_different", "_ids", "_read")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(tokens)
        self._different: set[int] = set()
        self._ids = np.empty(64, np.int64)  # [at least as many]: the same, in the order of coming
        self._read = 0  # tokens that are in them

    def seen(self) -> NDArray[np.int64]:  # [k]
        """Every different token once; a view.  Only tokens that were appended since the last call are scanned."""
        if self._read < len(self):
            before = len(self._different)
            new = [token for token in dict.fromkeys(self[self._read :]) if token not in self._different]
            self._different.update(new)
            count = before + len(new)
            if count > len(self._ids):
                self._ids = np.concatenate((self._ids[:before], np.empty(2 * count - before, np.int64)))
            self._ids[before:count] = new
            self._read = len(self)
        return self._ids[: len(self._different)]

    def has(self, token: int) -> bool:
        """Whether the token is in it."""
        self.seen()
        return token in self._different


class Prefix(Sequence[int]):
    """The tokens before a row: a text and a path of guesses; neither is copied, so that both may grow."""

    __slots__ = ("path", "text")

    def __init__(self, text: Sequence[int], path: Sequence[int]) -> None:
        self.text, self.path = text, path

    def __len__(self) -> int:
        return len(self.text) + len(self.path)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        known = len(self.text)
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step == 1:
                return [*self.text[start:stop], *self.path[max(start - known, 0) : max(stop - known, 0)]]
            return [self[i] for i in range(start, stop, step)]
        at = at + len(self) if at < 0 else at
        return self.text[at] if at < known else self.path[at - known]


def different(prefix: Sequence[int]) -> list[NDArray[np.int64]]:
    """Collect the different tokens of a prefix in arrays [k] that have none in common.

    For a ``Text`` of any length only new tokens are scanned.
    """
    text, path = (prefix.text, prefix.path) if isinstance(prefix, Prefix) else (prefix, ())
    if not isinstance(text, Text):
        return [np.fromiter({*text, *path}, np.int64)]
    return [text.seen(), np.fromiter({token for token in path if not text.has(token)}, np.int64)]
