"""Block pool of a batch: blocks of keys and values that its slots refer to by number.

Common prefixes of texts are stored once.  Blocks are copied on write if other slots read them.  The table of a slot's
block numbers follows its states (native/layout.h), where passes look them up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.slots.shared import Bound, Model, give_back_pages, own_pages

_ALIGNED = 64  # bytes
_NONE = -1  # in a table: passes refuse it
_PIECE = 1 << 24  # bytes that are copied together


class BlockPool:
    """Heads, tables and blocks of some slots.

    Address space for all possible blocks is reserved at once: pages that are never written use no memory.  If the
    system does not support that (a limit, Windows), the pool grows by copying.

    Args:
        model: of the keys and values.
        width: number of slots.
        entries: maximum blocks of a slot.

    Attributes:
        bound: uint8 [width, bytes], the input of passes; replaced when the pool has grown.
        counts: int32 [blocks], slots that refer to each.
    """

    def __init__(self, model: Model, width: int, entries: int) -> None:
        self.entries, self.block_bytes = entries, model.kv.block_bytes(model.facts)
        self._width, self._head = width, model.kv.header_bytes(model.facts)
        self._each = -(-(self._head + 4 * entries) // _ALIGNED) * _ALIGNED
        self._free: list[int] = []  # a heap: the lowest number is taken, so that used blocks stay close together
        self._made = 0  # blocks from this number on were never in use
        self._lock = threading.Lock()  # idle sessions are closed by other threads
        self.counts = np.zeros(0, np.int32)
        self._bytes = np.zeros(0, np.uint8)
        self._grow()
        for slot in range(width):
            self.clear(slot)

    def head(self, slot: int) -> NDArray[np.uint8]:  # [bytes]
        """View a slot's states and exact recent keys."""
        return self._bytes[slot * self._each : slot * self._each + self._head]

    def table(self, slot: int) -> NDArray[np.int32]:  # [entries]
        """View the numbers of a slot's blocks."""
        first = slot * self._each + self._head
        return self._bytes[first : first + 4 * self.entries].view(np.int32)

    def block(self, number: int) -> NDArray[np.uint8]:  # [block_bytes]
        """View a block."""
        first = self._width * self._each + number * self.block_bytes
        return self._bytes[first : first + self.block_bytes]

    def clear(self, slot: int) -> None:
        """Make a slot's head and table as they were at first; its memory goes back to the system."""
        self.head(slot)[:] = 0
        self.table(slot)[:] = _NONE
        give_back_pages(self._bytes, slot * self._each, slot * self._each + self._head)

    def take(self) -> int:
        """Give a block to one slot -> its number; its contents are undefined."""
        with self._lock:
            if self._free:
                number = heappop(self._free)
            else:
                number = self._made
                if number == len(self.counts):
                    self._grow()
                self._made += 1
            self.counts[number] = 1
            return number

    def refer(self, numbers: Sequence[int]) -> None:
        """Count one slot more for these blocks."""
        with self._lock:
            self.counts[list(numbers)] += 1

    def release(self, numbers: Sequence[int]) -> None:
        """Count one slot less for these blocks; the memory of those that none refers to goes back to the system."""
        with self._lock:
            for number in numbers:
                self.counts[number] -= 1
                if not self.counts[number]:
                    heappush(self._free, number)
                    first = self._width * self._each + number * self.block_bytes
                    give_back_pages(self._bytes, first, first + self.block_bytes)

    def make_room(self, blocks: int) -> None:
        """Make room for this many blocks, if there is not room for all: by one copy rather than by many."""
        with self._lock:
            if len(self.counts) < min(blocks, self._width * self.entries):
                self._grow(blocks)

    def _grow(self, least: int = 0) -> None:
        have = len(self.counts)
        most = self._width * self.entries
        array, blocks = None, most
        if sys.platform != "win32":  # there, memory counts as soon as it is reserved
            with suppress(MemoryError):
                array = own_pages((self._size(most),), np.uint8, sparse=True)
        if array is None:
            blocks = min(most, max(self._width, have * 3 // 2, least))
            array = own_pages((self._size(blocks),), np.uint8)
        used = self._width * self._each + have * self.block_bytes if have else 0
        for first in range(0, used, _PIECE):  # in pieces, so that no more than a piece is in memory twice
            last = min(first + _PIECE, used)
            array[first:last] = self._bytes[first:last]
            give_back_pages(self._bytes, first, last)
        self._bytes, self.bound = array, Bound(array.reshape(self._width, -1))
        self.counts = np.concatenate([self.counts, np.zeros(blocks - have, np.int32)])

    def _size(self, blocks: int) -> int:
        """Count the bytes of a pool, in whole slots."""
        each = self._each - (-blocks * self.block_bytes // self._width // _ALIGNED) * _ALIGNED
        return each * self._width
