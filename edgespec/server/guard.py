"""Decide who may call a server and how much a client may send, so that a web page cannot use its visitor's server.

A browser sends any page's requests to any address, including this machine's.  A page whose host name was made to point
here (DNS rebinding) may also read the answers.  So requests are answered only under a host name of this server.  Pages
need an allowed origin.  A body must be declared as JSON, which pages of other origins cannot do without a preflight.
Recordings come in forms, which pages can send, but browsers always add Origin to those.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.errors import Failure
from edgespec.server.held import SCOPE, Held, HeldBytes
from edgespec.server.hosts import client_of, known, names_of

JSON, FORM = "application/json", "multipart/form-data"
FORMS = "/v1/audio/transcriptions", "/v1/audio/translations"  # where forms are sent, with recordings


class Guard:
    """ASGI middleware that checks Host, Origin and Content-Type.

    Args:
        app: the wrapped application.
        hosts: names that clients may use for this server, in addition to its addresses and localhost; ``*`` = any.
        origins: of web pages that may use it, such as ``https://chat.example``; ``*`` = any.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        self._app = app
        self._hosts = names_of(hosts)
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            await problem.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> Failure | None:
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1").strip())
        hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(hosts) != 1 or len(origins) > 1:
            return Failure("expected one Host header, and at most one Origin")
        if not known(hosts[0], self._hosts):
            name = hosts[0][:80]
            return Failure(f"this server is not known as {name!r}; --allow-host lets clients call it by a name", 403)
        if origins and not self._allowed(origins[0], hosts[0]):
            return Failure(f"pages of {origins[0][:80]!r} may not use this server; --allow-origin lets them", 403)
        kinds = headers.get(b"content-type", [""])
        wanted = FORM if scope["path"].startswith(FORMS) else JSON
        if scope["method"] == "POST" and kinds[-1].partition(";")[0].strip().lower() != wanted:
            return Failure(f"expected a body of Content-Type: {wanted}", 415)
        codings = ",".join(headers.get(b"content-encoding", [])).strip().lower()
        if codings not in ("", "identity"):
            return Failure(f"a body of Content-Encoding {codings[:80]!r}: send it as it is, without compression", 415)
        return None

    def _allowed(self, origin: str, host: str) -> bool:
        """Whether a page may ask: one of this server's own, or of an origin that was named."""
        origin = origin.lower().rstrip("/")
        return "*" in self._origins or origin in self._origins or origin.partition("://")[2] == host.lower()


class _TooLarge(Exception):
    pass


class BodyLimit:
    """ASGI middleware that answers 413 to bodies that are too large, without reading the rest, and counts bytes in
    memory.

    Args:
        app: the wrapped application.
        most: maximum bytes of a body.
        held: counts the bytes of all requests.
    """

    def __init__(self, app: ASGIApp, most: int, held: HeldBytes) -> None:
        self._app, self._most, self._held = app, most, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        taken, begun = 0, False
        held = scope[SCOPE] = Held(self._held, client_of((scope.get("client") or [""])[0]))

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            if piece := message.get("body", b""):
                taken += len(piece)
                if taken > self._most:
                    raise _TooLarge
                held.add(len(piece))
            return message

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            digits = announced.lstrip(b"0")  # Python reads no number of thousands of digits
            if not announced.isdigit() or len(digits) > 18 or int(digits or b"0") > self._most:
                raise _TooLarge
            await self._app(scope, limited, watched)
        except _TooLarge:
            if not begun:
                text = f"the body is larger than {self._most} bytes, this server's limit"
                await Failure(text, 413).response(scope["path"])(scope, receive, send)
        finally:
            held.close()
