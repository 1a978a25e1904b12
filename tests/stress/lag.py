"""``edgespec serve`` that says at its end how late its event loop was, and how long it computed at a stretch.

``python -m tests.stress.lag serve BUNDLE``.  With EDGESPEC_SLOW=SECONDS it also names the callbacks that take longer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from typing import Any

from edgespec.server import serving
from tests.stress.hostile import points

EVERY = 0.005  # seconds between two beats
MARK = "loop: "


class Beats:
    """Beats of an event loop: how late each was, and the processor time that the loop took since the one before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._due, self._used = loop, 0.0, 0.0
        self.late: list[float] = []
        self.computed: list[float] = []

    def start(self) -> None:
        self._due, self._used = time.perf_counter() + EVERY, time.thread_time()
        self._loop.call_later(EVERY, self._beat)

    def _beat(self) -> None:
        self.late.append(max(0.0, time.perf_counter() - self._due))
        self.computed.append(time.thread_time() - self._used)
        self.start()

    def report(self) -> dict[str, float]:
        """Milliseconds: how late, and what the loop computed between two beats."""
        found: dict[str, float] = {"beats": len(self.late)}
        for name, seconds in (("late", self.late), ("computed", self.computed)):
            found |= {f"{name}_{point}": ms for point, ms in points(seconds).items()}
        return found


class Server(serving.Server):
    """A server whose loop beats."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if slow := os.environ.get("EDGESPEC_SLOW"):
            logging.getLogger("asyncio").setLevel(logging.WARNING)
            loop.set_debug(True)
            loop.slow_callback_duration = float(slow)
        self._beats = Beats(loop)
        self._beats.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        report: dict[str, Any] = self._beats.report()
        self._say(MARK + json.dumps(report))
        await super().shutdown(sockets)


if __name__ == "__main__":
    from edgespec.cli.app import main

    setattr(serving, "Server", Server)  # noqa: B010
    main()
