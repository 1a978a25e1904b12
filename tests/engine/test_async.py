"""Requests that an event loop waits for: their texts, how they end early, and the threads that they take."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from edgespec.engine.asynchronous import AsyncStream
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from tests.conftest import PROMPTS
from tests.support.requests import Get, ask

NEW = 16
LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True, "method": "ar"}
Made = TypeVar("Made")


def run(work: Coroutine[Any, Any, Made]) -> Made:
    """Run to the end; no thread of a request is left."""
    found = asyncio.run(work)
    for thread in threading.enumerate():
        if thread.name == "edgespec-request":
            thread.join(60)
            assert not thread.is_alive()
    return found


def test_texts_are_those_of_requests_that_block(engine: Get) -> None:
    made = engine()
    expected = [made.generate(text, max_new_tokens=NEW).tokens for text in PROMPTS[:3]]

    async def several() -> list[list[int]]:
        results = await asyncio.gather(*(made.agenerate(text, max_new_tokens=NEW) for text in PROMPTS[:3]))
        return [result.tokens for result in results]

    assert run(several()) == expected


def test_a_stream_gives_pieces_while_the_loop_goes_on(engine: Get) -> None:
    made = engine()
    expected = ask(made, PROMPTS[0], max_new_tokens=64, ignore_eos=True)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def whole() -> tuple[str, AsyncStream]:
        beside = asyncio.create_task(tick())
        stream = made.astream(PROMPTS[0], max_new_tokens=64, ignore_eos=True)
        with pytest.raises(InvalidRequest, match="has not begun"):
            _ = stream.result
        text = "".join([chunk.text async for chunk in stream])
        beside.cancel()
        return text, stream

    text, stream = run(whole())
    assert text == stream.result.text == expected.text
    assert stream.result.tokens == expected.tokens
    assert ticks > 1
    assert repr(stream) == "<AsyncStream, ended>"


def test_one_thread_decodes_a_whole_stream(engine: Get) -> None:
    made, started = engine(), []

    class Counted(threading.Thread):
        def start(self) -> None:
            started.append(self.name)
            super().start()

    async def count() -> int:
        return len([chunk async for chunk in made.astream(PROMPTS[0], max_new_tokens=40, ignore_eos=True, method="ar")])

    original, threading.Thread = threading.Thread, Counted  # type: ignore[misc]
    try:
        assert run(count()) > 10
    finally:
        threading.Thread = original  # type: ignore[misc]
    assert started.count("edgespec-request") == 1


def test_errors_are_those_of_requests_that_block(engine: Get) -> None:
    made = engine()

    async def first() -> None:
        async for _ in made.astream(PROMPTS[0], method="magic"):
            pass

    for work in (made.agenerate("", max_new_tokens=1), first(), made.agenerate("x", cancel=1)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            run(work)
    assert ask(made, PROMPTS[0], max_new_tokens=4).tokens


async def read(stream: AsyncStream, most: int = 10_000) -> None:
    async for _ in stream:
        most -= 1
        if not most:
            break


async def by_task(stream: AsyncStream) -> None:
    task = asyncio.create_task(read(stream))
    while not stream._streams or not stream.result.tokens:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_with(stream: AsyncStream) -> None:
    async with stream:
        await read(stream, 2)


async def by_aclose(stream: AsyncStream) -> None:
    await read(stream, 2)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def by_cancel(stream: AsyncStream) -> None:
    await read(stream, 2)
    stream.cancel()
    await read(stream)
    assert stream.result.finish == "cancelled"


async def by_the_end_of_the_loop(stream: AsyncStream) -> None:
    await read(stream, 2)


@pytest.mark.parametrize("leave", [by_task, by_with, by_aclose, by_cancel, by_the_end_of_the_loop])
def test_whoever_leaves_ends_the_request(
    engine: Get, leave: Callable[[AsyncStream], Coroutine[Any, Any, None]]
) -> None:
    """By any way out: the slot is free, and the next request has its text."""
    made = engine()
    expected = ask(made, PROMPTS[1], max_new_tokens=4).tokens
    stream = made.astream(PROMPTS[0], **LONG)
    run(leave(stream))
    assert 0 < len(stream.result.tokens) < 400
    assert ask(made, PROMPTS[1], max_new_tokens=4).tokens == expected


def test_a_stream_that_nobody_has_ends(engine: Get) -> None:
    made, ended = engine(), []

    async def forget() -> None:
        stream = made.astream(PROMPTS[0], **LONG)
        await read(stream, 2)
        ended.extend(stream._streams)
        del stream
        gc.collect()
        while not ended[0].request.ended:
            await asyncio.sleep(0.001)

    run(forget())
    assert ended[0].result.finish == "cancelled"


def test_a_task_that_is_cancelled_ends_its_request(engine: Get) -> None:
    made, pieces = engine(), []

    async def leave() -> None:
        task = asyncio.create_task(made.agenerate(PROMPTS[0], on_chunk=lambda chunk: pieces.append(chunk), **LONG))
        while not pieces:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(leave())
    assert 0 < len(pieces) < 400
    assert inspect.iscoroutinefunction(Engine.agenerate)
