"""The processes that read requests, and whose turn it is.

One reads small requests, the other one large ones and those with a grammar: whoever sends much waits for others who do.
Each request has limits of time and memory; what goes beyond them ends the process, and the next request starts one.
"""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import EdgespecError
from edgespec.server.apis import APIS, Kind
from edgespec.server.errors import Busy, Failure, Stopped
from edgespec.server.queues import OneByOne, answer, refuse
from edgespec.server.reading import HEAD, MEMORY, Known, Read, command, understood

MOST_NOTED = 256  # fields that are logged
SMALL = 1 << 14  # bytes of a small request
QUICK, SLOW = 2, 6  # seconds of processor time for a small one, and for others
WAIT = 60.0  # seconds of the clock, where processor time is not limited
MOST_WAITING, MOST_OF_ONE = 256, 192  # requests that wait to be read; of one client
MOST_BYTES, BYTES_OF_ONE = 32 << 20, 24 << 20  # of their bodies
_ONE_THREAD = {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


Told = tuple[dict[str, Any], list["array[int]"]]  # what a request says, and the token ids of its prompts
LookUp = Callable[[str], bytes]


@dataclass(eq=False)
class _Work:
    kind: Kind
    body: bytes
    earlier: bytes
    client: str
    done: asyncio.Future[Told]


class Readers:
    """Reads requests, the clients in turn.

    Args:
        models: that may be asked.
        log: takes a line for each field that is not known; None = none is written.
    """

    def __init__(self, models: Sequence[Known], log: Callable[[str], None] | None = None) -> None:
        self._known = {known.name: known for known in models}
        self._log, self._noted = log or (lambda _: None), set[tuple[str, str]]()
        self._small = _Lane(models, QUICK, False)
        self._large = _Lane(models, SLOW, True)

    async def start(self) -> None:
        """Start the process for small requests, so that the first one need not wait for it.

        Raises:
            EdgespecError: it cannot be started.
        """
        await self._small.start()

    async def close(self) -> None:
        """End the processes."""
        await self._small.close()
        await self._large.close()

    async def read(self, client: str, kind: Kind, body: bytes, look_up: LookUp | None = None) -> Read:
        """Read what is asked.

        Args:
            client: whose turn it takes.
            kind: of the request.
            body: as it came.
            look_up: gives the messages of an earlier response by its id, as JSON.

        Raises:
            Failure: it cannot be answered, or takes too much to read.
            Busy: too many wait to be read.
        """
        found, prompts = await self.ask(client, kind, body)
        if (previous := found.get("previous")) is not None and look_up is not None:
            found, prompts = await self.ask(client, kind, body, look_up(previous))
        return understood(self._known, found, prompts)

    async def ask(self, client: str, kind: Kind, body: bytes, earlier: bytes = b"") -> Told:
        """Read what is asked, as ``Reader.read`` gives it; errors as of ``read``."""
        found: dict[str, Any] = {"elsewhere": True}
        prompts: list[array[int]] = []
        if len(body) + len(earlier) <= SMALL:
            found, prompts = await self._small.ask(client, kind, body, earlier)
        if found.get("elsewhere"):
            found, prompts = await self._large.ask(client, kind, body, earlier)
        self._note(kind, found.pop("unknown", ()))
        return found, prompts

    def _note(self, kind: Kind, names: Iterable[str]) -> None:
        """Log fields that are not known, each once."""
        for name in names:
            if (kind, name) not in self._noted and len(self._noted) < MOST_NOTED:
                self._noted.add((kind, name))
                self._log(f"{APIS[kind].path}: ignored the field {name!r}, which this server does not know")


class _Lane:
    """One process, and who waits for it."""

    def __init__(self, models: Sequence[Known], seconds: int, grammars: bool) -> None:
        self._command, self._seconds = command(models, grammars), seconds
        self._waiting: OneByOne[_Work] = OneByOne(lambda work: answer(work.done, lambda: self._exchange(work)))
        self._process: Process | None = None
        self._starting = asyncio.Lock()

    async def ask(self, client: str, kind: Kind, body: bytes, earlier: bytes) -> Told:
        waiting = [len(work.body) for work in self._waiting]
        own = [len(work.body) for work in self._waiting if work.client == client]
        if len(waiting) >= MOST_WAITING or sum(waiting) > MOST_BYTES:
            raise Busy(f"{len(waiting)} requests wait to be read already", "ask again in a moment")
        if len(own) >= MOST_OF_ONE or sum(own) > BYTES_OF_ONE:
            raise Busy(f"{len(own)} requests of this client wait to be read already", "ask again in a moment")
        work = _Work(kind, body, earlier, client, asyncio.get_running_loop().create_future())
        self._waiting.add(client, "", work)
        try:
            return await work.done
        except asyncio.CancelledError:
            self._waiting.remove(work)
            raise

    async def start(self) -> Process:
        """Start the process, which has opened the tokenizer."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return self._process
            made = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=os.environ | _ONE_THREAD
            )
            self._process = made
            try:
                found, _ = await asyncio.wait_for(_receive(made), WAIT)
            except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError) as error:
                await self.close()
                raise EdgespecError("the process that reads requests could not be started") from error
            if refused := found.get("refused"):
                await self.close()
                raise EdgespecError(refused[0])
            return made

    async def close(self) -> None:
        """End the process."""
        self._waiting.cancel()
        refuse((work.done for work in self._waiting), Stopped("the server is stopping"))
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _exchange(self, work: _Work) -> Told:
        process = await self.start()
        assert process.stdin is not None
        head = HEAD.pack(self._seconds, list(APIS).index(work.kind), len(work.body), len(work.earlier))
        try:
            process.stdin.write(head + work.body + work.earlier)
            await process.stdin.drain()
            found, prompts = await asyncio.wait_for(_receive(process), WAIT)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError) as error:
            await self._end()
            limit = f"{self._seconds} s of processor time or {MEMORY >> 20} MiB"
            raise Failure(f"reading this request needs more than {limit}: expected a smaller one") from error
        if refused := found.get("refused"):
            raise Failure(*refused)
        return found, prompts


async def _receive(process: Process) -> Told:
    """Receive what a process says."""
    stdout = process.stdout
    assert stdout is not None
    size = int.from_bytes(await stdout.readexactly(8), "little")
    found = json.loads(await stdout.readexactly(size))
    prompts = []
    for length in found.pop("lengths"):
        prompt = array("i")
        prompt.frombytes(await stdout.readexactly(length * prompt.itemsize))
        prompts.append(prompt)
    found["pictures"] = []
    for size, *width in found.pop("sizes"):
        if width:
            pixels = np.frombuffer(await stdout.readexactly(size * width[0] * 3), np.uint8)
            found["pictures"].append(pixels.reshape(size, width[0], 3))
        else:
            found["pictures"].append(np.frombuffer(await stdout.readexactly(size * 4), np.float32))
    return found, prompts
