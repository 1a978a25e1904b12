"""Failures as answers, in the shape of OpenAI's API."""

from __future__ import annotations

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


def body_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Make an answer that says what went wrong."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error."""
    if isinstance(error, Refusal):
        return error.status, body_of(str(error), error.kind, error.param, error.code)
    status, kind = next(((code, name) for cls, code, name in KINDS if isinstance(error, cls)), (500, "server_error"))
    message = str(error) if isinstance(error, EdgespecError) else f"{type(error).__name__}: {error}"
    code = "context_length_exceeded" if isinstance(error, ContextFull) else None
    return status, body_of(message, kind, code=code)


def refused(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Answer a request that is not even looked at."""
    from starlette.responses import JSONResponse  # processes that read requests need none

    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(body_of(message, kind), status, headers)
