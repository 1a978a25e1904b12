"""What a server takes at most."""

from __future__ import annotations

from dataclasses import dataclass, fields

from edgespec.errors import InvalidRequest


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; each has the default of ``edgespec serve``.

    Attributes:
        parallel: texts that are decoded together.
        queue: texts that may wait; more are refused with 429.  One client may fill three quarters of it.
        tokens: most new tokens of a text.
        body: most bytes of a request's body.
        seconds: most time of a request, waiting included; a text that takes longer is cut there.
        grace: seconds that running requests get when the server is stopped.
        connections: most open ones; beyond that the oldest idle one is closed, or a new one waits.
        arrive: seconds for a request to arrive whole, and for a client to go on reading its answer.
        idle: seconds that a connection stays open between two requests.

    Raises:
        InvalidRequest: a number that is none, or below what makes sense.
    """

    parallel: int = 4
    queue: int = 64
    tokens: int = 4096
    body: int = 1 << 20
    seconds: float = 600.0
    grace: float = 30.0
    connections: int = 256
    arrive: float = 30.0
    idle: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("queue", "grace") else 1 if field.type == "int" else 1e-3
            if not getattr(self, field.name) >= least:
                raise InvalidRequest(f"{field.name} {getattr(self, field.name)}: expected at least {least:g}")

    @property
    def queue_of_one(self) -> int:
        """Texts of one client that may wait: somebody else's find a place."""
        return self.queue - self.queue // 4
