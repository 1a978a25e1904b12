"""A limit on the size of requests' bodies, whether or not their length was announced."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _TooLarge(Exception):
    pass


class BodyLimit:
    """ASGI middleware: answers 413 to larger bodies without reading them to the end.

    Args:
        app: what it stands in front of.
        most: bytes.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        taken = 0
        begun = False

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if not announced.isdigit() or int(announced) > self._most:
                raise _TooLarge
            await self._app(scope, limited, watched)
        except _TooLarge:
            if not begun:
                text = f"the body is larger than {self._most} bytes, this server's limit"
                error = {"message": text, "type": "invalid_request_error", "param": None, "code": None}
                await JSONResponse({"error": error}, 413)(scope, receive, send)
