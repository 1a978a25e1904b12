"""Failures as answers, in the shape of the API that was asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from edgespec.errors import BudgetError, ContextFull, EdgespecError, InvalidRequest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from starlette.responses import JSONResponse


class Busy(EdgespecError):
    """The server cannot take a request now, or could not begin it in time."""


class Stopped(EdgespecError):
    """The server was stopped before a text was finished."""


class ClientDisconnected(EdgespecError):
    """Raised when the client of a request has disconnected."""


KINDS: list[tuple[type[Exception], int, str]] = [
    (Busy, 429, "rate_limit_error"),
    (ClientDisconnected, 499, "invalid_request_error"),
    (Stopped, 503, "server_error"),
    (BudgetError, 503, "server_error"),
    (InvalidRequest, 400, "invalid_request_error"),
    (EdgespecError, 500, "server_error"),
]
MESSAGES = "/v1/messages"  # where Anthropic's shapes are spoken
ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
}
NO_THREAD = "thread_not_found"  # error code that makes Anthropic's clients resend all messages
# kinds that pydantic names among the fields, where one may have several
_TYPES = ("str", "int", "list", "dict", "SomeTools", "NamedTool")


class Failure(EdgespecError):
    """Error response for a request that cannot be answered.

    Args:
        message: why.
        status: of HTTP.
        kind, code: of the error, as OpenAI's API names them.
        param: the field.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    def body(self, path: str = "") -> dict[str, Any]:
        """Write it in the shape of the API at ``path``."""
        if path.startswith(MESSAGES):
            full = self.code == "context_length_exceeded"  # its clients know it by these words, and shorten the talk
            message = f"prompt is too long: {self.message}" if full else self.message
            kind = ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            details = {"details": {"error_code": self.code}} if self.code == NO_THREAD else {}
            return {"type": "error", "error": {"type": kind, "message": message, **details}}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, path: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Answer a request to ``path``."""
        from starlette.responses import JSONResponse  # of an extra that `edgespec serve --help` does not need

        retry = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return JSONResponse(self.body(path), self.status, {**retry, **(headers or {})})


def failure(error: Exception) -> Failure:
    """Convert an exception to an error response."""
    if isinstance(error, Failure):
        return error
    status, kind = next(((code, name) for cls, code, name in KINDS if isinstance(error, cls)), (500, "server_error"))
    message = str(error) if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
    return Failure(message, status, kind, code="context_length_exceeded" if isinstance(error, ContextFull) else None)


def _nearness(error: ErrorDetails) -> tuple[bool, int, int]:
    """Rank the error of one of the kinds that a field may have: that of the nearest kind is the one to report.

    A value out of the bounds of its kind is nearest, then the error deepest within it, then that of its latest item.
    """
    kind, where = error["type"], error["loc"]
    other = kind.endswith("_type") or kind in ("literal_error", "missing", "none_required")
    return not other, len(where), max((part for part in where if isinstance(part, int)), default=0)


def misread(error: ValidationError) -> Failure:
    """Convert a validation error to an error response that names the wrong field."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    others = {one["loc"][:-1] for one in wrong if one["type"] == "literal_error" and one["loc"][-1] == "type"}
    own = [one for one in wrong if not any(one["loc"][: len(place)] == place for place in others)]
    first = max(own or wrong, key=_nearness)
    parts = [part for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part not in _TYPES)]
    where = ".".join(str(part)[:80] for part in parts[:8])
    return Failure(f"{where or 'request'}: {first['msg'][:1000]}", param=where or None)
