"""Block pool of a batch: blocks of keys and values that its slots refer to by number.

Common prefixes of texts are stored once.  Blocks are copied on write if other slots read them.  The table of a slot's
block numbers follows its states (native/layout.h), where passes look them up.  Which blocks are whose is kept by the
native library (native/pool.h).
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.slots.handles import ADDRESS, NUMBER, Functions
from edgespec.runtimes.slots.shared import Bound, Model, own_pages

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "bytes": (NUMBER, NUMBER),
    "slot_bytes": (NUMBER,),
    "move": (NUMBER, ADDRESS, NUMBER),
    "blocks": (NUMBER,),
    "own": (NUMBER, NUMBER, NUMBER, NUMBER),
    "trim": (NUMBER, NUMBER, NUMBER),
    "share": (NUMBER, NUMBER, NUMBER, NUMBER),
    "clear": (NUMBER, NUMBER),
    "used": (NUMBER, NUMBER),
    "share_of": (NUMBER, NUMBER),
    "counts": (NUMBER, ADDRESS, NUMBER),
    "close": (None,),
}


@cache
def _functions() -> Functions:
    return Functions("pool", _SIGNATURES, 4)


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
    """

    def __init__(self, model: Model, width: int, entries: int) -> None:
        self.entries, self.block_bytes = entries, model.kv.block_bytes(model.facts)
        self._width, self._head = width, model.kv.header_bytes(model.facts)
        self._call = _functions().of
        self._handle = _functions().open(width, entries, self._head, self.block_bytes)
        self._each = int(self._call["slot_bytes"](self._handle))
        self._lock = threading.Lock()
        self._bytes = np.zeros(0, np.uint8)
        self._grow(0)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._call["close"](self._handle)

    def head(self, slot: int) -> NDArray[np.uint8]:  # [bytes]
        """View a slot's states and exact recent keys."""
        return self._bytes[slot * self._each : slot * self._each + self._head]

    def table(self, slot: int) -> NDArray[np.int32]:  # [entries]
        """View the numbers of a slot's blocks; -1 after the last one."""
        first = slot * self._each + self._head
        return self._bytes[first : first + 4 * self.entries].view(np.int32)

    def numbers(self, slot: int) -> list[int]:
        """List the numbers of a slot's blocks."""
        found: list[int] = self.table(slot)[: self._call["used"](self._handle, slot)].tolist()
        return found

    def block(self, number: int) -> NDArray[np.uint8]:  # [block_bytes]
        """View a block."""
        first = self._width * self._each + number * self.block_bytes
        return self._bytes[first : first + self.block_bytes]

    @property
    def counts(self) -> NDArray[np.int32]:  # [blocks]
        """Copy how many slots refer to each block that was ever in use."""
        found = np.zeros(self._width * self.entries, np.int32)
        return found[: self._call["counts"](self._handle, found.ctypes.data, len(found))]

    def share_of(self, slot: int) -> int:
        """Count the bytes of a slot's blocks; of one that it shares, its part."""
        return int(self._call["share_of"](self._handle, slot))

    def clear(self, slot: int) -> None:
        """Make a slot as it was at first; its memory goes back to the system."""
        self._call["clear"](self._handle, slot)

    def trim(self, slot: int, tokens: int) -> None:
        """Free a slot's blocks after the first ``tokens`` tokens."""
        self._call["trim"](self._handle, slot, tokens)

    def own(self, slot: int, first: int, end: int) -> None:
        """Prepare a slot's tokens ``first`` to ``end`` for writing, so that no other slot reads the written blocks."""
        while lacking := self._call["own"](self._handle, slot, first, end):
            self._make(lacking)

    def share(self, slot: int, other: int, tokens: int) -> None:
        """Let a slot hold the first tokens of another one, without a copy of whole blocks."""
        while lacking := self._call["share"](self._handle, slot, other, tokens):
            self._make(lacking)

    def make_room(self, blocks: int) -> None:
        """Make room for this many blocks, if there is not room for all: by one copy rather than by many."""
        with self._lock:
            if self._call["blocks"](self._handle) < min(blocks, self._width * self.entries):
                self._grow(blocks)

    def _make(self, blocks: int) -> None:
        if blocks < 0:
            raise _functions().refusal()
        self.make_room(blocks)

    def _grow(self, least: int) -> None:
        have, most = int(self._call["blocks"](self._handle)), self._width * self.entries
        array, blocks = None, most
        if sys.platform != "win32":  # there, memory counts as soon as it is reserved
            with suppress(MemoryError):
                array = own_pages((self._size(most),), np.uint8, sparse=True)
        if array is None:
            blocks = min(most, max(self._width, have * 3 // 2, least))
            array = own_pages((self._size(blocks),), np.uint8)
        self._call["move"](self._handle, array.ctypes.data, blocks)
        self._bytes, self.bound = array, Bound(array.reshape(self._width, -1))

    def _size(self, blocks: int) -> int:
        return int(self._call["bytes"](self._handle, blocks))
