"""Tokens of a text that grows at its end, of which only the last part is tokenized again."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG, MARGIN, BEFORE = 128, 32, 24  # characters
_TRIED = 6  # places where a text may be cut that are tried each time


Divides = Callable[[str, str], bool]
"""Whether tokens never cross the place between two characters, and are the same with other text around it."""


def divides(tokenizer: Tokenizer) -> Divides:
    """Find where a tokenizer's texts may be cut.

    If it splits texts before it looks for tokens, that is after a word or number, before a space, a line's end or
    punctuation.  If not, it is before a space or a line's end, after a character that no token has there.
    """
    if tokenizer.pre_tokenizer is not None:
        return _ends_word
    names = "\0".join(tokenizer.get_vocab(with_added_tokens=True)).replace("\u2581", " ")
    crossed = set(re.findall(r"(?=([^\0][ \n]))", names))
    return lambda before, after: after in " \n" and before not in " \n" and before + after not in crossed


def _ends_word(before: str, after: str) -> bool:
    kind = unicodedata.category(after)[0]
    ends = kind == "Z" or after == "\n" or (kind == "P" and after not in "'\u2019")  # of no contraction
    return ends and unicodedata.category(before)[0] in "LN"


class GrowingTokens:
    """Keeps the tokens of a text equal to those of the whole, while it grows.

    A window at the text's end is tokenized again.  It begins some characters before a cut, and the tokens after the
    cut are replaced.  A cut is at least ``MARGIN`` characters before the text's end, where ``divides`` allows one, and
    where the tokens after it are the same with less text before it.

    Args:
        encode: tokenizes a text.
        divides: see there.
        tokens: the list that the tokens are appended to; what it holds stays.
    """

    def __init__(self, encode: Callable[[str], list[int]], divides: Divides, tokens: list[int]) -> None:
        self._encode, self._divides, self.tokens = encode, divides, tokens
        self._first = self._fixed = len(tokens)  # where the text's tokens begin, and those that may change
        self._before: list[str] = []  # the text before the window
        self._window, self._cut = "", 0  # the last characters, and how many of them are before the cut
        self._head: list[int] = []  # tokens of these alone

    def append(self, text: str) -> None:
        """Append a text."""
        if not text:
            return
        self._window += text
        found, head = self._encode(self._window), len(self._head)
        if found[:head] != self._head:  # not a cut after all: the whole text is tokenized again
            self._window, self._cut, self._head = "".join((*self._before, self._window)), 0, []
            self._before, self._fixed, head = [], self._first, 0
            found = self._encode(self._window)
        self.tokens[self._fixed :] = found[head:]
        if len(self._window) - self._cut > LONG:
            self._advance()

    def _advance(self) -> None:
        """Move the cut towards the end, if there is a place for it."""
        window, tokens, tried = self._window, self.tokens, 0
        for cut in range(len(window) - MARGIN, max(self._cut, BEFORE), -1):
            if not self._divides(window[cut - 1], window[cut]):
                continue
            start = cut - BEFORE
            while start and not self._divides(window[start - 1], window[start]):
                start -= 1
            head, both = self._encode(window[start:cut]), self._encode(window[start:])
            fixed = len(tokens) - len(both) + len(head)
            if fixed >= self._fixed and both[: len(head)] == head and tokens[fixed:] == both[len(head) :]:
                self._before.append(window[:start])
                self._window, self._cut, self._head, self._fixed = window[start:], cut - start, head, fixed
                return
            if (tried := tried + 1) == _TRIED:
                return
