"""Wait for the work of a request, as long as its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from edgespec.server.errors import ClientDisconnected

Found = TypeVar("Found")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Wait for some work of a request that was read.

    Raises:
        ClientDisconnected: its client has left; the work is cancelled.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected("its client has gone")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client of a request has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
