"""The HTTP side: OpenAI's completions and chats over one bundle."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from edgespec.decoding.loop import check_prompt
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.own_sampling import own_sampling
from edgespec.errors import BudgetError, ContextFull, EdgespecError, InvalidRequest
from edgespec.server.answers import Choice, Kind, extension, usage
from edgespec.server.body import BodyLimit
from edgespec.server.limits import Limits
from edgespec.server.metrics import Metrics
from edgespec.server.requests import IGNORED, Asked, ChatRequest, CompletionRequest
from edgespec.server.scheduler import Busy, Event, Scheduler, Ticket

LOOK = 0.2  # seconds between two looks whether a client that waits is still there
TEMPERATURE = 1.0  # the API's own, where neither the request nor the model says how to sample
COMPLETION_TOKENS = 16  # what the API writes where a completion does not say how much


@dataclass
class _Job:
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


class _Service:
    """What the routes share."""

    def __init__(self, engine: Engine, name: str, limits: Limits, key: str | None) -> None:
        self.engine, self.name, self.limits, self.key = engine, name, limits, key
        self.scheduler = Scheduler(engine, limits)
        self.metrics = Metrics(engine, self.scheduler)
        self.started = int(time.time())
        self.sampling = own_sampling(engine.bundle.manifest.sampling, temperature=TEMPERATURE)

    def start(self, kind: Kind, asked: Asked, prompts: Sequence[Sequence[int]], default: int) -> _Job:
        """Line up all choices of a request; none of them if one cannot be."""
        if asked.model != self.name:
            raise HTTPException(404, f"no model {asked.model!r}: this server has {self.name!r}")
        settings = asked.settings(self.limits.tokens, default, self.sampling)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        pairs = [(prompt, one) for prompt in prompts for one in settings]
        for prompt, one in pairs:
            self._check(prompt, one)
        job = _Job(
            id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}",
            kind=kind,
            model=self.name,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            choices=[Choice(index, kind) for index in range(len(pairs))],
            tickets=[],
            events=events,
            logprobs=asked.wants_logprobs,
            created=int(time.time()),
        )
        for index, (prompt, one) in enumerate(pairs):

            def sink(event: Event, index: int = index) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

            try:
                job.tickets.append(self.scheduler.submit(prompt, one, sink))
            except Busy:
                job.cancel()
                self.metrics.failed("refused")
                raise
        return job

    def _check(self, prompt: Sequence[int], settings: Settings) -> None:
        """Refuse at once what could never run, so that a stream does not begin."""
        engine = self.engine
        check_prompt(prompt, settings.sampling, engine.bundle.manifest.target.facts.vocab, engine.context)
        engine.choose_for(settings)
        if settings.grammar is not None:
            engine.guidance.require(settings.grammar)

    async def events(self, job: _Job) -> AsyncIterator[tuple[Choice, str, Event]]:
        """The events of a job until every choice has ended; an error of one ends all.  Whoever leaves cancels it."""
        left = len(job.choices)
        try:
            while left:
                index, event = await job.events.get()
                if event.error is not None:
                    self.metrics.failed("refused" if isinstance(event.error, Busy) else "failed")
                    raise event.error
                choice = job.choices[index]
                text = choice.add(event)
                if event.result is not None:
                    left -= 1
                    self.metrics.ended(event.result, event.late)
                yield choice, text, event
        finally:
            job.cancel()

    async def whole(self, job: _Job, request: Request) -> JSONResponse:
        """An answer in one piece."""

        async def gather() -> None:
            async for _ in self.events(job):
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
        results = [choice.result for choice in job.choices if choice.result]
        body = job.body | {
            "choices": [choice.whole(job.logprobs) for choice in job.choices],
            "usage": usage(job.prompt_tokens, results),
            "edgespec": extension(job.choices),
        }
        return JSONResponse(body)

    async def stream(self, job: _Job, with_usage: bool) -> AsyncIterator[str]:
        """An answer as server-sent events."""
        body = job.body
        if job.kind == "chat":
            body["object"] = "chat.completion.chunk"
            opening = [{"index": one.index, "delta": {"role": "assistant", "content": ""}} for one in job.choices]
            yield _sse(body | {"choices": [one | {"finish_reason": None} for one in opening]})
        try:
            async for choice, text, event in self.events(job):
                if event.chunk is None or text:
                    piece = body | {"choices": [choice.piece(text, event.chunk, job.logprobs)]}
                    yield _sse(piece if event.chunk else piece | {"edgespec": extension([choice])})
        except Exception as error:
            yield _sse(_error(error)[1])
            return
        if with_usage:
            results = [choice.result for choice in job.choices if choice.result]
            yield _sse(body | {"choices": [], "usage": usage(job.prompt_tokens, results)})
        yield "data: [DONE]\n\n"


def _sse(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error, in the API's shape."""
    kinds: list[tuple[type[Exception], int, str]] = [
        (Busy, 429, "rate_limit_error"),
        (BudgetError, 503, "server_error"),
        (InvalidRequest, 400, "invalid_request_error"),
        (EdgespecError, 500, "server_error"),
    ]
    status, kind = next(((code, name) for cls, code, name in kinds if isinstance(error, cls)), (500, "server_error"))
    message = str(error) if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
    code = "context_length_exceeded" if isinstance(error, ContextFull) else None
    return status, {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refused(status: int, message: str, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


def make_app(engine: Engine, name: str, limits: Limits | None = None, key: str | None = None) -> FastAPI:
    """An ASGI application that serves a bundle.

    Args:
        engine: of the bundle; the application closes it when it stops.
        name: of the model, as clients ask for it.
        limits: what it takes at most.
        key: what clients must send as bearer token; None = nothing.
    """
    limits = limits or Limits()
    service = _Service(engine, name, limits, key)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.scheduler.close)
        engine.close()

    def known(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if key is not None and not secrets.compare_digest(sent.encode("latin-1"), f"Bearer {key}".encode()):
            raise HTTPException(401, "expected this server's API key as a bearer token")

    app = FastAPI(title="edgespec", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, most=limits.body)
    _handle_errors(app)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": service.scheduler.running, "waiting": service.scheduler.waiting}

    @app.get("/metrics", dependencies=[Depends(known)])
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    def described() -> dict[str, Any]:
        return {"id": name, "object": "model", "created": service.started, "owned_by": "edgespec"}

    @app.get("/v1/models", dependencies=[Depends(known)])
    async def models() -> dict[str, Any]:
        own = {"methods": engine.methods, "context": engine.context, "operators": engine.operators.kind}
        return {"object": "list", "data": [described() | {"edgespec": own}]}

    @app.get("/v1/models/{wanted:path}", dependencies=[Depends(known)])
    async def model(wanted: str) -> dict[str, Any]:
        if wanted != name:
            raise HTTPException(404, f"no model {wanted!r}: this server has {name!r}")
        return described()

    async def answer(job: _Job, asked: Asked, request: Request) -> Response:
        if not asked.stream:
            return await service.whole(job, request)
        with_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(service.stream(job, with_usage), media_type="text/event-stream")

    @app.post("/v1/completions", dependencies=[Depends(known)])
    async def completions(request: Request) -> Response:
        asked = CompletionRequest.model_validate(await _body(request))
        encode = engine.codec.encode
        prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        return await answer(service.start("completion", asked, prompts, COMPLETION_TOKENS), asked, request)

    @app.post("/v1/chat/completions", dependencies=[Depends(known)])
    async def chats(request: Request) -> Response:
        asked = ChatRequest.model_validate(await _body(request))
        tools = asked.tools if asked.tool_choice != "none" else None
        prompt = engine.codec.chat(asked.said(), tools)
        default = max(1, min(limits.tokens, engine.context - len(prompt)))
        return await answer(service.start("chat", asked, [prompt], default), asked, request)

    return app


async def _body(request: Request) -> dict[str, Any]:
    """The request's JSON object, without fields that change nothing of an answer."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"expected a JSON object, got {type(body).__name__}")
    return {name: value for name, value in body.items() if name not in IGNORED}


def _handle_errors(app: FastAPI) -> None:
    """Every error in the API's shape."""
    from pydantic import ValidationError

    @app.exception_handler(EdgespecError)
    async def ours(_: Request, error: EdgespecError) -> JSONResponse:
        status, body = _error(error)
        return JSONResponse(body, status, headers={"Retry-After": "1"} if status == 429 else None)

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: ValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _refused(400, f"{where or 'request'}: {first['msg']}", where or None)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # a client that hung up within its body: nobody reads this

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        return _refused(error.status_code, str(error.detail))
