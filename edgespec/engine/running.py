"""A batch that requests join and leave between rounds: continuous batching, for whoever serves many at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from edgespec.decoding.settings import Settings
from edgespec.engine.batch import Answer, BatchSessions, round_of
from edgespec.engine.request import Stream
from edgespec.engine.result import Chunk

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


class RunningBatch:
    """Requests that are decoded together, a round of each at a time.  One thread drives it.

    Args:
        engine: of the bundle.
        width: most requests at once.

    Attributes:
        streams: the requests in it.
        width: as above.
    """

    def __init__(self, engine: Engine, width: int) -> None:
        self.width = width
        self.streams: list[Stream] = []
        self._engine = engine
        native = engine.operators.kind == "native" and width > 1
        self._sessions = BatchSessions(engine, width) if native else None

    @property
    def room(self) -> int:
        """How many more requests may join now."""
        return self.width - len(self.streams)

    def join(
        self,
        prompt: Sequence[int],
        settings: Settings,
        cancel: threading.Event | None = None,
        owner: str | None = None,
    ) -> Stream:
        """Begin a request; its first tokens come with the next round.

        Args:
            prompt: token ids.
            settings: as for ``Engine.stream``.
            cancel: set it to end the request after the round at hand.
            owner: whose it is; what was computed of the texts of others is not taken up.

        Raises:
            InvalidRequest: as ``Engine.stream``, or there is no room.
            BudgetError: it does not fit the memory beside the others.
        """
        if not self.room:
            raise ValueError(f"expected room for a request, got {len(self.streams)} of {self.width} running")
        pool = self._sessions.pool if self._sessions else None
        stream = Stream(self._engine.usable, prompt, settings, cancel, sessions=pool, owner=owner)
        self.streams.append(stream)
        return stream

    def round(self) -> Iterator[tuple[Stream, Answer]]:
        """One round of every request; those that have ended or failed are no longer in the batch.

        Yields:
            each request with the text of its round, or with the error that ended it, and it alone.
        """
        batch = self._sessions.batch if self._sessions else None
        for stream, got in round_of(list(self.streams), batch, self._engine.lock):
            if isinstance(got, Exception):
                stream.close()
            elif stream.ended:
                got = Chunk(got.text + stream.end(), got.round, got.pieces)
            else:
                yield stream, got
                continue
            self.streams.remove(stream)
            yield stream, got

    def close(self) -> None:
        """End all requests where they stand."""
        for stream in self.streams:
            stream.close()
        self.streams.clear()
        if self._sessions is not None:
            self._sessions.close()
            self._sessions = None
