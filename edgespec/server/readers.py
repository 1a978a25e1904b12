"""Processes that parse requests, and the order of the requests.

One process parses small requests.  The other one parses large requests and those with a grammar, so they do not delay
small ones.  Each request has limits of time and memory.  Exceeding them ends the process, and the next request starts a
new one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
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
from edgespec.server.held import Held
from edgespec.server.queues import SerialQueue, answer, refuse
from edgespec.server.reading import HEAD, MEMORY, Asking, ModelInfo, ParsedRequest, command, kinds

MOST_NOTED = 256  # fields that are logged
SMALL = 1 << 14  # bytes of a small request
QUICK, SLOW = 2, 6  # seconds of processor time for a small one, and for others
WAIT = 60.0  # seconds of the clock, where processor time is not limited
MOST_WAITING, MOST_OF_ONE = 256, 192  # requests that wait to be read; of one client
PIECE = 1 << 18  # bytes that are written to a process, or read from it, at once: others are answered between them
_ONE_THREAD = {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


Told = tuple[dict[str, Any], list["array[int]"]]  # a parsed request, and the token ids of its prompts
LookUp = Callable[[str], bytes]


@dataclass(eq=False)
class _Work:
    kind: Asking
    body: bytes
    earlier: bytes
    client: str
    held: Held | None
    done: asyncio.Future[Told]


class Readers:
    """Reads requests, the clients in turn.

    Args:
        models: that may be asked.
        log: receives a line for each unknown field; None = no lines.
    """

    def __init__(self, models: Sequence[ModelInfo], log: Callable[[str], None] | None = None) -> None:
        self._log, self._noted = log or (lambda _: None), set[tuple[str, str]]()
        self._small = WorkerQueue(models, QUICK, False)
        self._large = WorkerQueue(models, SLOW, True)

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

    async def read(
        self, client: str, kind: Kind, body: bytes, look_up: LookUp | None = None, held: Held | None = None
    ) -> ParsedRequest:
        """Parse a request.

        Args:
            client: whose turn it takes.
            kind: of the request.
            body: as received.
            look_up: returns the messages of an earlier response by its id, as JSON.
            held: counts the bytes of the result; None = not counted.

        Raises:
            Failure: it cannot be answered, or takes too much to read.
            Busy: too many requests wait to be parsed, or they hold too much.
        """
        found, prompts = await self.ask(client, kind, body, held=held)
        if (previous := found.get("previous")) is not None and look_up is not None:
            found, prompts = await self.ask(client, kind, body, look_up(previous), held)
        return ParsedRequest.of(found, prompts)

    async def ask(self, client: str, kind: Asking, body: bytes, earlier: bytes = b"", held: Held | None = None) -> Told:
        """Parse a request -> the result of ``Reader.read``; raises the errors of ``read``."""
        found: dict[str, Any] = {"elsewhere": True}
        prompts: list[array[int]] = []
        if len(body) + len(earlier) <= SMALL:
            found, prompts = await self._small.ask(client, kind, body, earlier, held)
        if found.get("elsewhere"):
            found, prompts = await self._large.ask(client, kind, body, earlier, held)
        self._note(kind, found.pop("unknown", ()))
        return found, prompts

    def _note(self, kind: Asking, names: Iterable[str]) -> None:
        """Log fields that are not known, each once."""
        for name in names:
            if (kind, name) not in self._noted and len(self._noted) < MOST_NOTED:
                self._noted.add((kind, name))
                self._log(f"{APIS[kind].path}: ignored the field {name!r}, which this server does not know")


class WorkerQueue:
    """One process, and who waits for it."""

    def __init__(self, models: Sequence[ModelInfo], seconds: int, grammars: bool) -> None:
        self._command, self._seconds = command(models, grammars), seconds
        self._waiting: SerialQueue[_Work] = SerialQueue(lambda work: answer(work.done, lambda: self._exchange(work)))
        self._process: Process | None = None
        self._starting = asyncio.Lock()

    async def ask(self, client: str, kind: Asking, body: bytes, earlier: bytes, held: Held | None) -> Told:
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{len(self._waiting)} requests wait to be read already", "ask again in a moment")
        if (own := self._waiting.of(client)) >= MOST_OF_ONE:
            raise Busy(f"{own} requests of this client wait to be read already", "ask again in a moment")
        work = _Work(kind, body, earlier, client, held, asyncio.get_running_loop().create_future())
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
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,
            )
            self._process = made
            try:
                found, _ = await asyncio.wait_for(_receive(made, None), WAIT)
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
        head = HEAD.pack(self._seconds, kinds().index(work.kind), len(work.body), len(work.earlier))
        try:
            found, prompts = await asyncio.wait_for(self._told(process, head, work), WAIT)
        except asyncio.TimeoutError as error:
            await self._end()
            raise Failure(f"reading this request takes more than {WAIT:g} s: expected a smaller one") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            with suppress(asyncio.TimeoutError):  # it may have closed its pipes and still be running
                await asyncio.wait_for(process.wait(), 1)
            code = process.returncode
            await self._end()
            raise ended(code, self._seconds) from error
        except EdgespecError:
            raise
        except BaseException:  # what it says now would be taken for the answer to the next request
            await self._end()
            raise
        if refused := found.get("refused"):
            raise Failure(*refused)
        return found, prompts

    async def _told(self, process: Process, head: bytes, work: _Work) -> Told:
        """Write a request to the process, and receive the result."""
        assert process.stdin is not None
        for data in (head, work.body, work.earlier):
            for at in range(0, len(data), PIECE):
                process.stdin.write(memoryview(data)[at : at + PIECE])
                await process.stdin.drain()
        return await _receive(process, work.held)


def ended(code: int | None, seconds: int) -> Failure:
    """Say why a process ended in the middle of a request.

    Args:
        code: that it ended with, of a signal less than 0; None = it has not ended.
        seconds: of processor time that it had.
    """
    name = "" if code is None or code >= 0 else signal.Signals(-code).name
    if name in ("SIGXCPU", "SIGKILL"):  # the time limit, or the system's out-of-memory killer
        limit = f"{seconds} s of processor time or {MEMORY >> 20} MiB"
        return Failure(f"reading this request needs more than {limit}: expected a smaller one")
    if name:
        return Failure(f"reading this request failed: {name}, where it may have more than {MEMORY >> 20} MiB")
    return Failure(f"the process that reads requests ended with exit code {code}", 500, "server_error")


async def _receive(process: Process, held: Held | None) -> Told:
    """Receive the result of a process, and count its bytes if ``held`` is given."""
    stdout = process.stdout
    assert stdout is not None
    size = int.from_bytes(await stdout.readexactly(8), "little")
    found = json.loads(await stdout.readexactly(size))
    prompts = []
    lengths, blobs, sizes = found.pop("lengths"), found.pop("blobs"), found.pop("sizes")
    try:
        if held is not None:
            held.add(sum(blobs.values()) + sum(_bytes(*size) for size in sizes))
    except Busy:
        for size in [*(4 * length for length in lengths), *blobs.values(), *(_bytes(*size) for size in sizes)]:
            for at in range(0, size, PIECE):
                await stdout.readexactly(min(PIECE, size - at))
        raise
    for length in lengths:
        prompt = array("i")
        prompt.frombytes(await _exactly(stdout, length * prompt.itemsize))
        prompts.append(prompt)
    found["blobs"] = {name: bytes(await _exactly(stdout, length)) for name, length in blobs.items()}
    found["pictures"] = []
    for size in sizes:
        data = await _exactly(stdout, _bytes(*size))
        picture = np.frombuffer(data, np.uint8).reshape(*size, 3) if len(size) > 1 else np.frombuffer(data, np.float32)
        found["pictures"].append(picture)
    return found, prompts


def _bytes(size: int, width: int | None = None) -> int:
    """Return the bytes of a recording of ``size`` samples, or of a picture of ``size`` rows of ``width`` pixels."""
    return 4 * size if width is None else 3 * size * width


async def _exactly(stream: asyncio.StreamReader, size: int) -> bytearray:
    """Receive ``size`` bytes, letting other tasks run between pieces."""
    found = bytearray(size)
    for at in range(0, size, PIECE):
        found[at : at + PIECE] = await stream.readexactly(min(PIECE, size - at))
        await asyncio.sleep(0)
    return found
