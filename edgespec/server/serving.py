"""Life of a server: it accepts connections up to a limit, and stops on request.

Connections use uvicorn's protocol over httptools, which parses in C, with bounds on what a client may hold.  A request
must arrive whole in time, in a limited number of pieces, with headers of limited size.  The client must read its
answer.  The bytes sent after a running request are bounded.  A client that exceeds a limit gets an error and is
disconnected.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
import sys
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from edgespec.errors import InvalidRequest
from edgespec.server.errors import Failure
from edgespec.server.front import BEAT, POSSIBLE, Front
from edgespec.server.hosts import client_of
from edgespec.server.models import Models
from edgespec.server.scheduler import Limits

HEAD = 1 << 16  # bytes of a request's line and headers
BEHIND = 1 << 16  # bytes that may follow a running request
MOST_PIPELINED = 8  # requests among them
FREE_PIECES, PIECE = 1024, 256  # pieces of a body: FREE_PIECES, plus one per PIECE bytes
SPARE = 8  # connections beyond the limit, which may only ask for /health
SPARE_SECONDS = 2.0  # for their requests
HEALTH = b"/health"
LINGER = 2.0  # seconds in which a client that was cut may read why


@dataclass
class Open:
    """The connections of a server."""

    limits: Limits  # of the server
    most: int = 1 << 30  # as many as the system lets there be
    all: dict[Connection, None] = field(default_factory=dict)  # those that are open, the oldest first
    spare: dict[Connection, None] = field(default_factory=dict)  # those beyond the limits

    def place(self, new: Connection) -> bool:
        """Give a new connection a place among all -> whether there is one; else it is a spare one.

        One client may have three quarters of the places.  A connection that waits for its client gives way.
        """
        most = min(self.limits.connections, self.most)
        own = [one for one in self.all if one.client_name == new.client_name]
        crowded = own if len(own) >= most - most // 4 else list(self.all) if len(self.all) >= most else None
        if crowded is not None and not self._close_one(crowded):
            self.spare[new] = None
            if len(self.spare) > SPARE:
                next(iter(self.spare)).abort()
            return False
        self.all[new] = None
        return True

    def _close_one(self, among: list[Connection]) -> bool:
        """Close the oldest that waits for its client, of the client that has most; False = none does."""
        counts = Counter(one.client_name for one in self.all)
        idle = [one for one in among if not one.running and not one.cut] or [one for one in among if one.cut]
        if idle:
            max(idle, key=lambda one: counts[one.client_name]).abort()  # the first of equals
        return bool(idle)


class Connection(HttpToolsProtocol):
    """One connection, among those of its server."""

    def __init__(self, opened: Open, **how: Any) -> None:
        super().__init__(**how)
        self.open = opened

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_name = client_of(self.client[0] if self.client else "")
        self.cut = False
        self._begun = self._headed = self._whole = False  # its first byte, its headers, its last byte are here
        self._taken = self._pieces = self._body = self._behind = 0
        self._cycles: list[RequestResponseCycle] = []  # whose answers are not complete
        self._why: tuple[int, str] | None = None
        self._arriving: TimerHandle | None = None
        self._reading: TimerHandle | None = None
        self.spare = not self.open.place(self)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_place()
        for timer in (self._arriving, self._reading):
            if timer is not None:
                timer.cancel()
        self._leave()
        super().connection_lost(exc)

    @property
    def running(self) -> bool:
        """Whether a request is here whose answer is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def abort(self) -> None:
        """Close it at once."""
        self.cut = True
        self._leave_place()
        self.transport.abort()

    def _leave_place(self) -> None:
        self.open.all.pop(self, None)
        self.open.spare.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self.cut:  # what is still on its way is thrown away, so that the client reads why
            self._behind += len(data)
            if self._behind > 4 * self.open.limits.body:
                self.transport.abort()
            return
        if self.running:
            self._behind += len(data)
            if self._behind > BEHIND:
                self.abort()
                return
        self._taken += len(data)
        super().data_received(data)
        if self.cut or self.transport.is_closing():
            return
        if not self._begun and not self.running:
            return
        if not self._headed and self._taken > HEAD:
            self._refuse(431, f"the headers are larger than {HEAD} bytes")
        elif not self._whole and self._taken > HEAD + 2 * self.open.limits.body:
            self._refuse(413, f"the body is larger than {self.open.limits.body} bytes, this server's limit")
        elif not self._whole and self._arriving is None:
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """Tell why a request cannot be read."""
        self._refuse(*(self._why or (400, "this is no request of HTTP/1.1")))

    # -- the parser's callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._headed, self._whole = True, False, False
        self._pieces = self._body = 0
        if len(self.pipeline) >= MOST_PIPELINED:
            self._stop(400, f"more than {MOST_PIPELINED} requests behind one that is not answered yet")

    def on_headers_complete(self) -> None:
        if self.spare and self.url.partition(b"?")[0] != HEALTH:
            self._stop(429, "this server has as many connections as it may, or this client has: close some, or wait")
        super().on_headers_complete()
        self._headed = True
        if self.spare:
            self.cycle.keep_alive = False
        self._cycles = [one for one in self._cycles if not one.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._body += len(body)
        if self._pieces > FREE_PIECES + self._body // PIECE:
            self._stop(400, f"the body comes in too many pieces: expected {PIECE} bytes in each, or more")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begun, self._whole, self._taken = False, True, 0
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def on_response_complete(self) -> None:
        """Note that an answer is written; a connection whose request was not read to its end is closed."""
        self._behind = 0
        if not self._whole and not self.pipeline:
            self.server_state.total_requests += 1
            self._drain()
            return
        super().on_response_complete()

    # -- time ----------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Give a client that does not read some time to resume."""
        super().pause_writing()
        self._reading = self.loop.call_later(self.open.limits.arrive, self.abort)

    def resume_writing(self) -> None:
        """Note that it reads again."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def shutdown(self) -> None:
        """Stop: a request that is not here yet is not waited for."""
        if self._begun or not self.running:
            self.abort()
        else:
            super().shutdown()

    def _expect(self) -> None:
        """Cut a request that is not here in time."""
        seconds = self.open.limits.arrive
        self._arriving = self.loop.call_later(min(seconds, SPARE_SECONDS) if self.spare else seconds, self._too_late)

    def _too_late(self) -> None:
        self._arriving = None
        if self.running:  # the late request follows one that is still running
            self.abort()
        elif self._begun:
            self._refuse(408, f"the request did not arrive within {self.open.limits.arrive:g} seconds")
        else:
            self.transport.close()

    # -- cutting -------------------------------------------------------------------------------------------------------

    def _stop(self, status: int, message: str) -> None:
        """Stop parsing received bytes; the parser then calls ``send_400_response``."""
        self._why = status, message
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if there is still an answer to give, and let the connection end."""
        if self.cut or self.transport.is_closing():
            return
        if not any(one.response_started and not one.response_complete for one in self._cycles):
            path = self.url.decode("latin-1") if self._begun else ""  # of the request that is cut
            body = json.dumps(Failure(message, status).body(path)).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += "retry-after: 1\r\n" if status == 429 else ""
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self._drain()

    def _drain(self) -> None:
        """Close, but not before the client could read the answer: it may still be sending."""
        self.cut, self._behind = True, 0
        self.pipeline.clear()
        self._leave()
        self.flow.resume_reading()
        with suppress(OSError):  # the client has disconnected; the event loop notices later
            if self.transport.can_write_eof():
                self.transport.write_eof()
        self._unset_keepalive_if_required()
        self.loop.call_later(LINGER, self.transport.abort)

    def _leave(self) -> None:
        """Mark the running requests as disconnected, so that they stop waiting for input and output."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def eof_received(self) -> None:
        """Note that the client sends no more."""
        if self.cut:
            self.transport.close()


OTHERS = 64  # descriptors other than connections
UNREAD = 1 << 17  # bytes of an answer that the system keeps for a client that does not read
BACKLOG = 512  # connections that wait in the system to be accepted


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens.

    Args:
        host: an address, or a name that has one here.
        port: 0 = any free one.

    Raises:
        InvalidRequest: it cannot be bound; the message says why.
    """
    problem: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {host}: {error.strerror}", "give an address of this machine") from error
    for family, kind, protocol, _, address in found:
        made = socket.socket(family, kind, protocol)
        try:
            if sys.platform != "win32":
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
            made.setblocking(False)
            return made
        except OSError as error:
            made.close()
            problem = error
    assert problem is not None
    hint = (
        "--port 0 takes a free port"
        if problem.errno in (errno.EADDRINUSE, errno.EACCES)
        else "give an address of this machine"
    )
    raise InvalidRequest(f"cannot listen on {host}:{port}: {problem.strerror}", hint) from problem


class Server(uvicorn.Server):
    """Serves an application on one socket.

    Args:
        app: as ``make_app`` gives it.
        sock: that listens.
        limits: of connections and time.
        say: shows a message to the operator.
        started: called once requests are answered.
        log: whether requests are logged on stderr.
    """

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        limits: Limits,
        say: Callable[[str], None],
        started: Callable[[], None],
        log: bool = False,
    ) -> None:
        self._open = Open(limits)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.idle,  # type: ignore[arg-type]
            timeout_graceful_shutdown=round(limits.grace) + 10,  # texts end on their own before that
        )
        super().__init__(config)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it would log each client that disconnects
        self._socket, self._limits, self._say, self._started, self._log = sock, limits, say, started, log
        self._app, self._models = app, cast(Models, app.state.models)
        self._front: Front | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; connections are accepted here."""
        await super().startup(sockets=[])
        if self._app.state.failure is not None:
            raise self._app.state.failure
        self._loop = asyncio.get_running_loop()
        self._open.most = _descriptors()
        with suppress(OSError):
            self._front = Front(self._socket, self._app.state.access.hosts, self._log) if POSSIBLE else None
        if self._front is None:
            self._do(self._accept())
        else:
            self._loop.add_reader(self._front.channel, self._take, self._front)
            self._do(self._beat(self._front))
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and let running texts end within their time."""
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._close_front()
        running = self._models.running + self._models.waiting
        rest = f": {running} texts have up to {self._limits.grace:g} s; once more ends them at once" if running else ""
        self._say(f"stopping{rest}")
        self._models.stop()
        await super().shutdown([])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to stop; the second one cuts what runs."""
        self._captured_signals.append(signal.Signals(sig))
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._models.stop, 0.0)
        self.should_exit = True

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self, front: Front) -> None:
        """Take connections from the process that accepts them; where it has ended, they are accepted here."""
        if (found := front.take()) is None:
            self._close_front()
            self._say("the process that accepts connections has ended: the server accepts them itself")
            self._do(self._accept())
        for sock in found or ():
            self._do(self._open_one(sock))

    def _close_front(self) -> None:
        if self._front is not None and self._loop is not None:
            self._loop.remove_reader(self._front.channel)
            self._front.close()
            self._front = None

    async def _beat(self, front: Front) -> None:
        """Say that the loop is alive."""
        while True:
            front.beat(self._models.running, self._models.waiting)
            await asyncio.sleep(BEAT)

    async def _accept(self) -> None:
        """Accept connections in this process, if no separate one does."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError:  # one that has gone already, or no descriptor after all
                await asyncio.sleep(0.05)
                continue
            await self._open_one(sock)

    async def _open_one(self, sock: socket.socket) -> None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, sock=sock)

    def _connection(self) -> asyncio.Protocol:
        return Connection(self._open, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _descriptors() -> int:
    """How many connections the system lets this process have."""
    try:
        import resource
    except ImportError:  # Windows
        return 1 << 30
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else OTHERS
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(4, soft - used - OTHERS - SPARE)
