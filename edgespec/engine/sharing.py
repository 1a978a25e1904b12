"""How requests share a model: a lock that is handed over in turn, and how much of a prompt is read at once."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A re-entrant lock that the longest-waiting thread gets next.

    Python's own lock goes to the first thread that asks once it is free.  A request that takes it again right after
    each pass would keep it: on a busy machine a waiting thread needs longer to wake up than a running one to come back.
    """

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return len(self._waiting)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._state:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((me, turn))
        try:
            turn.acquire()  # until it is handed over
        except BaseException:  # Ctrl-C
            with self._state:
                queued = (me, turn) in self._waiting
                if queued:
                    self._waiting.remove((me, turn))
            if not queued:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._state:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.release()


SIZES = (8, 16, 32, 64, 128)  # rows of a chunk
FIRST = 16  # while nothing is known; a prompt with no more left is read to its end
ALONE, BESIDE = 0.08, 0.03  # seconds of a chunk, which is the wait of a request that arrives, or that is running
_GAIN = 0.9  # a larger chunk is used if its cost per row is at most this share of a smaller one's
_FORGET = 256  # chunks until larger ones are tried again


class PrefillBudget:
    """Bounds chunks of a prompt by time, from what the latest ones took.

    A single request takes larger chunks if they cost less per row, as on machines that wait for weights rather than
    compute.  With other requests running, only the time counts.  In strict mode a row has the same bits in any chunk,
    so timing does not change the text.
    """

    def __init__(self) -> None:
        self._cost: dict[int, float] = {}  # seconds of a row, by rows of the chunk
        self._chunks = 0

    def rows(self, most: int, alone: bool) -> int:
        """Rows of the next chunk, of which ``most`` fit a pass; ``alone``: whether no other request is there."""
        sizes = [size for size in SIZES if size <= most] or [most]
        at = max((at for at, size in enumerate(sizes) if self._fits(size, alone)), default=0)
        while alone and self._cost and at + 1 < len(sizes):
            here, next_ = self._cost.get(sizes[at]), self._cost.get(sizes[at + 1])
            if here is None or (next_ is not None and next_ > _GAIN * here):
                break
            at += 1
        return sizes[at]

    @property
    def cost(self) -> float | None:
        """Seconds of a row in the largest chunk that was timed; None = none was."""
        return self._cost[max(self._cost)] if self._cost else None

    def _fits(self, size: int, alone: bool) -> bool:
        """Whether a chunk of this size is short enough."""
        if not self._cost:
            return size <= FIRST
        nearest = min(self._cost, key=lambda known: abs(known - size))
        return size * self._cost[nearest] <= (ALONE if alone else BESIDE)

    def took(self, rows: int, seconds: float) -> None:
        """Note that a chunk took ``seconds``.  What changed since, depth or other load, changed for all sizes."""
        if rows not in SIZES:  # the last one of a prompt
            return
        cost = seconds / rows
        change = cost / self._cost.get(rows, cost)
        self._cost = {size: old * change for size, old in self._cost.items()} | {rows: cost}
        self._chunks += 1
        if self._chunks % _FORGET == 0:
            self._cost = {size: old for size, old in self._cost.items() if size <= rows}
