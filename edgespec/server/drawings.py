"""OpenAI's pictures: what is asked, whose picture is next, and how it is written."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from edgespec.decoding.settings import MOST_GUIDANCE
from edgespec.engine.drawing import Drawing
from edgespec.engine.engine import Engine
from edgespec.server.errors import Busy, Stopped
from edgespec.server.queues import OneByOne, all_done, answer, refuse
from edgespec.server.requests import SEED, Count, Name, Number, Strict
from edgespec.server.scheduler import Limits
from edgespec.server.writer import as_json

MOST_PROMPT, MOST_PICTURES = 4096, 10  # characters, and pictures of a request, as OpenAI takes
MOST_WAITING = 64  # pictures of all requests to a model
HOW = ("method_used", "reason", "lossless", "exact", "approximations")


class ImageRequest(Strict):
    """``POST /v1/images/generations``; ``guidance_scale`` and what follows are edgespec's own."""

    ignored: ClassVar[tuple[str, ...]] = ("user", "quality", "style", "background", "moderation", "output_compression")
    model: Name
    prompt: Annotated[str, Field(min_length=1, max_length=MOST_PROMPT)]
    n: Annotated[Count, Field(ge=1, le=MOST_PICTURES)] = 1
    size: Literal["auto"] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    guidance_scale: Annotated[Number, Field(ge=0, le=MOST_GUIDANCE)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-SEED, le=SEED)] | None = None
    method: Name | None = None
    accept: Name | None = None

    def changes(self) -> dict[str, Any]:
        """Say what it sets of ``Settings``."""
        names = ("guidance_scale", "temperature", "seed", "method", "accept")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(eq=False)
class _Work:
    prompt: str
    changes: dict[str, Any]
    done: asyncio.Future[Drawing]
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Drawer:
    """Draws pictures, one at a time, of each client in turn; beside it texts are decoded.

    Attributes:
        engine: of the model.
        limits: of the server.
    """

    engine: Engine
    limits: Limits
    _waiting: OneByOne[_Work] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = OneByOne(self._do)

    @property
    def busy(self) -> bool:
        """Whether a picture is not drawn yet."""
        return self._waiting.busy

    async def pictures(self, client: str, request: str, asked: ImageRequest) -> list[Drawing]:
        """Draw the pictures of a request; with a seed the next ones have the seeds that follow.

        Raises:
            Busy: too many wait already, or they do not come in time.
            InvalidRequest, BudgetError: as of ``Engine.draw``.
        """
        if len(self._waiting) + asked.n > MOST_WAITING:
            raise Busy(f"{len(self._waiting)} pictures wait to be drawn already", "ask again in a moment")
        loop, changes = asyncio.get_running_loop(), asked.changes()
        each = [changes | ({} if asked.seed is None else {"seed": asked.seed + at}) for at in range(asked.n)]
        works = [_Work(asked.prompt, one, loop.create_future()) for one in each]
        try:
            return await all_done(self._waiting, client, request, works, self.limits.seconds)
        except asyncio.TimeoutError:
            raise Busy(f"not drawn in {self.limits.seconds:g} s", "ask for fewer pictures at once") from None

    def stop(self) -> None:
        """End what waits."""
        stopped = Stopped("the server stopped before its turn", "ask again in a moment")
        refuse((work.done for work in self._waiting), stopped)

    async def _do(self, work: _Work) -> None:
        await answer(work.done, lambda: self.engine.draw(work.prompt, cancel=work.cancel, **work.changes))


def drawn(drawings: Sequence[Drawing]) -> Iterator[str]:
    """Write an answer, as some pieces of JSON; ``edgespec`` says how the codes of each picture were decoded."""
    yield f'{{"created": {int(time.time())}, "data": ['
    for at, one in enumerate(drawings):
        coded = base64.b64encode(one.png()).decode("ascii")
        yield (", " if at else "") + as_json({"b64_json": coded})
    how = [{name: getattr(one.result, name) for name in HOW} for one in drawings]
    height, width, _ = drawings[0].pixels.shape
    yield f"], {as_json({'output_format': 'png', 'size': f'{width}x{height}', 'edgespec': how})[1:]}"
