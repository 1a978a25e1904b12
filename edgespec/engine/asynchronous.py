"""Requests for an event loop: each runs in its own thread from the first token to the last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from types import TracebackType
from typing import TypeVar

from edgespec.engine.result import Chunk, Result
from edgespec.engine.stream import Stream
from edgespec.errors import InvalidRequest

Made = TypeVar("Made")


async def in_thread(work: Callable[[], Made], cancel: threading.Event) -> Made:
    """Wait for work that a thread does; the cancellation of the task sets ``cancel``, and the work ends soon."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Made] = loop.create_future()

    def settle(made: Made | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(made)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        made, failed = None, None
        try:
            made = work()
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed, so the reader is gone
            loop.call_soon_threadsafe(settle, made, failed)

    threading.Thread(target=run, name="edgespec-request").start()
    try:
        return await done
    except asyncio.CancelledError:
        cancel.set()
        raise


class AsyncStream:
    """A running request: ``async for`` yields text; ``result`` is complete at the end.

    It starts when the first piece is awaited.  Call ``aclose`` after leaving the loop early, or use ``async with``.
    Cancelling the task also ends it.  Only one task reads it.
    """

    def __init__(self, start: Callable[[threading.Event], Stream]) -> None:
        self._start, self._cancel = start, threading.Event()
        self._streams: list[Stream] = []  # none until the thread has begun it
        self._pieces: asyncio.Queue[Chunk | BaseException | None] | None = None
        self._ended = False

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        if not self._streams:
            raise InvalidRequest("this stream has not begun: expected one that was read", "use `async for` on it")
        return self._streams[0].result

    def cancel(self) -> None:
        """End the request after the current round; safe from another thread."""
        self._cancel.set()

    async def aclose(self) -> None:
        """End the request, and wait until its round has ended."""
        self._cancel.set()
        while self._pieces is not None and not self._ended:
            with suppress(Exception):
                self._take(await self._pieces.get())

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._pieces is None:
            self._pieces = asyncio.Queue()
            given = self._start, self._cancel, self._streams, asyncio.get_running_loop(), self._pieces
            threading.Thread(target=_decode, args=given, name="edgespec-request").start()
        if self._ended:
            raise StopAsyncIteration
        try:
            piece = self._take(await self._pieces.get())
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _take(self, piece: Chunk | BaseException | None) -> Chunk | None:
        self._ended = not isinstance(piece, Chunk)
        if isinstance(piece, BaseException):
            raise piece
        return piece

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._cancel.set()

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running" if self._pieces else "not begun"
        return f"<AsyncStream, {state}>"


def _decode(
    start: Callable[[threading.Event], Stream],
    cancel: threading.Event,
    streams: list[Stream],
    loop: asyncio.AbstractEventLoop,
    pieces: asyncio.Queue[Chunk | BaseException | None],
) -> None:
    """Run a request and pass on its pieces; it ends when the loop is closed.

    It holds no ``AsyncStream``, so that an unreferenced stream ends its request.
    """
    last: BaseException | None = None
    try:
        streams.append(start(cancel))
        with closing(streams[0]):
            for chunk in streams[0]:
                loop.call_soon_threadsafe(pieces.put_nowait, chunk)
    except BaseException as error:
        last = error
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(pieces.put_nowait, last)
