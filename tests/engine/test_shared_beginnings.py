"""Requests of a batch that begin alike read their beginning once, and hold it once; their texts do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.batch import RunningBatch
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.request import Request
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.slots.native_batch import BatchSlot, shared_bytes
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import PROMPTS, use_operators

Get = Callable[..., Engine]
Prefills = list[tuple[Slot, list[int]]]


@pytest.fixture(params=["native"])
def operators(request: pytest.FixtureRequest) -> Operators:
    return use_operators(request)


def beginning(engine: Engine, tokens: int = 400) -> list[int]:
    text = engine.codec.encode("".join(PROMPTS))
    return (text * (tokens // len(text) + 1))[:tokens]


def prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return prompts with a common beginning and different ends."""
    common = beginning(engine)
    return [[*common, *engine.codec.encode(PROMPTS[at])[: 5 + at]] for at in range(count)]


def finish(batch: RunningBatch) -> None:
    while batch.requests:
        for _, got in batch.round():
            assert not isinstance(got, Exception), got


def target_tokens(prefills: Prefills) -> int:
    return sum(len(tokens) for slot, tokens in prefills if isinstance(slot, BatchSlot))


@pytest.mark.parametrize("method", ["ar", "ngram", "speculative", "self-spec", "medusa"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=4, acceptance="coupled")])
def test_who_comes_together_reads_together(
    fresh: Get, prefills: Prefills, method: str, sampling: SamplingParams
) -> None:
    made = fresh()
    asked = prompts(made, 6)
    settings = Settings(method=method, max_new_tokens=24, ignore_eos=True, adaptive=False, gamma=3, sampling=sampling)
    alone = [made.generate(prompt, settings).tokens for prompt in asked]
    prefills.clear()
    batch = RunningBatch(made, 6)
    streams = [batch.join(prompt, settings) for prompt in asked]
    finish(batch)
    assert [stream.result.tokens for stream in streams] == alone
    whole = sum(len(prompt) - 1 for prompt in asked)
    assert target_tokens(prefills) < 400 + 6 * 40 < whole
    assert sum(stream.result.stats.reused_tokens for stream in streams) == whole - target_tokens(prefills)
    batch.close()
    # the same of a list of prompts
    prefills.clear()
    assert [result.tokens for result in made.generate_batch(asked, settings, batch=6)] == alone
    assert target_tokens(prefills) < 400 + 6 * 40


def test_a_beginning_is_held_once(fresh: Get) -> None:
    """While they run and afterwards; what the first one leaves stays with the others."""
    made = fresh()
    asked = prompts(made, 4)
    settings = Settings(method="ar", max_new_tokens=40, ignore_eos=True)
    alone = [made.generate(prompt, settings).tokens for prompt in asked]
    batch = RunningBatch(made, 4)
    streams = [batch.join(prompt, settings) for prompt in asked]
    while any(stream.reading for stream in streams):
        list(batch.round())
    slots = [stream.target for stream in streams if isinstance(stream.target, BatchSlot)]
    assert len(slots) == 4
    block = slots[0].batch.pool.block_bytes
    assert shared_bytes(slots) == made.reservations.shared_bytes() == 3 * (400 // 128) * block
    streams[0].cancel()
    list(batch.round())
    assert made.reservations.shared_bytes() == 2 * (400 // 128) * block
    finish(batch)
    assert [stream.result.tokens for stream in streams[1:]] == alone[1:]
    assert made.reservations.shared_bytes() == 0
    assert shared_bytes(slots) == 3 * (400 // 128) * block  # idle ones hold it for the next
    batch.close()


def test_nothing_is_taken_from_others(fresh: Get, prefills: Prefills) -> None:
    made = fresh()
    (prompt,) = prompts(made, 1)
    settings = Settings(method="ar", max_new_tokens=4, ignore_eos=True)
    batch = RunningBatch(made, 4)
    streams = [batch.join(prompt, settings, owner=owner) for owner in ("first", "second", "first", "second")]
    finish(batch)
    assert len({tuple(stream.result.tokens) for stream in streams}) == 1
    assert 2 * len(prompt) - 2 <= target_tokens(prefills) < 2 * len(prompt) + 80
    batch.close()


def test_whoever_read_first_may_leave(fresh: Get, prefills: Prefills) -> None:
    made, cancel = fresh(), threading.Event()
    asked = prompts(made, 3)
    settings = Settings(method="ar", max_new_tokens=8, ignore_eos=True)
    alone = [made.generate(prompt, settings).tokens for prompt in asked]
    prefills.clear()
    batch = RunningBatch(made, 3)
    streams = [batch.join(prompt, settings, cancel if at == 0 else None) for at, prompt in enumerate(asked)]
    while len(streams[0].target.tokens) < 150:
        list(batch.round())
    cancel.set()
    finish(batch)
    assert [stream.result.tokens for stream in streams[1:]] == alone[1:]
    assert target_tokens(prefills) < 400 + 3 * 40
    batch.close()


@pytest.mark.parametrize("name", ["llama_tied_gqa", "qwen3_5_delta", "lfm2_conv"])
@pytest.mark.parametrize("attention", ["f16", "int8"])
def test_chats_with_one_system_prompt(
    native: None, chatty: Callable[[str], Path], prefills: Prefills, name: str, attention: str
) -> None:
    """Hybrids continue from the checkpoint after it."""
    made = load(chatty(name), threads=2, operators="native", attention=attention, prompt_cache=False)
    talks = [
        [{"role": "system", "content": "".join(PROMPTS[:4])[:500]}, {"role": "user", "content": PROMPTS[at][:20]}]
        for at in range(5)
    ]
    asked = [made.codec.chat(talk) for talk in talks]
    settings = Settings(method="ngram", max_new_tokens=12, ignore_eos=True)
    alone = []
    for prompt in asked:
        alone.append(made.generate(prompt, settings).tokens)
        made.sessions.clear()
    prefills.clear()
    batch = RunningBatch(made, 5)
    streams: list[Request] = []
    for prompt in asked:
        streams.append(batch.join(prompt, settings))
        list(batch.round())
    finish(batch)
    assert [stream.result.tokens for stream in streams] == alone
    assert target_tokens(prefills) < sum(map(len, asked)) // 2
    batch.close()
    made.close()
