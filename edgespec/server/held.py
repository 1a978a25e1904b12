"""Bytes of requests that a server holds: their bodies, their pictures, what their answers repeat.

Each request counts what it holds, from its first byte to the end of its answer.  One client may hold half of it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from starlette.requests import Request

from edgespec.planning.budget import show_bytes
from edgespec.server.errors import Busy

SCOPE = "edgespec.held"  # where a request's scope has its ``Held``
LEAST, USUAL, BODIES = 64 << 20, 256 << 20, 4  # bytes of all requests; bodies of the largest size that must fit
ASIDE = 8 << 20  # bytes that a budget keeps for them in any case
MOMENT = 0.02  # seconds that a value from the memory budget is reused


class HeldBytes:
    """Counts the bytes that all requests of a server hold in memory.

    Args:
        body: maximum bytes of a body.
        free: returns how many bytes the budget leaves for requests, or None without a budget.
    """

    def __init__(self, body: int, free: Callable[[], int | None] = lambda: None) -> None:
        self.most = max(LEAST, BODIES * body, min(USUAL, 10 * body))
        self._free = free
        self._left: int | None = None  # what it gave
        self._asked = -math.inf  # and when
        self._of: Counter[str] = Counter()  # by client

    @property
    def bytes(self) -> int:
        """Bytes that requests hold."""
        return self._of.total()

    @property
    def beyond(self) -> int:
        """Bytes of them that no budget has set aside."""
        return max(0, self.bytes - ASIDE)

    def change(self, client: str, more: int) -> None:
        """Count more bytes of a client, or fewer.

        Raises:
            Busy: the client, or all clients together, would hold too many.
        """
        if more > 0:
            after = self.bytes + more
            free = self._free_bytes() if after > ASIDE else None
            if self._of[client] + more > self.most // 2:
                raise Busy(f"requests of this client hold {show_bytes(self._of[client])} already", "wait for answers")
            if after > self.most or (free is not None and after > max(ASIDE, free)):
                raise Busy(f"requests hold {show_bytes(self.bytes)} already", "ask again in a moment")
        self._of[client] += more
        if not self._of[client]:
            del self._of[client]

    def _free_bytes(self) -> int | None:
        """Return what the budget leaves, as of a moment ago: each piece of each body asks."""
        if (now := time.monotonic()) >= self._asked + MOMENT:
            self._left, self._asked = self._free(), now
        return self._left


class Held:
    """Bytes that one request of ``client`` holds, counted in ``all_``."""

    def __init__(self, all_: HeldBytes, client: str) -> None:
        self._all, self._client, self.bytes, self._closed = all_, client, 0, False

    def set(self, size: int) -> None:
        """Set the number of bytes that the request holds.

        Raises:
            Busy: see ``HeldBytes.change``; the number stays the same.
        """
        if not self._closed:
            self._all.change(self._client, size - self.bytes)
            self.bytes = size

    def close(self) -> None:
        """Release the request's bytes; later changes are ignored."""
        self.set(0)
        self._closed = True

    def add(self, more: int) -> None:
        """Add to the bytes that the request holds; raises the errors of ``set``."""
        self.set(self.bytes + more)


def held_by(request: Request) -> Held:
    """Return what a request holds."""
    found: Held = request.scope[SCOPE]
    return found
