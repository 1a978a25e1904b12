"""Whose pictures, or recordings, a model reads next: they become rows of its prompt before the text is lined up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.engine.engine import Engine
from edgespec.runtimes.audio.audio import Audio
from edgespec.runtimes.images.image import Image
from edgespec.server.errors import Busy, Stopped
from edgespec.server.pictures import Given
from edgespec.server.queues import OneByOne, answer, refuse
from edgespec.server.scheduler import Limits

MOST_WAITING, MOST_OF_ONE = 8, 6  # requests whose pictures wait for a model; of one client


@dataclass(eq=False)
class _Work:
    ids: Sequence[int]
    pictures: Sequence[Given]
    owner: str | None
    done: asyncio.Future[list[int]]


@dataclass(eq=False)
class Viewer:
    """Has a model look at pictures, a request at a time, of each client in turn; beside it texts are decoded.

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
        """Whether a request's pictures are not read yet."""
        return self._waiting.busy

    async def prompt(
        self, client: str, ids: Sequence[int], pictures: Sequence[Given], owner: str | None
    ) -> Sequence[int]:
        """Have pictures encoded -> the prompt with their rows in it.

        Args:
            client: whose turn it takes.
            ids: of the prompt, with the image's token for each row.
            pictures: uint8 [h, w, 3], or recordings, float32 [n], in order.
            owner: as for ``Engine.place``.

        Raises:
            Busy: too many wait already, or it takes too long.
        """
        if len(self._waiting) >= MOST_WAITING or self._waiting.of(client) >= MOST_OF_ONE:
            raise Busy(f"pictures of {len(self._waiting)} requests wait already", "ask again in a moment")
        work = _Work(ids, pictures, owner, asyncio.get_running_loop().create_future())
        self._waiting.add(client, "", work)
        try:
            return await asyncio.wait_for(work.done, self.limits.seconds)
        except asyncio.TimeoutError:
            raise Busy(f"pictures not read in {self.limits.seconds:g} s", "send smaller ones") from None
        finally:
            self._waiting.remove(work)

    def stop(self) -> None:
        """End what waits."""
        stopped = Stopped("the server stopped before its turn", "ask again in a moment")
        refuse((work.done for work in self._waiting), stopped)

    async def _do(self, work: _Work) -> None:
        await answer(work.done, lambda: self._look(work))

    def _look(self, work: _Work) -> list[int]:
        return self.engine.place(
            work.ids, [Image(one) if one.ndim > 1 else Audio(one) for one in work.pictures], work.owner
        )
