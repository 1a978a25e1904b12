"""The HTTP side: the APIs of apis.py over the bundles that are served."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from edgespec.engine.hearing import unsupported_audio_reason
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.server.apis import APIS, COUNT, Kind
from edgespec.server.audio import PATHS, TASKS, AudioRequest
from edgespec.server.audio import Kind as AudioKind
from edgespec.server.call import Call
from edgespec.server.errors import ClientDisconnected, Failure, failure
from edgespec.server.guard import BodyLimit, Guard
from edgespec.server.held import held_by
from edgespec.server.hosts import client_of
from edgespec.server.jobs import Jobs
from edgespec.server.models import Models
from edgespec.server.openapi import describe
from edgespec.server.readers import Readers, Told
from edgespec.server.reading import Asking, no_model
from edgespec.server.requestlog import MODEL, LogWriter, RequestLog
from edgespec.server.web import page_routes


@dataclass(frozen=True)
class Access:
    """Who may use a server.


    Raises:
        InvalidRequest: an empty key.
    """

    keys: Sequence[str] = ()  # of which clients must send one as bearer token; none = everybody may
    hosts: Sequence[str] = ()  # host names that clients may use, in addition to the server's addresses
    origins: Sequence[str] = ()  # of web pages that may use it

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.keys):
            raise InvalidRequest(
                "the API key is empty: expected one that clients send", "leave it out for a server without one"
            )

    def client(self, request: Request) -> str:
        """Whose a request is: those of an address and a key take turns with others, and share what was computed.

        It begins with what tells the key, up to a space: what the disk has of a prompt is found by all of its users.

        Raises:
            HTTPException: it brings none of the keys.
        """
        address = client_of(request.client.host if request.client else "")
        if not self.keys:
            return address
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        own = request.headers.get("x-api-key")  # as Anthropic's clients send it
        given = (sent if own is None else own).strip().encode("latin-1")
        # compare all keys, so that timing reveals nothing
        matches = [secrets.compare_digest(given, key.encode()) for key in self.keys]
        if (scheme.lower() != "bearer" and own is None) or not any(matches):
            raise HTTPException(
                401,
                "expected this server's API key as a bearer token, or in x-api-key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"{hashlib.sha256(self.keys[matches.index(True)].encode()).hexdigest()} {address}"

    def owner(self, request: Request) -> str:
        """Return the owner of what a request stores: the API key, or without keys the client's address."""
        client = self.client(request)
        return client.partition(" ")[0] if self.keys else client


class _Routes:
    """Handlers of all routes."""

    def __init__(self, models: Models, access: Access, log: Callable[[str], None] | None) -> None:
        self.served, self.access = models, access
        known = [model.known for model in models.all.values()]
        self.readers = Readers(known, log)
        self.description = describe(known, models.limits, bool(access.keys))
        self.started = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/openapi.json", self.openapi),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{wanted:path}", self.model),
            *(
                Route(api.path, partial(self._respond if api.respond else self._answer, kind), methods=["POST"])
                for kind, api in APIS.items()
                if api.path != COUNT
            ),
            Route(COUNT, self.count, methods=["POST"]),
            *(Route(path, partial(self.audio, kind), methods=["POST"]) for kind, path in PATHS.items()),
            Route("/v1/responses/{wanted}", self.response),
            Route("/v1/responses/{wanted}", self.forget, methods=["DELETE"]),
        ]

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "running": self.served.running, "waiting": self.served.waiting})

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(self.description)

    async def metrics(self, request: Request) -> Response:
        self.access.client(request)
        return PlainTextResponse(self.served.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        self.access.client(request)
        found = [self._described(name) | {"edgespec": model.about} for name, model in self.served.names.items()]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": found} | ends)

    async def model(self, request: Request) -> Response:
        self.access.client(request)
        wanted = request.path_params["wanted"]
        if wanted not in self.served.names:
            raise no_model(wanted, self.served.names)
        return JSONResponse(self._described(wanted))

    @asynccontextmanager
    async def _counting(self, request: Request) -> AsyncIterator[str]:
        """Give whose a request is, and count it where it is refused."""
        client = self.access.client(request)
        try:
            yield client
        except ClientDisconnected:
            raise
        except EdgespecError as error:
            why = "invalid" if failure(error).status < 429 else "refused"
            self.served.metrics.refused(request.scope.get(MODEL, ""), why)
            raise

    def _jobs(self, request: Request, model: str) -> AbstractAsyncContextManager[Jobs]:
        request.scope[MODEL] = model
        return self.served.acquire(model)

    async def _answer(self, kind: Kind, request: Request) -> Response:
        async with self._counting(request) as client:
            owner = self.access.owner(request)
            look_up = partial(self._conversation, owner)
            read = await self.readers.read(client, kind, await request.body(), look_up, held_by(request))
            _let_go_body(request)
            async with self._jobs(request, read.model) as jobs:
                job = await jobs.start(kind, read, client, owner)
            held_by(request).set(sum(len(one) for one in read.echo.values() if isinstance(one, bytes)))
        if not read.stream:
            return await jobs.whole(job, request)
        return StreamingResponse(
            jobs.stream(job), media_type="text/event-stream", background=BackgroundTask(job.cancel)
        )

    async def _read(self, client: str, kind: Asking, request: Request, more: bytes = b"") -> Told:
        """Have a request read; its body is not held any longer."""
        found = await self.readers.ask(client, kind, await request.body(), more, held_by(request))
        _let_go_body(request)
        return found

    async def count(self, request: Request) -> Response:
        found, _ = await self._read(self.access.client(request), "count", request)
        return JSONResponse({"input_tokens": found["count"]})

    async def _respond(self, kind: Kind, request: Request) -> Response:
        """Answer a request to an API that writes no text."""
        respond = APIS[kind].respond
        assert respond is not None
        async with self._counting(request) as client:
            found, prompts = await self._read(client, kind, request)
            async with self._jobs(request, found["model"]) as jobs:
                return await respond(jobs, Call(found["asked"], prompts, client, request))

    async def audio(self, kind: AudioKind, request: Request) -> Response:
        async with self._counting(request) as client:
            content_type = request.headers.get("content-type", "").encode("latin-1")
            found, _ = await self._read(client, kind, request, content_type)
            asked, sound = AudioRequest(**found["audio"]), found["blobs"]["sound"]
            if asked.model not in self.served.all:
                raise no_model(asked.model, self.served.all)
            if why := unsupported_audio_reason(self.served.all[asked.model].manifest):
                raise InvalidRequest(why)
            async with self._jobs(request, asked.model) as jobs:
                return await jobs.transcribe(client, sound, asked, TASKS[kind], request)

    async def response(self, request: Request) -> Response:
        self.access.client(request)
        response, _ = self._stored(self.access.owner(request), request.path_params["wanted"])
        return Response(response, media_type="application/json")

    async def forget(self, request: Request) -> Response:
        self.access.client(request)
        wanted = request.path_params["wanted"]
        if not self.served.stored.remove(self.access.owner(request), wanted):
            raise _unknown(wanted)
        return JSONResponse({"id": wanted, "object": "response", "deleted": True})

    def _stored(self, owner: str, wanted: str) -> tuple[bytes, bytes]:
        if (found := self.served.stored.get(owner, wanted)) is None:
            raise _unknown(wanted)
        return found

    def _conversation(self, owner: str, wanted: str) -> bytes:
        return self._stored(owner, wanted)[1]

    def _described(self, name: str) -> dict[str, Any]:
        return self.served.names[name].described(self.started, name)


def _let_go_body(request: Request) -> None:
    """Free the body of a request that was read: its answer may take minutes."""
    if hasattr(request, "_body"):
        held_by(request).add(-len(request._body))
        request._body = b""


def _unknown(wanted: str) -> Failure:
    return Failure(f"no response {wanted[:80]!r} is stored here", 404, param="previous_response_id")


def make_app(
    models: Models, access: Access | None = None, page: bool = True, log: Callable[[str], None] | None = None
) -> Starlette:
    """Make an ASGI application that serves bundles.

    Args:
        models: the bundles; the application frees them when it stops.
        access: who may use it.
        page: whether there is a page at ``/``.
        log: writes a line, in a separate thread; None = none are written.
    """
    access, limits = access or Access(), models.limits
    writer = None if log is None else LogWriter(log)
    routes = _Routes(models, access, writer)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        try:
            await routes.readers.start()
        except EdgespecError as error:
            app.state.failure = error  # uvicorn would write a traceback
        sweeping = asyncio.create_task(models.sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await routes.readers.close()
            await asyncio.to_thread(models.close)

    middleware = [Middleware(RequestLog, writer)] if writer else []
    middleware.append(Middleware(Guard, access.hosts, access.origins))
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(access.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta"],
            )
        )
    middleware.append(Middleware(BodyLimit, limits.body, models.held))
    handlers = {EdgespecError: _failed, ClientDisconnect: _gone, HTTPException: _refused, Exception: _failed}
    all_routes = routes.routes() + (page_routes() if page else [])
    app = Starlette(routes=all_routes, middleware=middleware, exception_handlers=handlers, lifespan=life)
    app.state.models, app.state.access, app.state.failure = models, access, None
    return app


async def _failed(request: Request, error: Exception) -> Response:
    return failure(error).response(request.url.path)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=400)  # the client disconnected while sending its body, so no one reads this


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Failure(str(error.detail), error.status_code).response(request.url.path, error.headers)
