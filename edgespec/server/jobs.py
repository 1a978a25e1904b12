"""A request on its way: its texts are lined up, and their events become one answer."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.server.answers import Choice, extension, usage
from edgespec.server.errors import failure
from edgespec.server.limits import Limits
from edgespec.server.metrics import Metrics
from edgespec.server.reading import Kind, Read
from edgespec.server.scheduler import Event, Scheduler, Ticket

LOOK = 0.2  # seconds between two looks whether a client that waits is still there
DONE = "data: [DONE]\n\n"


@dataclass
class Job:
    """A request's tickets and what comes of them."""

    id: str
    kind: Kind
    model: str
    prompt_tokens: int
    choices: list[Choice]
    tickets: list[Ticket]
    events: asyncio.Queue[tuple[int, Event]]
    logprobs: bool
    created: int

    def cancel(self) -> None:
        """Nobody waits for the rest."""
        for ticket in self.tickets:
            ticket.cancel()

    @property
    def body(self) -> dict[str, Any]:
        """What every answer and every event of a stream begins with."""
        object_ = {"chat": "chat.completion", "completion": "text_completion"}[self.kind]
        return {"id": self.id, "object": object_, "created": self.created, "model": self.model}


class Jobs:
    """Requests to an engine.

    Args:
        engine: that answers.
        name: of the model.
        limits: of the server.
        shared: whether texts of one client may be faster because of another one's.
    """

    def __init__(self, engine: Engine, name: str, limits: Limits, shared: bool = False) -> None:
        self.engine, self.name, self.shared = engine, name, shared
        self.scheduler = Scheduler(engine, limits)
        self.metrics = Metrics(engine, self.scheduler)
        self._compiling = ThreadPoolExecutor(1, "edgespec-grammars")

    def close(self) -> None:
        """End the decoding thread, and all that is left of requests."""
        self.scheduler.close()
        self._compiling.shutdown(cancel_futures=True)

    async def start(self, kind: Kind, read: Read, client: str) -> Job:
        """Line up all texts of a request; none of them if one cannot be.

        Args:
            kind: of the request.
            read: what is asked.
            client: who asks.

        Raises:
            Busy: there is no place for them.
            Stopped: the server stops.
            InvalidRequest: a method that the bundle does not have.
        """
        self.engine.choose_for(read.settings)
        if read.settings.grammar is not None:  # readers have tried what it takes
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiling, self._compile, read.settings)
        pairs = [(prompt, settings) for prompt in read.prompts for settings in read.each()]
        job = Job(
            id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}",
            kind=kind,
            model=self.name,
            prompt_tokens=sum(map(len, read.prompts)),
            choices=[Choice(index, kind) for index in range(len(pairs))],
            tickets=[],
            events=asyncio.Queue(),
            logprobs=read.settings.logprobs,
            created=int(time.time()),
        )
        loop = asyncio.get_running_loop()
        for index, (prompt, settings) in enumerate(pairs):

            def sink(event: Event, index: int = index) -> None:
                if event.chunk is None:
                    self.metrics.ended(event)
                with suppress(RuntimeError):  # the loop has ended: nobody waits
                    loop.call_soon_threadsafe(job.events.put_nowait, (index, event))

            try:
                owner = None if self.shared else client
                job.tickets.append(self.scheduler.submit(prompt, settings, sink, client, job.id, owner))
            except BaseException:
                job.cancel()
                raise
        return job

    def _compile(self, settings: Settings) -> None:
        assert settings.grammar is not None
        self.engine.guidance.require(settings.grammar)

    async def whole(self, job: Job, request: Request) -> Response:
        """An answer in one piece."""

        async def gather() -> None:
            async for _ in self._events(job):
                pass

        gathering = asyncio.create_task(gather())
        try:
            while not gathering.done():
                await asyncio.wait({gathering}, timeout=LOOK)
                if not gathering.done() and await request.is_disconnected():
                    return JSONResponse({}, 499)
            gathering.result()
        finally:
            job.cancel()
            gathering.cancel()
        written = []
        for choice in job.choices:  # each by itself: a long answer must not keep others waiting
            written.append(json.dumps(choice.whole(job.logprobs), ensure_ascii=False))
            await asyncio.sleep(0)
        results = [choice.result for choice in job.choices if choice.result]
        rest = {"usage": usage(job.prompt_tokens, results), "edgespec": extension(job.choices)}
        text = f'{_open(job.body)}, "choices": [{", ".join(written)}], {json.dumps(rest, ensure_ascii=False)[1:]}'
        return Response(text.encode("utf-8", "replace"), media_type="application/json")

    async def stream(self, job: Job, with_usage: bool) -> AsyncIterator[bytes]:
        """An answer as server-sent events; whatever happens, the last one is [DONE]."""
        body = job.body
        if job.kind == "chat":
            body["object"] = "chat.completion.chunk"
            opening = [{"index": one.index, "delta": {"role": "assistant", "content": ""}} for one in job.choices]
            yield _sse(body | {"choices": [one | {"finish_reason": None} for one in opening]})
        try:
            async for choice, text, event in self._events(job):
                if event.chunk is None or text:
                    piece = body | {"choices": [choice.piece(text, event.chunk, job.logprobs)]}
                    yield _sse(piece if event.chunk else piece | {"edgespec": extension([choice])})
            if with_usage:
                results = [choice.result for choice in job.choices if choice.result]
                yield _sse(body | {"choices": [], "usage": usage(job.prompt_tokens, results)})
        except Exception as error:
            yield _sse(failure(error)[1])
        yield DONE.encode()

    async def _events(self, job: Job) -> AsyncIterator[tuple[Choice, str, Event]]:
        """The events of a job until every text has ended; an error of one ends all.  Whoever leaves cancels it."""
        left = len(job.choices)
        try:
            while left:
                index, event = await job.events.get()
                if event.error is not None:
                    raise event.error
                choice = job.choices[index]
                text = choice.add(event)
                left -= event.result is not None
                yield choice, text, event
                await asyncio.sleep(0)  # many events may wait already: others are to be answered between them
        finally:
            job.cancel()


def _sse(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def _open(body: dict[str, Any]) -> str:
    """A JSON object whose end is missing."""
    return json.dumps(body, ensure_ascii=False)[:-1]
