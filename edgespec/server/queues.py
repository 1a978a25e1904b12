"""Queues of what clients ask for, in fair turns."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from edgespec.server.errors import Busy, Stopped

Item = TypeVar("Item")
Found = TypeVar("Found")


async def answer(done: asyncio.Future[Found], work: Callable[[], Awaitable[Found]]) -> None:
    """Run work and pass its result to a future, unless the future is already cancelled."""
    if done.done():
        return
    try:
        found = await work()
    except Exception as error:
        refuse([done], error)
    else:
        if not done.done():
            done.set_result(found)


def refuse(futures: Iterable[asyncio.Future[Found]], error: Exception) -> None:
    """Fail the futures that are not done yet."""
    for one in futures:
        if not one.done():
            one.set_exception(error)


class FairQueue(Generic[Item]):
    """Queue of work items by client and request, each queued once.  The client whose last turn is oldest is next."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[str, OrderedDict[Item, None]]] = OrderedDict()
        self._where: dict[Item, tuple[str, str]] = {}  # client and request of each
        self._counts: Counter[str] = Counter()  # items by client

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Item]:
        return iter([item for requests in self._clients.values() for items in requests.values() for item in items])

    def of(self, client: str) -> int:
        """How many items of a client wait."""
        return self._counts[client]

    def add(self, client: str, request: str, item: Item) -> None:
        """Queue an item after the others of its request."""
        self._clients.setdefault(client, OrderedDict()).setdefault(request, OrderedDict())[item] = None
        self._where[item] = client, request
        self._counts[client] += 1

    def take(self) -> tuple[str, str, Item]:
        """Take the next item, with its client and request; their turns are over.

        Raises:
            IndexError: none waits.
        """
        if not self._clients:
            raise IndexError("nothing waits")
        client, requests = next(iter(self._clients.items()))
        request, items = next(iter(requests.items()))
        item = next(iter(items))
        requests.move_to_end(request)
        self._clients.move_to_end(client)
        self.remove(item)
        return client, request, item

    def put_back(self, client: str, request: str, item: Item) -> None:
        """Undo a ``take``: the item is next again."""
        self.add(client, request, item)
        requests = self._clients[client]
        requests[request].move_to_end(item, last=False)
        requests.move_to_end(request, last=False)
        self._clients.move_to_end(client, last=False)

    def remove(self, item: Item) -> None:
        """Take an item out, wherever it is: as quickly from a long queue as from a short one."""
        if (where := self._where.pop(item, None)) is None:
            return
        client, request = where
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]
        requests = self._clients[client]
        del requests[request][item]
        if not requests[request]:
            del requests[request]
        if not requests:
            del self._clients[client]


class SerialQueue(FairQueue[Item]):
    """A queue whose items are done one at a time, by a task that runs while some wait.

    Args:
        do: does one; an exception in it ends the task, which the next item starts again.

    Attributes:
        doing: the item that is being done; None = none is.
    """

    def __init__(self, do: Callable[[Item], Awaitable[None]]) -> None:
        super().__init__()
        self._do = do
        self._task: asyncio.Task[None] | None = None
        self.doing: Item | None = None

    @property
    def busy(self) -> bool:
        """Whether an item is not done yet."""
        return self.doing is not None or len(self) > 0

    def add(self, client: str, request: str, item: Item) -> None:
        """Queue an item after the others of its request, and start the worker if it is idle."""
        super().add(client, request, item)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    def cancel(self) -> None:
        """End the current work; waiting work is not started."""
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while len(self):
            *_, self.doing = self.take()
            try:
                await self._do(self.doing)
            finally:
                self.doing = None


@dataclass(eq=False)
class Work(Generic[Found]):
    """A function to run in a thread; the event ``cancel`` is set when its client has disconnected."""

    run: Callable[[threading.Event], Found]
    done: asyncio.Future[Found]
    cancel: threading.Event = field(default_factory=threading.Event)


class FairWorkQueue(SerialQueue[Work[Any]]):
    """Jobs that run one at a time, clients taking turns, while texts are decoded in another thread.

    Args:
        what: description of the jobs for messages, such as "recordings".
        seconds: time limit for the jobs of a request.
        most: maximum number of waiting jobs.
        of_one: maximum number of waiting jobs of one client.
    """

    def __init__(self, what: str, seconds: float, most: int, of_one: int | None = None) -> None:
        super().__init__(lambda work: answer(work.done, lambda: asyncio.to_thread(work.run, work.cancel)))
        self._what, self._seconds, self._most, self._of_one = what, seconds, most, of_one or most

    async def results(self, client: str, runs: Sequence[Callable[[threading.Event], Found]]) -> list[Found]:
        """Line up the works of a request -> their results, in order; what is not done when this ends is dropped.

        Raises:
            Busy: too many wait already, or they are not done in time.
            Exception: as one of them failed.
        """
        if len(self) + len(runs) > self._most or self.of(client) + len(runs) > self._of_one:
            raise Busy(f"{len(self)} {self._what} wait already", "ask again in a moment")
        loop, request = asyncio.get_running_loop(), secrets.token_hex(12)
        works = [Work(run, loop.create_future()) for run in runs]
        for work in works:
            self.add(client, request, work)
        futures = [work.done for work in works]
        try:
            ended, late = await asyncio.wait(futures, timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION)
            if failed := [error for one in ended if (error := one.exception())]:
                raise failed[0]
            if late:
                raise Busy(f"{self._what}: not done in {self._seconds:g} s", "ask for less at once")
            return [one.result() for one in futures]
        finally:
            for work in works:
                self.remove(work)
                work.cancel.set()
                work.done.cancel()

    def stop(self) -> None:
        """End what waits."""
        refuse((work.done for work in self), Stopped("the server stopped before its turn", "ask again in a moment"))
