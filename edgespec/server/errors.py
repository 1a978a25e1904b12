"""Failures as answers, in the shape of the API that was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.errors import BudgetError, ContextFull, EdgespecError, InvalidRequest

if TYPE_CHECKING:
    from starlette.responses import JSONResponse


class Busy(EdgespecError):
    """The server cannot take a request now, or could not begin it in time."""


class Stopped(EdgespecError):
    """The server was stopped before a text was finished."""


class Gone(EdgespecError):
    """Nobody waits for a request any more."""


class Refusal(EdgespecError):
    """A request that cannot be answered.

    Args:
        message: why.
        status: of HTTP.
        kind: of the error, as the API names it.
        param: the field.
        code: of the error, as the API names it.
    """

    def __init__(
        self, message: str, status: int = 400, kind: str = "", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or "invalid_request_error"


KINDS: list[tuple[type[Exception], int, str]] = [
    (Busy, 429, "rate_limit_error"),
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


@dataclass(frozen=True)
class Failure:
    """What went wrong.

    Attributes:
        status: of HTTP.
        message: in words.
        kind: as OpenAI's API names it.
        param: the field.
        code: as OpenAI's API names it.
    """

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None

    def body(self, path: str = "") -> dict[str, Any]:
        """Write it in the shape of the API at ``path``."""
        if path.startswith(MESSAGES):
            full = self.code == "context_length_exceeded"  # its clients know it by these words, and shorten the talk
            message = f"prompt is too long: {self.message}" if full else self.message
            kind = ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": message}}
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def failure(error: Exception) -> Failure:
    """Say what an error is to a client."""
    if isinstance(error, Refusal):
        return Failure(error.status, str(error), error.kind, error.param, error.code)
    status, kind = next(((code, name) for cls, code, name in KINDS if isinstance(error, cls)), (500, "server_error"))
    message = str(error) if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
    return Failure(status, message, kind, code="context_length_exceeded" if isinstance(error, ContextFull) else None)


def refused(status: int, message: str, path: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Answer a request that is not even looked at."""
    from starlette.responses import JSONResponse  # processes that read requests need none

    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(Failure(status, message, kind).body(path), status, headers)
