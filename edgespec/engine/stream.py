"""A running request as its caller sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

from edgespec.engine.request import Request
from edgespec.engine.result import Chunk, Result
from edgespec.errors import InvalidRequest

_HANDOVER = 1e-4  # seconds


class Stream:
    """A running request: iterate for text as it comes; ``result`` is there at the end, or after ``close``.

    Attributes:
        request: the request, for a caller that drives it round by round.
    """

    def __init__(self, request: Request) -> None:
        self.request = request.begin()
        self._reading = threading.Lock()  # held while a round is read, by the thread of this number
        self._reader = 0
        self._chunks = self._run()
        self._closed = False

    def __repr__(self) -> str:
        text = self.request.text
        state = text.finish or ("closed" if self._closed else "running")
        return f"<Stream, {len(text.tokens)} tokens, {state}>"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if not self._reading.acquire(blocking=False):
            raise InvalidRequest("this stream is being read already, as by another thread", "read it in one thread")
        self._reader = threading.get_ident()
        try:
            return next(self._chunks)
        finally:
            self._reader = 0
            self._reading.release()

    def _run(self) -> Generator[Chunk, None, None]:
        request = self.request
        try:
            while not request.ended and (made := request.step()) is not None:
                if isinstance(made, Chunk):
                    yield made
                else:
                    time.sleep(_HANDOVER)  # gives waiting threads time to take the lock
            if rest := request.end():
                yield Chunk(rest, None)
        finally:
            request.close()

    def cancel(self) -> None:
        """End the request after the current round; safe from another thread."""
        self.request.cancel()

    def close(self) -> None:
        """End the request now; the text so far is in ``result``.

        If another thread reads it, it ends after the current round.
        """
        if self._reader == threading.get_ident():
            raise InvalidRequest("a callback cannot close its own stream", "use cancel()")
        if self._reader:
            self.cancel()
        with self._reading:
            self._chunks.close()
        self.request.close()  # a stream that was never read
        self._closed = True

    def keep_nothing(self) -> None:
        """Write nothing of this request on the disk from now on."""
        self.request.keep_nothing()

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens so far."""
        return self.request.tokens

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        return self.request.result
