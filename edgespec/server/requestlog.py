"""A line for each request on stderr: when, who, what, how it was answered, and how long it took.  No texts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from threading import Thread

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MODEL = "edgespec.model"  # of a request's scope: which one it asked
MOST_LINES = 1000  # that wait to be written


def line(client: str, method: str, path: str, status: int, model: str, sent: int, since: float) -> str:
    """Write the line of a request.

    Args:
        client: its address.
        method, path: what it asks; neither the path nor the model can write lines itself.
        status: of the answer; 0 = there was none.
        model: that it names, if any.
        sent: bytes of the answer.
        since: when it began, by ``time.monotonic``.
    """
    ms = 1000 * (time.monotonic() - since)
    path = path[:200].encode("unicode_escape").decode("ascii")
    model = model[:200].encode("unicode_escape").decode("ascii").replace(" ", "\\x20")
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return f"{when} {client} {method} {path} {status or 'gone'} {model or '-'} {sent} B {ms:.0f} ms"


class LogWriter:
    """Write lines in a separate thread.  If the log is not read, lines are dropped, and no caller waits.

    Args:
        write: writes a line; it may block.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: Queue[str] = Queue(MOST_LINES)
        Thread(target=self._run, name="edgespec-log", daemon=True).start()

    def __call__(self, text: str) -> None:
        """Queue a line."""
        with suppress(Full):
            self._lines.put_nowait(text)

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until all lines are written, at most this long."""
        end = time.monotonic() + seconds
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            self._write(self._lines.get())
            self._lines.task_done()


class RequestLog:
    """ASGI middleware that logs a line when a request has been answered.

    Args:
        app: the wrapped application.
        log: takes the line, and never blocks.
    """

    def __init__(self, app: ASGIApp, log: LogWriter) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, sent = time.monotonic(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            client = (scope.get("client") or ("-",))[0]
            self._log(line(client, scope["method"], scope["path"], status, scope.get(MODEL, ""), sent, begun))
