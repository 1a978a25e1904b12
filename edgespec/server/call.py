"""Requests to APIs other than text generation, as passed to ``respond``, and streamed answers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.metrics import Metrics
from edgespec.server.queues import FairWorkQueue
from edgespec.server.scheduler import Event, PendingRequest, Scheduler

Found = TypeVar("Found")


class ModelTokens(Protocol):
    """The tokens of a model, in the process that reads (``reading.ModelTokens``)."""

    @property
    def known(self) -> Any:
        """Facts of the model (``reading.ModelInfo``)."""

    @property
    def codec(self) -> TextCodec:
        """Its tokenizer."""


class Jobs(Protocol):
    """The work of a model (``jobs.Jobs``)."""

    engine: Engine
    name: str  # of the model
    metrics: Metrics
    scheduler: Scheduler

    def queue(self, what: str, most: int, most_of_one: int) -> FairWorkQueue:
        """Return the queue of an API's work."""

    async def wait(self, request: Request, work: Coroutine[Any, Any, Found]) -> Found:
        """Wait for work of a request, which a client that leaves cancels."""

    def submit(
        self, prompt: Sequence[int], settings: Settings, put: Callable[[Event], None], client: str, request: str
    ) -> PendingRequest:
        """Queue a text; the event loop calls ``put`` with its events."""


@dataclass(frozen=True)
class Call:
    """A request that was read."""

    asked: dict[str, Any]  # plain data from ``Api.read``
    prompts: list[array[int]]  # token ids of each prompt
    client: str  # whose turn it takes
    request: Request


async def in_pieces(pieces: Iterator[str]) -> Response:
    """Answer with JSON that is written in pieces; others are answered between them."""
    found = []
    for piece in pieces:
        found.append(piece)
        await asyncio.sleep(0)
    return Response("".join(found).encode("utf-8", "replace"), media_type="application/json")
