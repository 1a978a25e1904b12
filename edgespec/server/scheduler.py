"""One thread that decodes everybody's requests together: they join and leave a running batch between rounds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from edgespec.engine.batch import RunningBatch
from edgespec.engine.engine import Engine
from edgespec.engine.request import Request
from edgespec.engine.result import Chunk, Result
from edgespec.errors import BudgetError, EdgespecError, InvalidRequest
from edgespec.planning.memory_budget import MemoryBusyError
from edgespec.server.errors import Busy, ClientDisconnected, Stopped
from edgespec.server.queues import FairQueue


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; each has the default of ``edgespec serve``.


    Raises:
        InvalidRequest: a number that is none, or below what makes sense.
    """

    parallel: int = 4  # texts that are decoded together
    queue: int = 64  # texts that may wait; more are refused with 429.  One client may fill three quarters of it
    tokens: int = 4096  # maximum new tokens of a text
    body: int = 1 << 20  # maximum bytes of a request's body
    seconds: float = 600.0  # maximum time of a request, waiting included; a text that takes longer is cut off
    grace: float = 30.0  # seconds that running requests get when the server is stopped
    connections: int = 256  # most open ones; beyond that the oldest idle one is closed, or a new one waits
    arrive: float = 30.0  # seconds for a request to arrive whole, and for a client to resume reading its answer
    idle: float = 5.0  # seconds that a connection stays open between two requests

    def __post_init__(self) -> None:
        for each in fields(self):
            least = 0 if each.name in ("queue", "grace") else 1 if each.type == "int" else 1e-3
            if not getattr(self, each.name) >= least:
                raise InvalidRequest(f"{each.name} {getattr(self, each.name)}: expected at least {least:g}")


@dataclass(frozen=True)
class Event:
    """Event of a request: new text, or how it ended."""

    chunk: Chunk | None = None  # text of a round; None = the last event
    result: Result | None = None  # at the end; None where it failed
    error: Exception | None = None  # why it failed
    timed_out: bool = False  # it was cut because its time was over


@dataclass(eq=False)
class PendingRequest:
    """A text that waits or is being decoded, and the function that receives its events."""

    request: Request  # which has not begun
    # called with every event, in the decoding thread: it must be quick and must not raise
    sink: Callable[[Event], None]
    client: str = ""  # whose it is
    group: str = ""  # which of the client's requests to the server
    deadline: float = math.inf  # when its time is over, by ``time.monotonic``
    done: threading.Event = field(default_factory=threading.Event)  # set after its last event
    timed_out: bool = False  # its time was over before it had ended

    def cancel(self) -> None:
        """Cancel it before the next round."""
        self.request.cancel()

    def end(self, event: Event) -> None:
        """Tell the last event."""
        self.sink(event)
        self.done.set()


class Scheduler:
    """Decodes texts, ``Limits.parallel`` of them together: of each client in turn, of a client's requests in turn.

    Args:
        engine: of the bundle.
        limits: how many and how long.
        make_room: frees memory of other models, or waits until it may be tried again.
    """

    def __init__(
        self, engine: Engine, limits: Limits | None = None, make_room: Callable[[], None] = lambda: None
    ) -> None:
        self.limits, self._make_room = limits or Limits(), make_room
        self._batch = RunningBatch(engine, self.limits.parallel)
        self._waiting: FairQueue[PendingRequest] = FairQueue()
        self._running: dict[Request, PendingRequest] = {}
        self._joining = False
        self._changed = threading.Condition()
        self._stopping = False
        self._last = math.inf  # when those that run are cut, by time.monotonic
        self._thread = threading.Thread(target=self._serve, name="edgespec-decode", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many requests are being decoded."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        with self._changed:
            return bool(self._waiting or self._joining or self._running)

    def submit(self, ticket: PendingRequest) -> PendingRequest:
        """Line up a text; its time begins.

        Raises:
            Busy: the queue is full, or the client has its part of it.
            Stopped: the server stops.
        """
        ticket.deadline, client = time.monotonic() + self.limits.seconds, ticket.client
        with self._changed:
            if self._stopping:
                raise Stopped("the server is stopping", "ask again in a moment")
            waiting, room = len(self._waiting), max(0, self._batch.room)
            if waiting >= self.limits.queue + room:
                raise Busy(f"{waiting} texts wait already", "ask again in a moment")
            part = self.limits.queue - self.limits.queue // 4  # the rest is kept for other clients
            if (own := self._waiting.of(client)) >= part + room:
                raise Busy(f"{own} texts of this client wait already", "ask again when some of them are there")
            self._waiting.add(client, ticket.group, ticket)
            self._changed.notify()
        return ticket

    def stop(self, grace: float | None = None) -> None:
        """Take no more requests, and cut those that run after some seconds; returns at once.

        Args:
            grace: seconds; None = ``Limits.grace``.
        """
        with self._changed:
            self._stopping = True
            self._last = min(self._last, time.monotonic() + (self.limits.grace if grace is None else grace))
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._stopping):
                    self._changed.wait()
                if not (self._waiting or self._running):
                    break
            try:
                self._look_at_clocks()
                self._admit()
                for running, answer in self._batch.round():
                    self._deliver(running, answer)
            except Exception as error:  # a bug: the running requests get the error, and the server continues
                self._batch.close()
                for ticket in self._running.values():
                    ticket.end(Event(error=error))
                self._running.clear()
        self._batch.close()

    def _admit(self) -> None:
        """Let waiting requests join."""
        try:
            while self._batch.room and self._join():
                pass
        finally:
            self._joining = False

    def _join(self) -> bool:
        """Let the next request join -> whether it was able to."""
        with self._changed:
            if not self._waiting:
                return False
            self._joining = True
            client, group, ticket = self._waiting.take()
        try:
            self._batch.begin(ticket.request)
        except BudgetError as error:
            if not self._running and not isinstance(error, MemoryBusyError):
                ticket.end(Event(error=error))
                return True
            with self._changed:  # it fits once the requests that hold the memory have ended
                self._waiting.put_back(client, group, ticket)
            if not self._running:
                self._make_room()
            return False
        except Exception as error:
            ticket.end(Event(error=error))
        else:
            self._running[ticket.request] = ticket
        return True

    def _look_at_clocks(self) -> None:
        """Cut texts that take too long, and drop requests that waited too long or were cancelled."""
        now = time.monotonic()
        stopped = now > self._last
        for ticket in self._running.values():
            if now > ticket.deadline or stopped:
                ticket.timed_out = True
                ticket.cancel()
        with self._changed:
            waiting = list(self._waiting)
        for ticket in waiting:
            timed_out = now > ticket.deadline
            why: EdgespecError
            if stopped:
                why = Stopped("the server stopped before its turn", "ask again in a moment")
            elif timed_out:
                why = Busy("its turn did not come in time", "ask again in a moment")
            elif ticket.request.cancelled:
                why = ClientDisconnected("cancelled before its turn")
            else:
                continue
            with self._changed:
                self._waiting.remove(ticket)
            ticket.end(Event(error=why, timed_out=timed_out))

    def _deliver(self, running: Request, answer: Chunk | Exception) -> None:
        ticket = self._running[running]
        if isinstance(answer, Exception):
            del self._running[running]
            ticket.end(Event(error=answer))
            return
        ticket.sink(Event(chunk=answer))
        if running.ended:
            del self._running[running]
            result = running.result
            if result.finish == "cancelled" and time.monotonic() > self._last:
                ticket.end(Event(error=Stopped("the server stopped before this text was finished")))
            else:
                ticket.end(Event(result=result, timed_out=ticket.timed_out))
