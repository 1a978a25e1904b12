"""The memory of the requests that run, and the sessions there are."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from edgespec.engine.pool import SessionPool
from edgespec.engine.sessions import Session


@dataclass(eq=False)
class Place:
    """The memory that a running request may come to need.

    Attributes:
        method: the one whose memory counts.
        tokens: of prompt and answer.
        grammar: bytes of its own grammar.
        session: the one that it has; None = not yet.
    """

    method: str
    tokens: int
    grammar: int = 0
    session: Session | None = None


class Places:
    """All requests of an engine that run, alone or in batches, and the sessions there are.

    Attributes:
        pools: of sessions: the engine's, and those of its batches.
        taken: one for each request.
    """

    def __init__(self, own: SessionPool) -> None:
        self.pools = [own]
        self.taken: list[Place] = []
        self.lock = threading.Lock()  # held while a request is let in

    def kv_bytes(self) -> int:
        """Bytes of KV of all sessions."""
        return sum(pool.kv_bytes() for pool in list(self.pools))

    def shrink(self, most: int) -> None:
        """Free idle sessions, of all pools those not used for longest, until they have at most so many bytes of KV."""
        while sum(pool.held()[1] for pool in self.pools) > most:
            first = min(self.pools, key=lambda pool: pool.oldest)
            if not first.free_oldest():
                return

    def close(self) -> None:
        """All end: their sessions are closed next."""
        with self.lock:
            self.taken.clear()

    def leave(self, place: Place) -> None:
        """A request has ended; once is enough."""
        with self.lock:
            if place in self.taken:
                self.taken.remove(place)
