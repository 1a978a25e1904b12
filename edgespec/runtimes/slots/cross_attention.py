"""Cross-attention caches: keys and values of an encoder's output, computed once per source.

A separate pass fills a cache, and it is never written again.  Slots refer to it.  It stays for the next request with
the same source until another source needs its place.  Which source is where, and who reads it, is kept by the native
library (native/sources.h).
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.kv import memory_format
from edgespec.runtimes.slots.handles import ADDRESS, NUMBER, Functions
from edgespec.runtimes.slots.shared import Bound, Model, own_pages

_SIGNATURES: dict[str, tuple[Any, ...]] = {  # the result, and the arguments after the handle
    "move": (NUMBER, ADDRESS, NUMBER),
    "find": (NUMBER, ADDRESS, NUMBER),
    "take": (NUMBER, ADDRESS, NUMBER, NUMBER),
    "filled": (None, NUMBER),
    "drop": (None, NUMBER),
    "hold": (None, NUMBER),
    "release": (None, NUMBER),
    "shrink": (NUMBER, NUMBER),
    "rows": (NUMBER, NUMBER),
    "close": (None,),
}


@cache
def _functions() -> Functions:
    return Functions("sources", _SIGNATURES, 2)


@dataclass(frozen=True)
class CrossAttentionCache:
    """Keys and values of one source, for all layers of one model."""

    digest: bytes  # of the source and its encoder: equal digests mean equal caches
    rows: int  # of the encoder's output that it was computed from
    number: int  # among those of ``of``
    of: CrossAttentionPool  # the pool that holds it


class CrossAttentionPool:
    """The cross-attention caches of one model, in one array that all its slots read.

    Address space for all of them is reserved at once, as pages that are never written use no memory.  If the system
    does not support that, the array grows by copying.  A short source uses only the pages that it fills.

    Args:
        model: whose passes read them: a decoder with a ``source``.
        most: how many there may be at a time: one for each slot with a different source, and those to keep.

    Attributes:
        bound: uint8 [count, bytes], the input of passes; replaced after it has grown.
    """

    def __init__(self, model: Model, most: int = 4) -> None:
        source = model.part.source
        if source is None or most < 1:
            raise InvalidRequest(f"{most} memories: expected at least one, and a model that attends over a source")
        self.model, self.most, self.longest = model, most, source.max_rows
        self._lock = threading.Lock()  # of growing
        self._format = memory_format(model.kv)
        self._each = self._format.nbytes(model.facts, source.max_rows)
        self._call = _functions().of
        self._handle = _functions().open(most, self._each)
        count = 1
        self.bound = Bound(own_pages((1, self._each), np.uint8))
        if sys.platform != "win32":  # there, memory counts as soon as it is reserved
            with suppress(MemoryError):
                self.bound, count = Bound(own_pages((most, self._each), np.uint8, sparse=True)), most
        self._call["move"](self._handle, self.bound.address, count)

    def __del__(self) -> None:
        if handle := vars(self).pop("_handle", None):
            self._call["close"](handle)

    def find(self, digest: bytes) -> CrossAttentionCache | None:
        """Find the cache of a source; None = it must be filled."""
        number = self._call["find"](self._handle, digest, len(digest))
        if number < 0:
            return None
        return CrossAttentionCache(digest, self._call["rows"](self._handle, number), number, self)

    def stand_in(self, rows: int) -> CrossAttentionCache:
        """Give a cache of ``rows`` rows whose keys and values are zeros: passes over it can be timed."""
        if (found := self.find(digest := b"zeros %d" % rows)) is not None:
            return found
        made = self.take(digest, rows)
        self.bound.array[made.number, : self._format.nbytes(self.model.facts, rows)] = 0
        self.filled(made)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the caches that there are."""
        rows = (self._call["rows"](self._handle, number) for number in range(self.most))
        return sum(self._format.nbytes(self.model.facts, each) for each in rows if each)

    def close(self) -> None:
        """Free all caches; slots that refer to one are of no use afterwards."""
        self.__del__()
        vars(self).clear()

    def hold(self, cache: CrossAttentionCache) -> None:
        """Count a slot that reads this cache; its place is not given to another source."""
        self._call["hold"](self._handle, cache.number)

    def release(self, cache: CrossAttentionCache) -> None:
        """Count a slot less; nothing happens after the pool was closed."""
        if hasattr(self, "_handle"):
            self._call["release"](self._handle, cache.number)

    def shrink(self, most: int) -> None:
        """Forget caches that no slot reads but the ``most`` used last; their pages go back to the system."""
        self._call["shrink"](self._handle, most)

    def take(self, digest: bytes, rows: int) -> CrossAttentionCache:
        """Find a place for a source of ``rows`` rows: a free one, or that of the least recently used cache.

        ``filled`` says that it can be read, ``drop`` that it could not be filled.

        Raises:
            InvalidRequest: more rows than the model was exported for, none, or all places are in use.
        """
        if not 0 < rows <= self.longest:
            raise InvalidRequest(f"a source of {rows} rows: expected 1 to {self.longest}")
        with self._lock:
            while (number := self._call["take"](self._handle, digest, len(digest), rows)) >= len(self.bound.array):
                self._grow(min(self.most, 2 * number))
        if number < 0:
            raise _functions().refusal()
        return CrossAttentionCache(digest, rows, number, self)

    def filled(self, cache: CrossAttentionCache) -> None:
        """Keep a cache for all requests of its source."""
        self._call["filled"](self._handle, cache.number)

    def drop(self, cache: CrossAttentionCache) -> None:
        """Free the place of a cache that could not be filled."""
        self._call["drop"](self._handle, cache.number)

    def _grow(self, count: int) -> None:
        made = Bound(own_pages((count, self._each), np.uint8))
        self._call["move"](self._handle, made.address, count)
        self.bound = made
