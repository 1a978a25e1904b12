"""A server's life: it accepts as many connections as it has room for, and stops when it is told to."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from edgespec.errors import InvalidRequest
from edgespec.server.connections import with_limits
from edgespec.server.limits import Limits
from edgespec.server.scheduler import Scheduler

OTHERS = 64  # descriptors for all but connections
UNREAD = 1 << 17  # bytes of an answer that the system keeps for a client that does not read
BACKLOG = 512  # connections that wait in the system to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

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
        say: tells whoever watches.
        started: called once requests are answered.
    """

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        limits: Limits,
        say: Callable[[str], None],
        started: Callable[[], None],
    ) -> None:
        connection, self._open = with_limits(limits)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=connection,
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.idle,  # type: ignore[arg-type]
            timeout_graceful_shutdown=round(limits.grace) + 10,  # texts end by themselves before
        )
        super().__init__(config)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # clients that leave are no news
        self._socket, self._limits, self._say, self._started = sock, limits, say, started
        self._scheduler: Scheduler = app.state.scheduler
        self._accepting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; connections are accepted here."""
        await super().startup(sockets=[])
        self._loop = asyncio.get_running_loop()
        self._accepting = asyncio.create_task(self._accept())
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, and let what runs end within its time."""
        if self._accepting is not None:
            self._accepting.cancel()
        self._socket.close()
        running = self._scheduler.running + self._scheduler.waiting
        rest = f": {running} texts have up to {self._limits.grace:g} s; once more ends them at once" if running else ""
        self._say(f"stopping{rest}")
        self._scheduler.stop()
        await super().shutdown([])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop; the second one cuts what runs."""
        self._captured_signals.append(signal.Signals(sig))
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._scheduler.stop, 0.0)
        self.should_exit = True

    async def _accept(self) -> None:
        loop, opened = asyncio.get_running_loop(), self._open
        most = min(self._limits.connections, _descriptors())
        while True:
            while len(opened.all) >= most:  # pause: the system keeps those who come
                opened.freed.clear()
                opened.make_room()
                await opened.freed.wait()
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError:  # one that has gone already, or no descriptor after all
                await asyncio.sleep(0.05)
                continue
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
                await loop.connect_accepted_socket(self._connection, sock=sock)

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def _descriptors() -> int:
    """How many connections the system lets this process have."""
    try:
        import resource
    except ImportError:  # Windows
        return 1 << 30
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else OTHERS
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(4, soft - used - OTHERS)
