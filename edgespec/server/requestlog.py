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


class RequestLog:
    """ASGI middleware that writes a line when a request has been answered.

    A separate thread writes the lines.  If the log is not read, lines are dropped, and requests continue.

    Args:
        app: the wrapped application.
        say: takes the line.
    """

    def __init__(self, app: ASGIApp, say: Callable[[str], None]) -> None:
        self._app, self._say = app, say
        self._lines: Queue[str] = Queue(MOST_LINES)
        Thread(target=self._write, name="edgespec-log", daemon=True).start()

    def _write(self) -> None:
        while True:
            self._say(self._lines.get())

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
            text = line(client, scope["method"], scope["path"], status, scope.get(MODEL, ""), sent, begun)
            with suppress(Full):
                self._lines.put_nowait(text)
