"""A request on its way: its texts are lined up, and their events become one answer."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.result import Chunk, Result
from edgespec.server.drafts import Drafts
from edgespec.server.errors import failure
from edgespec.server.metrics import Metrics
from edgespec.server.reading import Kind, Read
from edgespec.server.scheduler import Event, Limits, Scheduler, Ticket

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "length"}


@dataclass
class Choice:
    """One of the texts of a request, as it comes.

    Attributes:
        index: which of them.
        text: so far.
        result: once it has ended.
        late: it was cut because its time was over.
        drafts: tells its guesses; None = nobody asked.
    """

    index: int
    kind: Kind
    drafts: Drafts | None = None
    text: str = ""
    result: Result | None = None
    late: bool = False
    _scored: list[tuple[str, float]] = field(default_factory=list)  # piece and log-probability of each token

    def add(self, event: Event) -> str:
        """Take an event that is no error; returns its text."""
        if event.chunk is None:
            self.result, self.late = event.result, event.late
            return ""
        self.text += event.chunk.text
        self._scored += scored(event.chunk)
        return event.chunk.text

    @property
    def finish(self) -> str | None:
        """Why it ended, in the API's words; None = it has not."""
        return FINISH[self.result.finish] if self.result else None

    def whole(self, logprobs: bool) -> dict[str, Any]:
        """Write the choice of an answer that is not streamed."""
        body: dict[str, Any] = {"index": self.index, "finish_reason": self.finish}
        if self.kind == "chat":
            body["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            body["text"] = self.text
        return body | {"logprobs": self._logprobs(self._scored, 0) if logprobs else None}

    def piece(self, text: str, chunk: Chunk | None, logprobs: bool) -> dict[str, Any]:
        """Write the choice of one event of a stream; ``chunk`` None = the last."""
        body: dict[str, Any] = {"index": self.index, "finish_reason": None if chunk else self.finish}
        if self.kind == "chat":
            body["delta"] = {"content": text} if chunk else {}
        else:
            body["text"] = text
        found = scored(chunk) if chunk and logprobs else []
        return body | {"logprobs": self._logprobs(found, len(self.text) - len(text)) if found else None}

    def _logprobs(self, found: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        if self.kind == "chat":
            return {
                "content": [
                    {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                    for piece, value in found
                ],
                "refusal": None,
            }
        offsets = [offset + sum(len(piece) for piece, _ in found[:at]) for at in range(len(found))]
        tokens, values = [piece for piece, _ in found], [value for _, value in found]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def scored(chunk: Chunk) -> list[tuple[str, float]]:
    """Text and log-probability of each token of a chunk, where they were asked for."""
    known = (chunk.round.logprobs if chunk.round else None) or ()
    return list(zip(chunk.pieces, known, strict=False))


def usage(prompt_tokens: int, results: Sequence[Result]) -> dict[str, Any]:
    """How many tokens went in and out; the prompt is counted once a prompt, as the API does."""
    written = sum(len(result.tokens) for result in results)
    reused = sum(result.stats.reused_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": min(prompt_tokens, reused)},
    }


def extension(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Write the field ``edgespec`` of an answer: how each choice was decoded."""
    return [
        {
            "method_requested": result.method_requested,
            "method_used": result.method_used,
            "reason": result.reason,
            "lossless": result.lossless,
            "exact": result.exact,
            "unproven": result.unproven,
            "finish": result.finish,
            "late": choice.late,
            "rounds": result.stats.rounds,
            "drafted": result.stats.drafted,
            "accepted": result.stats.accepted,
            "tokens_per_round": round(len(result.tokens) / max(1, result.stats.rounds), 3),
        }
        for choice in choices
        if (result := choice.result)
    ]


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
            choices=[
                Choice(index, kind, Drafts(self.engine.codec) if read.drafts else None) for index in range(len(pairs))
            ],
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
        """Answer in one piece."""

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
        """Answer by server-sent events; whatever happens, the last one is [DONE]."""
        body = job.body
        if job.kind == "chat":
            body["object"] = "chat.completion.chunk"
            opening = [{"index": one.index, "delta": {"role": "assistant", "content": ""}} for one in job.choices]
            yield _sse(body | {"choices": [one | {"finish_reason": None} for one in opening]})
        try:
            async for choice, text, event in self._events(job):
                if event.chunk is None:
                    own = extension([choice])
                else:
                    own = [said] if choice.drafts and (said := choice.drafts.add(event.chunk)) else []
                if event.chunk is None or text or own:
                    piece = body | {"choices": [choice.piece(text, event.chunk, job.logprobs)]}
                    yield _sse(piece | {"edgespec": own} if own else piece)
            if with_usage:
                results = [choice.result for choice in job.choices if choice.result]
                yield _sse(body | {"choices": [], "usage": usage(job.prompt_tokens, results)})
        except Exception as error:
            yield _sse(failure(error)[1])
        yield DONE.encode()

    async def _events(self, job: Job) -> AsyncIterator[tuple[Choice, str, Event]]:
        """Yield the events of a job until every text has ended; an error of one ends all.  Leaving cancels it."""
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
    """Write a JSON object without its end."""
    return json.dumps(body, ensure_ascii=False)[:-1]
