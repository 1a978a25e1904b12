"""What a server takes at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgespec.errors import InvalidRequest


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; each has the default of ``edgespec serve``.

    Attributes:
        parallel: requests that are decoded together.
        queue: requests that may wait; more are refused with 429.
        tokens: most new tokens of a request.
        body: most bytes of a request's body.
        seconds: most time of a request, waiting included; a text that takes longer is cut there.
        grace: seconds that requests at hand get when the server is stopped.

    Raises:
        InvalidRequest: a number that is none, or below what makes sense.
    """

    parallel: int = 4
    queue: int = 64
    tokens: int = 4096
    body: int = 1 << 20
    seconds: float = 600.0
    grace: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("queue", "grace") else 1e-3 if field.name == "seconds" else 1
            if not getattr(self, field.name) >= least:
                raise InvalidRequest(f"{field.name} {getattr(self, field.name)}: expected at least {least:g}")
