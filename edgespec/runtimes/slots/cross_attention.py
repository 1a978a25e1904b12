"""Cross-attention caches: keys and values of an encoder's output, computed once per source.

A separate pass fills a cache, and it is never written again.  Slots refer to it.  It stays for the next request with
the same source until another source needs its place.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.kv import memory_format
from edgespec.runtimes.slots.shared import Bound, Model, give_back_pages, own_pages


@dataclass(eq=False)
class CrossAttentionCache:
    """Keys and values of one source, for all layers of one model."""

    digest: bytes  # of the source and its encoder: equal digests mean equal caches
    rows: int  # of the encoder's output that it was computed from
    number: int  # among those of ``of``
    of: CrossAttentionPool  # the pool that holds it
    users: int = 0  # slots that refer to it

    def hold(self) -> None:
        """Count one user more."""
        with self.of.lock:
            self.users += 1

    def release(self) -> None:
        """Count one user less."""
        with self.of.lock:
            self.users -= 1


class CrossAttentionPool:
    """The cross-attention caches of one model, in one array that all its slots read.

    Address space for all of them is reserved at once, as pages that are never written use no memory.  If the system
    does not support that, the array grows by copying.  A short source uses only the pages that it fills.

    Args:
        model: whose passes read them: a decoder with a ``source``.
        most: how many there may be at a time: one for each slot with a different source, and those to keep.

    Attributes:
        bound: uint8 [count, bytes], the input of passes; replaced after it has grown.
        lock: for counts; idle sessions are closed by other threads.
    """

    def __init__(self, model: Model, most: int = 4) -> None:
        source = model.part.source
        if source is None or most < 1:
            raise InvalidRequest(f"{most} memories: expected at least one, and a model that attends over a source")
        self.model, self.most, self.longest = model, most, source.max_rows
        self.lock = threading.Lock()
        self._format = memory_format(model.kv)
        self._each = self._format.nbytes(model.facts, source.max_rows)
        self._kept: dict[bytes, CrossAttentionCache] = {}  # the most recently used one is last
        self.bound = Bound(own_pages((1, self._each), np.uint8))
        if sys.platform != "win32":  # there, memory counts as soon as it is reserved
            with suppress(MemoryError):
                self.bound = Bound(own_pages((most, self._each), np.uint8, sparse=True))

    def find(self, digest: bytes) -> CrossAttentionCache | None:
        """Find the memory of a source; None = it must be filled."""
        with self.lock:
            found = self._kept.pop(digest, None)
            if found is not None:
                self._kept[digest] = found
            return found

    def stand_in(self, rows: int) -> CrossAttentionCache:
        """Give a memory of ``rows`` rows whose keys and values are zeros: passes over it can be timed."""
        if (found := self.find(digest := b"zeros %d" % rows)) is not None:
            return found
        made = CrossAttentionCache(digest, rows, self.take(rows), self)
        self.bound.array[made.number, : self._format.nbytes(self.model.facts, rows)] = 0
        self.put(made)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the memories that there are."""
        with self.lock:
            return sum(self._format.nbytes(self.model.facts, memory.rows) for memory in self._kept.values())

    def close(self) -> None:
        """Free all memories; slots that refer to one are of no use afterwards."""
        vars(self).clear()

    def shrink(self, most: int) -> None:
        """Forget memories that no slot refers to but the ``most`` used last; their pages go back to the system."""
        with self.lock:
            idle = [memory for memory in self._kept.values() if not memory.users]
            for memory in idle[: max(len(idle) - most, 0)]:
                self._forget(memory)

    def _forget(self, memory: CrossAttentionCache) -> None:
        del self._kept[memory.digest]
        first = memory.number * self._each
        give_back_pages(self.bound.array, first, first + self._each)

    def put(self, memory: CrossAttentionCache) -> None:
        """Keep a memory that is filled, for all requests of its source."""
        with self.lock:
            self._kept[memory.digest] = memory

    def take(self, rows: int) -> int:
        """Find a place for ``rows`` rows: a free one, or that of the least recently used cache.

        Raises:
            InvalidRequest: more rows than the model was exported for, none, or all places are in use.
        """
        if not 0 < rows <= self.longest:
            raise InvalidRequest(f"a source of {rows} rows: expected 1 to {self.longest}")
        with self.lock:
            used = {memory.number for memory in self._kept.values()}
            free = next((number for number in range(len(self.bound.array)) if number not in used), None)
            if free is None and len(self.bound.array) < self.most:
                free = len(self.bound.array)
                self._grow(min(self.most, 2 * free))
            if free is not None:
                return free
            idle = next((memory for memory in self._kept.values() if not memory.users), None)
            if idle is None:
                raise InvalidRequest(f"all {self.most} memories are in use", "close a session first")
            self._forget(idle)
            return idle.number

    def _grow(self, count: int) -> None:
        array = own_pages((count, self._each), np.uint8)
        array[: len(self.bound.array)] = self.bound.array
        self.bound = Bound(array)
