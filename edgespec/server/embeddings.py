"""OpenAI's embeddings: what is asked, whose text is next, and how vectors are written."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.manifest import Pooling
from edgespec.server.errors import Busy, Stopped
from edgespec.server.queues import OneByOne, all_done, answer, refuse
from edgespec.server.requests import Count, Ids, Name, Strict
from edgespec.server.scheduler import Limits
from edgespec.server.writer import as_json

MOST_INPUTS = 2048  # texts of a request, as OpenAI takes
MOST_WAITING = 4 * MOST_INPUTS  # texts of all requests to a model
Vector = NDArray[np.float32]  # [dimensions]


class HowEmbedded(Strict):
    """The field ``edgespec``: ``pooling`` of the tokens' states; None = as the model says."""

    pooling: Pooling | None = None


class EmbeddingRequest(Strict):
    """``POST /v1/embeddings``."""

    ignored: ClassVar[tuple[str, ...]] = ("user", "metadata", "input_type", "truncate_prompt_tokens")
    model: Name
    input: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Count, Field(ge=1)] | None = None
    edgespec: HowEmbedded = HowEmbedded()

    @property
    def texts(self) -> list[str | list[int]]:
        """Every text.

        Raises:
            InvalidRequest: an empty one.
        """
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        found: list[Any] = [self.input] if one else list(self.input)
        if not all(found):
            raise InvalidRequest(f"input {found.index('')} is empty: expected a text")
        return found


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model.

    Attributes:
        model: its name.
        encoding: of the vectors.
        pooling, dimensions: as of ``Engine.embed``.
    """

    model: str
    encoding: str
    pooling: Pooling | None
    dimensions: int | None


@dataclass(eq=False)
class _Work:
    text: Sequence[int]
    wanted: Wanted
    done: asyncio.Future[Vector]
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Embedder:
    """Embeds texts, one at a time, of each client in turn; beside it other texts are decoded.

    Attributes:
        engine: of the model.
        limits: of the server.
    """

    engine: Engine
    limits: Limits
    _waiting: OneByOne[_Work] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = OneByOne(self._do)

    async def vectors(self, client: str, request: str, texts: Sequence[Sequence[int]], wanted: Wanted) -> list[Vector]:
        """Embed the texts of a request.

        Raises:
            Busy: too many wait already, or they do not come in time.
            InvalidRequest, BudgetError: as of ``Engine.embed``.
        """
        if len(self._waiting) + len(texts) > MOST_WAITING:
            raise Busy(f"{len(self._waiting)} texts wait to be embedded already", "ask again in a moment")
        loop = asyncio.get_running_loop()
        works = [_Work(text, wanted, loop.create_future()) for text in texts]
        try:
            return await all_done(self._waiting, client, request, works, self.limits.seconds)
        except asyncio.TimeoutError:
            raise Busy(f"not embedded in {self.limits.seconds:g} s", "ask for fewer texts at once") from None

    def stop(self) -> None:
        """End what waits."""
        stopped = Stopped("the server stopped before its turn", "ask again in a moment")
        refuse((work.done for work in self._waiting), stopped)

    async def _do(self, work: _Work) -> None:
        await answer(work.done, lambda: self._vector(work))

    def _vector(self, work: _Work) -> Vector:
        how = work.wanted
        (found,) = self.engine.embed([work.text], pooling=how.pooling, dimensions=how.dimensions, cancel=work.cancel)
        return found


def written(vectors: Sequence[Vector], wanted: Wanted, tokens: int) -> Iterator[str]:
    """Write an answer, as some pieces of JSON."""
    yield '{"object": "list", "data": ['
    for at, vector in enumerate(vectors):
        coded = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        value = coded if wanted.encoding == "base64" else vector.tolist()
        yield (", " if at else "") + as_json({"object": "embedding", "index": at, "embedding": value})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield f"], {as_json({'model': wanted.model, 'usage': usage})[1:]}"
