"""Sessions kept for the next requests, and the memory of those that run.

A conversation finds its session again, even after other requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.decoding.target import common_prefix
from edgespec.engine.sessions import Session
from edgespec.errors import InvalidRequest
from edgespec.runtimes.process import trim_memory
from edgespec.runtimes.slots.native_batch import BatchSlot, shared_bytes

MOST_IDLE = 4  # finished conversations whose KV is kept
TRIM_EVERY = 5.0  # seconds between two times that free memory goes back to the system, where an engine has no request
_FEW = 16  # tokens: a text of fewer is read again as fast as it is found
_WORTH = 4  # tokens that are worth copying


class _Found:
    """The match between a prompt of an owner and a session."""

    def __init__(self, session: Session, prompt: Sequence[int], owner: str | None) -> None:
        self.session, text = session, session.target.tokens
        same = session.owner == owner  # that it is of the same source, too, its owner says
        self.common = common_prefix(text, prompt) if same else 0  # tokens that both begin with
        self.lent = min(self.common, max(len(prompt) - 1, 0))  # the prompt's last one is read in any case
        self.reused = session.target.cropped(self.lent)  # fewer where states go back to a checkpoint
        # Whether it goes on from all that was asked, rather than only begins like it.  What was answered last may be
        # left out (a template without earlier thoughts, another try), and a tokenizer may end the question otherwise.
        # Few tokens are read again in about the time of a pass: that is neither much to lose nor to gain.
        self.goes_on = len(text) - self.common <= _FEW or self.common > max(_FEW, session.asked - 2)


class SessionPool:
    """Gives every request a session: that of its conversation, or one unlikely to be used again.

    ``most``: the maximum number of sessions, including busy ones; ``together``: whether one thread drives all requests,
    so that running requests share their prompts too.
    """

    def __init__(
        self,
        make: Callable[[], Session],
        most_idle: int = MOST_IDLE,
        most: int | None = None,
        together: bool = False,
    ) -> None:
        self._make, self._most_idle, self._most, self._together = make, most_idle, most, together
        self._idle: list[Session] = []  # the one that was used last is last
        self._busy: list[Session] = []
        self._lock = threading.Lock()
        self._held = 0, 0  # what ``held`` said last

    def take(self, prompt: Sequence[int], owner: str | None = None) -> Session:
        """Take the idle session whose text the prompt continues, else a new one, else the least recently used.

        ``owner``: the owner of the request; text of another owner is removed from the session first.
        """
        return self.reserve(prompt, owner) or self.new(prompt, owner)

    def reserve(
        self, prompt: Sequence[int], owner: str | None = None, room: bool = True, most: int | None = None
    ) -> Session | None:
        """Take an idle session, as ``take`` would; None = call ``new``.

        ``room``: whether memory allows a new one; ``most``: bytes of KV that it may have.
        """
        with self._lock:
            session = self._next(prompt, owner, room)
            if session is None or (most is not None and session.kv_bytes > most):
                return None
            self._idle.remove(session)
            self._use(session, prompt, owner)
            return session

    def new(self, prompt: Sequence[int], owner: str | None = None) -> Session:
        """Make a session that starts with the part of the prompt that another session of this owner holds."""
        with self._lock:
            session = self._make()
            self._use(session, prompt, owner)
            return session

    def any(self) -> Session:
        """Take an idle session, or a new one, for a caller that leaves its text as it is."""
        with self._lock:
            session = self._idle.pop() if self._idle else self._make()
            self._busy.append(session)
            return session

    def next_bytes(self, prompt: Sequence[int], owner: str | None = None) -> int:
        """Bytes of KV of the idle session that ``take`` would give; 0 = a new one."""
        with self._lock:
            session = self._next(prompt, owner, room=True)
            return 0 if session is None else session.kv_bytes

    def _next(self, prompt: Sequence[int], owner: str | None, room: bool) -> Session | None:
        """Find the idle session to take; None = a new one."""
        found = [_Found(session, prompt, owner) for session in self._idle]
        if going_on := [one for one in found if one.goes_on]:
            return max(going_on, key=lambda one: one.reused).session
        full = len(self._idle) >= self._most_idle or len(self._idle) + len(self._busy) == self._most
        return self._idle[0] if found and (full or not room) else None

    def _use(self, session: Session, prompt: Sequence[int], owner: str | None) -> None:
        """Start a request on a session, with the part of the prompt that it or another session holds."""
        if session.owner != owner:
            session.forget()
        session.owner, session.asked = owner, len(prompt)
        lenders = self._lenders(session, prompt)
        _take_over(session, _Found(session, prompt, owner).reused, lenders)
        session.shared = max((one.common for one in lenders), default=0)
        self._busy.append(session)

    def _lenders(self, session: Session, prompt: Sequence[int], held: int = 0) -> list[_Found]:
        """Find sessions with more than ``held`` tokens of a prompt, which this one can copy."""
        some = [*self._idle, *self._busy] if self._together else self._idle
        others = (one for one in some if one is not session and not one.foreign and not one.attends)
        ahead = list(prompt[held : held + _WORTH])  # by these alone most others are told
        some = [one for one in others if one.target.tokens[held : held + len(ahead)] == ahead]
        return [_Found(one, prompt, session.owner) for one in some]

    def catch_up(self, session: Session, prompt: Sequence[int]) -> int:
        """Copy more of a prompt from another session into a busy one -> the number of tokens added."""
        with self._lock:
            held = len(session.target.tokens)
            _take_over(session, held, self._lenders(session, prompt, held))
            return len(session.target.tokens) - held

    def add(self, session: Session) -> None:
        """Add an idle session that was made elsewhere, whose text is a conversation to be continued."""
        session.asked = len(session.target.tokens)
        with self._lock:
            self._busy.append(session)
        self.give_back(session)

    def give_back(self, session: Session) -> None:
        """Take back a session whose request has ended."""
        with self._lock:
            if session in self._busy:
                self._busy.remove(session)
                self._idle.append(session)
                session.used = time.monotonic()
                for old in self._idle[: -self._most_idle]:
                    old.close()
                del self._idle[: -self._most_idle]
        if not self._busy:
            trim_memory(TRIM_EVERY)

    def drop(self, session: Session) -> None:
        """Drop a session whose contents are lost; it is not used again."""
        with self._lock:
            if session in self._busy:
                self._busy.remove(session)
                session.close()

    @property
    def sessions(self) -> list[Session]:
        """All there are."""
        return [*self._idle, *self._busy]

    @property
    def busy(self) -> int:
        """How many sessions are in use."""
        return len(self._busy)

    def kv_bytes(self) -> int:
        """Bytes of KV of all sessions."""
        return sum(self.held())

    def held(self, wait: bool = True) -> tuple[int, int]:
        """Bytes of KV of sessions in use, and of idle ones.

        ``wait``: for a thread that is handing out a session; False = return the last figures instead.
        """
        if self._lock.acquire(blocking=wait):
            try:
                busy, idle = (sum(session.kv_bytes for session in some) for some in (self._busy, self._idle))
                self._held = busy, idle
            finally:
                self._lock.release()
        return self._held

    @property
    def oldest(self) -> float:
        """When the idle session that was not used for longest was given back; infinity where there is none."""
        with self._lock:
            return self._idle[0].used if self._idle else math.inf

    def free_oldest(self) -> bool:
        """Free the idle session that was not used for longest; returns whether there was one."""
        with self._lock:
            if self._idle:
                self._idle.pop(0).close()
                return True
            return False

    def longest(self) -> int:
        """Capacity of the longest target slot, in tokens."""
        with self._lock:
            return max((session.target.capacity for session in self.sessions), default=0)

    def clear(self) -> None:
        """Free the idle sessions."""
        with self._lock:
            for session in self._idle:
                session.close()
            self._idle.clear()

    def close(self) -> None:
        """Free all sessions, including those in use; their holders must not use them again."""
        self.clear()
        with self._lock:
            for session in self._busy:
                session.close()
            self._busy.clear()
            self._make = _closed


def _take_over(session: Session, held: int, lenders: Sequence[_Found]) -> None:
    """Let a session with ``held`` useful tokens copy from the one with the most, if that saves time."""
    nearest = max(lenders, key=lambda one: one.reused, default=None)
    if nearest is not None and nearest.reused >= held + _WORTH:
        session.target.begin_like(nearest.session.target, nearest.lent)


def _closed() -> Session:
    raise InvalidRequest("this engine is closed: expected an open one", "load the bundle again")


@dataclass(eq=False)
class Place:
    """The memory that a running request may come to need."""

    method: str  # the one whose memory counts
    tokens: int  # of prompt and answer
    grammar: int = 0  # bytes of its grammar
    session: Session | None = None  # the one that it has; None = not yet
    read: bool = False  # whether its prompt is: blocks that it shares with others are shared as long as it runs


class Places:
    """All running requests of an engine, single or in batches, and all sessions."""

    def __init__(self, own: SessionPool) -> None:
        self.pools = [own]  # the engine's, and those of its batches
        self.taken: list[Place] = []  # one for each request
        self.lock = threading.Lock()  # held while a request is let in

    def kv_bytes(self) -> int:
        """Bytes of KV of all sessions."""
        return sum(pool.kv_bytes() for pool in list(self.pools))

    def shared_bytes(self) -> int:
        """Bytes of KV that running requests share and that are counted more than once."""
        slots = [place.session.target for place in self.taken if place.session and place.read]
        batched = [slot for slot in slots if isinstance(slot, BatchSlot)]
        return shared_bytes(batched) if batched else 0

    def shrink(self, most: int) -> None:
        """Free the least recently used idle sessions of all pools, until they have at most this many bytes of KV."""
        while sum(pool.held()[1] for pool in self.pools) > most:
            first = min(self.pools, key=lambda pool: pool.oldest)
            if not first.free_oldest():
                return

    def close(self) -> None:
        """End all requests; their sessions are closed next."""
        with self.lock:
            self.taken.clear()

    def leave(self, place: Place) -> None:
        """Forget a request that has ended; once is enough."""
        with self.lock:
            if place in self.taken:
                self.taken.remove(place)
