"""Embedding spans: rows of a text that replace token embeddings, such as those of an image, and their token ids.

Row i of a span is the token ``first + i``, and the span's digest decides ``first``.  Texts with the same images
therefore have the same ids, so data cached by ids is also valid for the images.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.text import INSERTED
from edgespec.errors import InvalidRequest

ROWS_BITS = 14
MOST_ROWS = 1 << ROWS_BITS
KEPT_BYTES = 128 << 20  # of rows that no request uses
Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


@dataclass(eq=False)
class EmbeddingSpan:
    """Embeddings that replace tokens of a text."""

    digest: bytes  # of the rows' source, and of the model that computed them
    rows: Rows  # float32 [R, columns], the first ones as wide as the residual stream, the others added to it further on
    blocks: tuple[int, ...]  # rows of each part that see each other, R in all
    # int64 [2, R], line and column of each row, where rows turn by three positions; None = by one
    grid: Ids | None = None
    users: int = field(default=0, repr=False)  # requests that have it in their text
    source: Any = field(default=None, repr=False)  # source of the rows, if a draft computes its own rows from it
    own: EmbeddingSpan | None = field(default=None, repr=False)  # those rows of the draft's

    @property
    def first(self) -> int:
        """The token of the first row."""
        return INSERTED | int.from_bytes(self.digest[:6], "big") << ROWS_BITS

    @property
    def tokens(self) -> list[int]:
        """The tokens of all rows."""
        return list(range(self.first, self.first + len(self.rows)))

    @property
    def spread(self) -> int:
        """Number of positions that the span takes."""
        return len(self.rows) if self.grid is None else int(self.grid.max()) + 1

    def end_of_block(self, row: int) -> int:
        """Find the row after the part that contains a row."""
        ends = np.cumsum(self.blocks)
        return int(ends[np.searchsorted(ends, row, side="right")])


class EmbeddingSpanCache:
    """Embedding spans for one model's texts: all that requests use, and some recently used ones.

    Attributes:
        instead: the token that a draft reads in their place, if it reads only text.
    """

    def __init__(self) -> None:
        self.instead = 0
        self._lock = threading.Lock()
        self._kept: dict[int, EmbeddingSpan] = {}  # by the first token; the most recently used one is last

    def hold(self, items: Iterable[EmbeddingSpan]) -> None:
        """Keep these until each is released as often."""
        with self._lock:
            for item in items:
                known = self._kept.pop(item.first, item)
                if known.digest != item.digest:
                    self._kept[item.first] = known
                    raise InvalidRequest("two images have the same number", "change one of them, by a pixel")
                self._kept[item.first] = known
                known.users += 1

    def let_go(self, items: Iterable[EmbeddingSpan]) -> None:
        """Need these no more; the ones used last stay, as far as they are small."""
        with self._lock:
            for item in items:
                if (known := self._kept.get(item.first)) is not None:
                    known.users -= 1
            idle = [item for item in self._kept.values() if not item.users]
            size = sum(item.rows.nbytes for item in idle)
            for item in idle:
                if size <= KEPT_BYTES:
                    break
                size -= item.rows.nbytes
                del self._kept[item.first]

    def find(self, token: int) -> tuple[EmbeddingSpan, int]:
        """Find the span and the row that a token id stands for.

        Raises:
            InvalidRequest: no such span is kept.
        """
        first, row = token >> ROWS_BITS << ROWS_BITS, token & (MOST_ROWS - 1)
        with self._lock:
            found = self._kept.get(first)
        if found is None or row >= len(found.rows):
            raise InvalidRequest("the text has rows of an image that is not there", "give the image with the prompt")
        return found, row

    def known(self, digest: bytes) -> EmbeddingSpan | None:
        """Find the span with a digest; None = not kept."""
        with self._lock:
            return next((item for item in self._kept.values() if item.digest == digest), None)

    def runs(self, tokens: Ids) -> list[tuple[int, EmbeddingSpan, int, int]]:
        """Find the rows among tokens [n] -> (where they begin, of what, which row is first, how many)."""
        at = np.flatnonzero(tokens >= INSERTED)
        cuts = np.flatnonzero((np.diff(at) != 1) | (np.diff(tokens[at]) != 1)) + 1
        parts = [part for part in np.split(at, cuts) if len(part)]
        return [(int(part[0]), *self.find(int(tokens[part[0]])), len(part)) for part in parts]

    def block_end(self, tokens: Sequence[int], stop: int) -> int:
        """Move the end of a piece of a text to after the rows that see each other, if it would cut them."""
        if stop < len(tokens) and tokens[stop] >= INSERTED:
            item, row = self.find(tokens[stop])
            if row not in (0, *np.cumsum(item.blocks)):
                return stop + item.end_of_block(row) - row
        return stop


class DraftEmbeddingSpans(EmbeddingSpanCache):
    """Rows of a draft's own for what texts of its target have in them.

    Args:
        of: those of the target.
        make: the draft's rows, as many, of an item of the target's.
    """

    def __init__(self, of: EmbeddingSpanCache, make: Callable[[EmbeddingSpan], EmbeddingSpan]) -> None:
        super().__init__()
        self._of, self._make = of, make

    def find(self, token: int) -> tuple[EmbeddingSpan, int]:
        item, row = self._of.find(token)
        if item.own is None:
            item.own = self._make(item)
        return item.own, row


class MRopeOffsets:
    """Differences between the rotary positions of a text's rows and their indices (M-RoPE, arXiv 2409.12191)."""

    def __init__(self, rows: EmbeddingSpanCache) -> None:
        self._rows = rows
        self._known = 0  # tokens that were looked at
        self._behind: list[tuple[int, int]] = []  # where an image ends, and what is to be taken off from there on

    def crop(self, length: int) -> None:
        """Forget the tokens after the first ``length``."""
        self._known = min(self._known, length)
        while self._behind and self._behind[-1][0] > length:
            self._behind.pop()

    def offsets(self, text: Sequence[int], past: int, tokens: Ids) -> Ids:
        """Compute what is to be added to places, for three positions of each row -> int64 [3, n].

        Args:
            text: the tokens before, at least those that are committed.
            past: places before the first row; guesses between ``text`` and it are tokens.
            tokens: int64 [n] of the rows.
        """
        self.crop(end := min(past, len(text)))
        if self._known < end:
            self._note(np.array(text[self._known : end], np.int64), self._known)
            self._known = end
        found = np.full((3, len(tokens)), -self._off(), np.int64)
        if not len(tokens) or int(tokens.max()) < INSERTED:
            return found
        off = self._off()
        for start, item, row, count in self._rows.runs(tokens):
            assert item.grid is not None
            rows = np.arange(row, row + count)
            found[:, start : start + count] = -off - rows
            found[1:, start : start + count] += item.grid[:, rows]
            if row + count == len(item.rows):
                off += len(item.rows) - item.spread
                found[:, start + count :] = -off
        return found

    def behind(self, lengths: Ids) -> Ids:  # [n]
        """Compute the same for the token after each of the given prefix lengths, [n]."""
        ends, offs = [0, *(end for end, _ in self._behind)], np.array([0, *(off for _, off in self._behind)])
        return -offs[np.searchsorted(ends, lengths, side="right") - 1]

    def _off(self) -> int:
        return self._behind[-1][1] if self._behind else 0

    def _note(self, tokens: Ids, past: int) -> None:
        if len(tokens) and int(tokens.max()) >= INSERTED:
            for start, item, row, count in self._rows.runs(tokens):
                if row + count == len(item.rows):
                    end = past + start + count
                    self._behind.append((end, self._off() + len(item.rows) - item.spread))
