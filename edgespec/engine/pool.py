"""Sessions kept for the next requests, and the table of reserved memory.

A conversation finds its session again, even after other requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.decoding.target import common_prefix
from edgespec.drafters.registry import AR
from edgespec.engine.sessions import Session
from edgespec.errors import InvalidRequest
from edgespec.planning.memory_budget import MemoryBudget
from edgespec.runtimes.process import trim_memory
from edgespec.runtimes.slots.native_batch import BatchSlot, shared_bytes

MOST_IDLE = 4  # finished conversations whose KV is kept
TRIM_EVERY = 5.0  # seconds between two times that free memory goes back to the system, where an engine has no request
_FEW = 16  # tokens: a text of fewer is read again as fast as it is found
_WORTH = 4  # tokens that are worth copying


class _Found:
    """The match between a prompt of an owner and a session."""

    def __init__(self, session: Session, prompt: Sequence[int], owner: str | None, adapter: int) -> None:
        self.session, text = session, session.target.tokens
        # the owner also identifies the source
        same = session.owner == owner and session.adapter == adapter
        self.common = common_prefix(text, prompt) if same else 0  # tokens that both begin with
        self.lent = min(self.common, max(len(prompt) - 1, 0))  # the prompt's last one is read in any case
        self.reused = session.target.cropped(self.lent)  # fewer where states go back to a checkpoint
        # Whether the prompt continues everything that was asked, rather than only begins like it.  The last answer may
        # be left out (a template without earlier thoughts, another try), and a tokenizer may end the question
        # differently.  Reading few tokens again takes about the time of a pass, so little is lost or gained.
        self.goes_on = len(text) - self.common <= _FEW or self.common > max(_FEW, session.asked - 2)


@dataclass(frozen=True)
class Match:
    """The idle session for a prompt, as it was found."""

    prompt: Sequence[int]
    owner: str | None
    adapter: int
    continued: Session | None  # whose text the prompt continues
    oldest: Session | None  # not used for longest
    full: bool  # whether the number of sessions has reached its limit

    def session(self, room: bool = True) -> Session | None:
        """Return the session to take; None = a new one.  ``room``: whether memory allows a new one."""
        return self.continued or (self.oldest if self.full or not room else None)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of the session to take; 0 = a new one."""
        session = self.session()
        return 0 if session is None else session.kv_bytes


class SessionPool:
    """Gives every request a session: that of its conversation, or one unlikely to be used again.

    ``most``: the maximum number of sessions, including busy ones; ``together``: whether one thread drives all requests:
    their passes run together, and running requests share their prompts too.
    """

    def __init__(
        self,
        make: Callable[[], Session],
        most_idle: int = MOST_IDLE,
        most: int | None = None,
        together: bool = False,
    ) -> None:
        self._make, self._most_idle, self._most, self.together = make, most_idle, most, together
        self._idle: list[Session] = []  # the one that was used last is last
        self._busy: list[Session] = []
        self._lock = threading.Lock()
        self._held = 0, 0  # what ``held`` said last

    def take(self, prompt: Sequence[int], owner: str | None = None, adapter: int = 0) -> Session:
        """Take the idle session whose text the prompt continues, else a new one, else the least recently used.

        ``owner``: the owner of the request; text of another owner is removed from the session first.
        ``adapter``: number of the request's LoRA adapter; text that was read with another one is removed too.
        """
        match = self.match(prompt, owner, adapter)
        return self.claim(match) or self.new(match)

    def match(self, prompt: Sequence[int], owner: str | None = None, adapter: int = 0) -> Match:
        """Find the idle session for a prompt; nothing is taken yet."""
        with self._lock:
            found = [_Found(session, prompt, owner, adapter) for session in self._idle]
            going_on = max((one for one in found if one.goes_on), key=lambda one: one.reused, default=None)
            full = len(self._idle) >= self._most_idle or len(self._idle) + len(self._busy) == self._most
            oldest = self._idle[0] if self._idle else None
            return Match(prompt, owner, adapter, going_on.session if going_on else None, oldest, full)

    def claim(self, match: Match, room: bool = True, most: int | None = None) -> Session | None:
        """Take the session of a match; None = call ``new``.

        ``room``: whether memory allows a new one; ``most``: bytes of KV that it may have.
        """
        session = match.session(room)
        with self._lock:
            if session is None or session not in self._idle or (most is not None and session.kv_bytes > most):
                return None
            self._idle.remove(session)
            self._use(session, match)
            return session

    def new(self, match: Match) -> Session:
        """Make a session that starts with the part of the prompt that another session of this owner holds."""
        with self._lock:
            session = self._make()
            self._use(session, match)
            return session

    def any(self) -> Session:
        """Take an idle session, or a new one, for a caller that leaves its text as it is."""
        with self._lock:
            session = self._idle.pop() if self._idle else self._make()
            self._busy.append(session)
            return session

    def _use(self, session: Session, match: Match) -> None:
        """Start a request on a session, with the part of the prompt that it or another session holds."""
        prompt, owner = match.prompt, match.owner
        if session.owner != owner:
            session.forget()
        session.use_adapter(match.adapter)
        session.owner, session.asked = owner, len(prompt)
        lenders = self._lenders(session, prompt)
        _take_over(session, _Found(session, prompt, owner, match.adapter).reused, lenders)
        session.shared = max((one.common for one in lenders), default=0)
        self._busy.append(session)

    def _lenders(self, session: Session, prompt: Sequence[int], held: int = 0) -> list[_Found]:
        """Find sessions with more than ``held`` tokens of a prompt, which this one can copy."""
        some = [*self._idle, *self._busy] if self.together else self._idle
        others = (one for one in some if one is not session and not one.foreign and not one.sourced)
        ahead = list(prompt[held : held + _WORTH])  # these tokens rule out most other sessions
        some = [one for one in others if one.target.tokens[held : held + len(ahead)] == ahead]
        return [_Found(one, prompt, session.owner, session.adapter) for one in some]

    def catch_up(self, session: Session, prompt: Sequence[int]) -> int:
        """Copy more of a prompt from another session into a busy one -> the number of tokens added.

        Sessions that other threads drive lend nothing while they run.
        """
        if not self.together:
            return 0
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
        """Return when the least recently used idle session was given back; infinity without one."""
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
        session.target.copy_prefix_from(nearest.session.target, nearest.lent)


def _closed() -> Session:
    raise InvalidRequest("this engine is closed: expected an open one", "load the bundle again")


@dataclass(eq=False)
class Reserved:
    """The figures of a request's memory that the table counts."""

    method: str  # the one whose memory counts
    tokens: int  # of prompt and answer
    grammar: int = 0  # bytes of its grammar
    using: Session | None = None  # the session that it has; None = not yet
    read: bool = False  # whether its prompt is: blocks that it shares with others are shared as long as it runs


class ReservationTable:
    """All running requests of an engine, single or in batches, and all sessions.

    Attributes:
        pools: the engine's sessions, and those of its batches.
        taken: what each running request has reserved.
        lock: held while a request is admitted.
    """

    def __init__(self, own: SessionPool, memory_budget: MemoryBudget, grammar_bytes: Callable[[], int]) -> None:
        self.pools = [own]
        self.taken: list[Reserved] = []
        self.lock = threading.Lock()
        self._memory_budget, self._grammar_bytes = memory_budget, grammar_bytes

    def held(self, method: str = AR, own: Reserved | None = None, wait: bool = True) -> tuple[int, int]:
        """Bytes that requests other than ``own`` have or will come to need, and those that may be freed.

        ``method``: whose weights are counted elsewhere.  ``wait``: see ``SessionPool.held``.
        """
        memory_budget, others = self._memory_budget, [one for one in self.taken if one is not own]
        used = [one.using.kv_bytes if one.using else 0 for one in others]
        busy = sum(
            one.grammar + max(memory_budget.beside(one.method, one.tokens), kv)
            for one, kv in zip(others, used, strict=True)
        )
        pools = [pool.held(wait) for pool in self.pools]
        # sessions that are in use for something else, such as to be saved
        busy += sum(used for used, _ in pools) - sum(one.using.kv_bytes for one in self.taken if one.using)
        busy -= self.shared_bytes()
        loaded = sorted({one.method for one in others} - {method, AR})
        busy += sum(memory_budget.extra([name], 1) for name in loaded)
        return busy, self._grammar_bytes() + sum(idle for _, idle in pools)

    def kv_bytes(self) -> int:
        """Bytes of KV of all sessions."""
        return sum(pool.kv_bytes() for pool in list(self.pools))

    def shared_bytes(self) -> int:
        """Bytes of KV that running requests share and that are counted more than once."""
        slots = [one.using.target for one in self.taken if one.using and one.read]
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
            self._grammar_bytes = lambda: 0  # the engine's, which need not wait for the collector of cycles

    def remove(self, reserved: Reserved) -> None:
        """Forget a request that has ended; once is enough."""
        with self.lock:
            if reserved in self.taken:
                self.taken.remove(reserved)
