"""Writers of answers, whole or as a stream of server-sent events; each API has one."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.engine.result import Chunk
from edgespec.runtimes.text.call_syntax import Event as Piece
from edgespec.server.answers import Choice, Part, Used
from edgespec.server.errors import Failure

Body = dict[str, Any]


@dataclass
class Writer(ABC):
    """Writes one answer."""

    id: str  # of the answer
    model: str  # its name
    prompt_tokens: int  # of all prompts
    choices: list[Choice]  # the texts
    logprobs: bool = False  # whether they are wanted
    usage: bool = False  # whether a stream ends with it
    echo: Body = field(default_factory=dict)  # what of the request the answer repeats, as the API's request gave it
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def used(self) -> Used:
        """Tokens in and out."""
        prompt, results = self.prompt_tokens, [choice.result for choice in self.choices if choice.result]
        written = sum(len(result.tokens) for result in results)
        cached = min(prompt, sum(result.stats.reused_tokens for result in results))
        return Used(prompt, written, cached, min(written, sum(choice.thought for choice in self.choices)))

    @abstractmethod
    def whole(self) -> Iterator[str]:
        """Write the answer in one piece, as some pieces of JSON (``listed``)."""

    def opening(self) -> Iterator[bytes]:
        """Begin a stream."""
        yield from ()

    @abstractmethod
    def piece(self, choice: Choice, found: Sequence[tuple[Piece, Part]], chunk: Chunk | None) -> Iterator[bytes]:
        """Write what was added to a choice; no chunk: it has ended."""

    @abstractmethod
    def closing(self) -> Iterator[bytes]:
        """End a stream whose choices have all ended."""

    @abstractmethod
    def failed(self, failure: Failure) -> Iterator[bytes]:
        """End a stream by an error."""


def as_json(body: Any) -> str:
    """Write JSON as it is sent."""
    return json.dumps(body, ensure_ascii=False)


def as_bytes(body: Any) -> bytes:
    """Write JSON as it is sent, in UTF-8; lone surrogates become question marks."""
    return as_json(body).encode("utf-8", "replace")


def listed(head: Body, name: str, items: Iterable[Body], tail: Body) -> Iterator[str]:
    """Write an object with a list between other fields, in pieces: a long answer must not keep others waiting."""
    yield f'{as_json(head)[:-1]}, "{name}": ['
    for at, item in enumerate(items):
        yield (", " if at else "") + as_json(item)
    yield f"], {as_json(tail)[1:]}"


def sse(body: Body, event: str | None = None) -> bytes:
    """Write a server-sent event."""
    named = f"event: {event}\n" if event else ""
    return f"{named}data: {as_json(body)}\n\n".encode("utf-8", "replace")
