"""The lock of an engine's model: whoever waits longest is next."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A re-entrant lock that is handed over to whoever has waited longest.

    Python's own goes to whoever comes first once it is free.  A request that takes it again right after each pass would
    keep it: on a busy machine a waiting thread needs longer to wake up than a running one to come back.
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
