"""One thread that decodes everybody's requests together: they join and leave a running batch between rounds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.request import Stream
from edgespec.engine.result import Chunk, Result
from edgespec.engine.running import RunningBatch
from edgespec.errors import BudgetError, EdgespecError
from edgespec.server.limits import Limits


class Busy(EdgespecError):
    """The server cannot take a request now, or could not begin it in time."""


@dataclass(frozen=True)
class Event:
    """What a request has to tell: text, or how it ended.

    Attributes:
        chunk: text of a round; None = the last event.
        result: at the end; None where it failed.
        error: why it failed.
        late: it was cut because its time was over.
    """

    chunk: Chunk | None = None
    result: Result | None = None
    error: Exception | None = None
    late: bool = False


@dataclass(eq=False)
class Ticket:
    """A request on its way.

    Attributes:
        prompt: token ids.
        settings: as for ``Engine.stream``.
        sink: called with every event, in the decoding thread: it must be quick and must not raise.
        deadline: when its time is over, by ``time.monotonic``.
        cancelled: set by ``cancel``.
        done: set after its last event.
        late: its time was over before it had ended.
    """

    prompt: Sequence[int]
    settings: Settings
    sink: Callable[[Event], None]
    deadline: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    late: bool = False

    def cancel(self) -> None:
        """End it with the next round; nobody need wait for the rest."""
        self.cancelled.set()

    def end(self, event: Event) -> None:
        """Tell the last event."""
        self.sink(event)
        self.done.set()


class Scheduler:
    """Decodes requests, first come first served, ``Limits.parallel`` of them together.

    Args:
        engine: of the bundle.
        limits: how many and how long.
    """

    def __init__(self, engine: Engine, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._batch = RunningBatch(engine, self.limits.parallel)
        self._waiting: deque[Ticket] = deque()
        self._running: dict[Stream, Ticket] = {}
        self._changed = threading.Condition()
        self._stopping = False
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

    def submit(self, prompt: Sequence[int], settings: Settings, sink: Callable[[Event], None]) -> Ticket:
        """Line up a request.

        Raises:
            Busy: the queue is full, or the server stops.
        """
        ticket = Ticket(prompt, settings, sink, time.monotonic() + self.limits.seconds)
        with self._changed:
            if self._stopping:
                raise Busy("the server is stopping", "ask again in a moment")
            if len(self._waiting) >= self.limits.queue + max(0, self._batch.room):
                raise Busy(f"{len(self._waiting)} requests wait already", "ask again in a moment")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """Take no more requests, give those at hand ``Limits.grace`` seconds, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(self.limits.grace)
        for ticket in [*self._waiting, *self._running.values()]:
            ticket.cancel()
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
                for stream, answer in self._batch.round():
                    self._deliver(stream, answer)
            except Exception as error:  # a mistake of ours: those at hand are told, the server goes on
                self._batch.close()
                for ticket in self._running.values():
                    ticket.end(Event(error=error))
                self._running.clear()
        self._batch.close()

    def _admit(self) -> None:
        """Let waiting requests join."""
        while self._waiting and self._batch.room:
            ticket = self._waiting.popleft()
            try:
                stream = self._batch.join(ticket.prompt, ticket.settings, ticket.cancelled)
            except BudgetError as error:
                if self._running:  # when they have ended there is room
                    self._waiting.appendleft(ticket)
                    return
                ticket.end(Event(error=error))
            except Exception as error:
                ticket.end(Event(error=error))
            else:
                self._running[stream] = ticket

    def _look_at_clocks(self) -> None:
        """Cut what takes too long, and drop what waited too long or is not wanted any more."""
        now = time.monotonic()
        for ticket in self._running.values():
            if now > ticket.deadline:
                ticket.late = True
                ticket.cancel()
        for ticket in list(self._waiting):
            late = now > ticket.deadline
            if late or ticket.cancelled.is_set():
                self._waiting.remove(ticket)
                why = "its turn did not come in time" if late else "cancelled before its turn"
                ticket.end(Event(error=Busy(why, "ask again in a moment"), late=late))

    def _deliver(self, stream: Stream, answer: Chunk | Exception) -> None:
        ticket = self._running[stream]
        if isinstance(answer, Exception):
            del self._running[stream]
            ticket.end(Event(error=answer))
            return
        ticket.sink(Event(chunk=answer))
        if stream.ended:
            del self._running[stream]
            ticket.end(Event(result=stream.result, late=ticket.late))
