"""What a body becomes, in processes of their own: every field has a bound, and what takes too much ends alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Grammar
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.server import readers as module
from edgespec.server.errors import Busy, Refusal
from edgespec.server.readers import Readers
from edgespec.server.reading import Known, Read, Reader, parsed
from edgespec.server.requests import (
    MOST_BIASES,
    MOST_CHOICES,
    MOST_GRAMMAR,
    MOST_LEVELS,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_STOP,
    MOST_STOPS,
    MOST_TOOLS,
)

ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3)}}


@pytest.fixture(scope="module")
def engine(bundles: Callable[..., Path]) -> Iterator[Engine]:
    loaded = load(bundles("stock"), threads=1)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def known(engine: Engine) -> Known:
    facts, eos = engine.bundle.manifest.target.facts, engine.bundle.manifest.tokenizer.eos
    sampling = {key: value for key, value in asdict(SamplingParams()).items() if isinstance(value, (int, float, str))}
    return Known(str(engine.bundle.path), "demo", facts.vocab, engine.context, tuple(eos), sampling, 200)


@pytest.fixture(scope="module")
def reader(known: Known) -> Reader:
    return Reader(known)


def deep(levels: int) -> Any:
    made: Any = {}
    for _ in range(levels - 1):
        made = {"properties": made}
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ["x"] * (MOST_PROMPTS + 1)},
        {"prompt": [[5]] * (MOST_PROMPTS + 1)},
        {"prompt": ["x"] * 8, "n": 9},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"n": MOST_CHOICES + 1},
        {"n": "2"},
        {"stop": ["x"] * (MOST_STOPS + 1)},
        {"stop": "x" * (MOST_STOP + 1)},
        {"stop": ""},
        {"logit_bias": {str(number): 1.0 for number in range(MOST_BIASES + 1)}},
        {"logit_bias": {"5": -101}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"99999999": 1}},
        {"temperature": -1},
        {"temperature": "1"},
        {"top_p": 2},
        {"seed": 2**64},
        {"model": "x" * 300},
        {"max_tokens": 201},
        {"edgespec": {"regex": "a" * (MOST_GRAMMAR + 1)}},
        {"edgespec": {"gamma": 0}},
        {"edgespec": {"top_k": -1}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * MOST_GRAMMAR}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": deep(MOST_LEVELS)}}},
    ],
)
def test_every_field_has_a_bound(reader: Reader, change: dict[str, Any]) -> None:
    with pytest.raises((EdgespecError, ValidationError)):
        reader.read("completion", json.dumps(ASK | change).encode())
    reader.read("completion", json.dumps(ASK).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"messages": CHAT["messages"] * (MOST_MESSAGES + 1)},
        {"messages": []},
        {"messages": [{"role": "user", "content": deep(480)}]},
        {"messages": [{"role": "user", "content": [[]]}]},
        {"tools": [{}] * (MOST_TOOLS + 1)},
        {"tools": [deep(900)]},
    ],
)
def test_every_field_of_a_chat_has_a_bound(reader: Reader, change: dict[str, Any]) -> None:
    with pytest.raises((EdgespecError, ValidationError)) as caught:
        reader.read("chat", json.dumps(CHAT | change).encode())
    assert "no chat template" not in str(caught.value)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"{}x", b'{"a": NaN}', b'{"a": -Infinity}', b"1"])
def test_what_is_no_object_of_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parsed(body)
    assert parsed(json.dumps(deep(MOST_LEVELS)).encode())


def asked(known: Known, work: Callable[[Readers], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        readers = Readers(known)
        await readers.start()
        try:
            return await work(readers)
        finally:
            await readers.close()

    return asyncio.run(run())


def body(**change: Any) -> bytes:
    return json.dumps(ASK | change).encode()


def test_a_request_is_what_was_asked(known: Known, engine: Engine) -> None:
    own = {"method": "ngram", "top_k": 7, "regex": "[a-z]+"}
    sent = body(
        prompt=["The king", "O"], n=2, seed=5, stop=["x", "yz"], logit_bias={"7": -3}, edgespec=own, stream=True
    )
    read: Read = asked(known, lambda readers: readers.read("me", "completion", sent))
    assert [list(prompt) for prompt in read.prompts] == [engine.codec.encode("The king"), engine.codec.encode("O")]
    assert [one.sampling.seed for one in read.each()] == [5, 6]
    settings = read.settings
    assert (settings.method, settings.sampling.top_k, settings.stop) == ("ngram", 7, ("x", "yz"))
    assert (settings.grammar, settings.sampling.logit_bias) == (Grammar.regex("[a-z]+"), {7: -3.0})
    assert (settings.max_new_tokens, read.stream, read.usage) == (4, True, False)
    assert settings.sampling.acceptance == "coupled"


def test_a_request_without_a_seed_learns(known: Known) -> None:
    """A seed that nobody asked for would make guesses and their costs start anew with every request."""
    read: Read = asked(known, lambda readers: readers.read("me", "completion", body(temperature=1.0, n=2)))
    for settings in read.each():
        assert settings.sampling.seed is None
        assert not settings.sampling.seeded_rejection
        assert settings.sampling.temperature == 1.0


def test_what_takes_too_much_ends_alone(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema within its bounds that takes more than its time: others are read meanwhile and afterwards."""
    monkeypatch.setattr(module, "SLOW", 0)  # what there is of a second
    shape = {"type": "object", "properties": {f"{number:x}": {} for number in range(5000)}}
    heavy, light = ({"type": "json_schema", "json_schema": {"schema": schema}} for schema in (shape, SCHEMA))

    async def work(readers: Readers) -> None:
        slow = asyncio.create_task(readers.read("one", "completion", body(response_format=heavy)))
        for _ in range(5):
            assert (await readers.read("two", "completion", body())).choices == 1
        with pytest.raises(Refusal, match="processor time"):
            await slow
        assert (await readers.read("one", "completion", body(response_format=light))).settings.grammar is not None

    asked(known, work)


def test_too_many_that_wait_to_be_read_are_refused(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_ONE", 2)

    async def work(readers: Readers) -> list[object]:
        many = [asyncio.create_task(readers.read("one", "completion", body())) for _ in range(12)]
        await asyncio.sleep(0)
        other = asyncio.create_task(readers.read("two", "completion", body()))
        return await asyncio.gather(*many, other, return_exceptions=True)

    *many, other = asked(known, work)
    assert isinstance(other, Read)
    refused = [one for one in many if isinstance(one, Busy)]
    assert refused
    assert all(isinstance(one, (Busy, Read)) for one in many)


def test_errors_keep_their_field_and_kind(known: Known) -> None:
    async def work(readers: Readers) -> list[Any]:
        sent = (body(n=99), body(model="other"), body(prompt="word " * 4000), b"x")
        calls = [readers.read("me", "completion", one) for one in sent]
        return await asyncio.gather(*calls, return_exceptions=True)

    many, model, long, none = asked(known, work)
    assert (many.status, many.param) == (400, "n")
    assert (model.status, model.param) == (404, "model")
    assert (long.status, long.code) == (400, "context_length_exceeded")
    assert "not valid JSON" in str(none)
