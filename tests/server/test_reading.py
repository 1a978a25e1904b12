"""Parsing of requests, also from OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Grammar
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.server import readers as module
from edgespec.server.errors import Busy, Failure
from edgespec.server.readers import Readers
from edgespec.server.reading import ModelInfo, ParsedRequest, Reader, parsed
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
from tests.server.conftest import Later, Served

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3)}}


@pytest.fixture(scope="module")
def engine(bundles: Callable[..., Path]) -> Iterator[Engine]:
    loaded = load(bundles("stock"), threads=1)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def known(engine: Engine) -> ModelInfo:
    facts, eos = engine.bundle.manifest.target.facts, engine.bundle.manifest.tokenizer.eos
    sampling = {key: value for key, value in asdict(SamplingParams()).items() if isinstance(value, (int, float, str))}
    return ModelInfo(str(engine.bundle.path), "demo", facts.vocab, engine.context, tuple(eos), sampling, 200)


@pytest.fixture(scope="module")
def reader(known: ModelInfo) -> Reader:
    return Reader([known])


def deep(levels: int) -> Any:
    made: Any = {}
    for _ in range(levels - 1):
        made = {"properties": made}
    return made


@pytest.mark.parametrize(
    "parameters",
    [
        {"const": 5},
        {"enum": [5]},
        {"properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}}, "required": ["a"]},
        {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"not": {}}}},
    ],
)
def test_a_tool_whose_arguments_cannot_be_written_is_named(reader: Reader, parameters: dict[str, Any]) -> None:
    """The message does not show the grammar that all tools are compiled to."""
    pytest.importorskip("llguidance")
    reader._tokens("demo").codec.templates.setdefault("default", "{% for m in messages %}{{ m.content }}{% endfor %}")
    tools = [{"type": "function", "function": {"name": name}} for name in ("fine", "odd")]
    tools[1]["function"]["parameters"] = parameters  # type: ignore[index]
    with pytest.raises(InvalidRequest) as caught:
        reader.read("chat", json.dumps(CHAT | {"tools": tools, "tool_choice": "required"}).encode())
    assert caught.value.message.startswith("the parameters of tool 'odd'")
    for inner in ("rule", "lark", "guidance", "%json"):
        assert inner not in str(caught.value)


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
        {"logit_bias": {str(number): 1.0 for number in range(MOST_BIASES + 1)}},
        {"logit_bias": {"5": -101}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"99999999": 1}},
        {"temperature": -1},
        {"temperature": "1"},
        {"top_p": 2},
        {"seed": 2**64},
        {"model": "x" * 300},
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


def asked(known: ModelInfo, work: Callable[[Readers], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        readers = Readers([known])
        await readers.start()
        try:
            return await work(readers)
        finally:
            await readers.close()

    return asyncio.run(run())


def body(**change: Any) -> bytes:
    return json.dumps(ASK | change).encode()


def test_a_request_is_what_was_asked(known: ModelInfo, engine: Engine) -> None:
    own = {"method": "ngram", "top_k": 7, "regex": "[a-z]+"}
    sent = body(
        prompt=["The king", "O"], n=2, seed=5, stop=["x", "yz"], logit_bias={"7": -3}, edgespec=own, stream=True
    )
    read: ParsedRequest = asked(known, lambda readers: readers.read("me", "completion", sent))
    assert [list(prompt) for prompt in read.prompts] == [engine.codec.encode("The king"), engine.codec.encode("O")]
    assert [one.sampling.seed for one in read.each()] == [5, 6]
    settings = read.settings
    assert (settings.method, settings.sampling.top_k, settings.stop) == ("ngram", 7, ("x", "yz"))
    assert (settings.grammar, settings.sampling.logit_bias) == (Grammar.regex("[a-z]+"), {7: -3.0})
    assert (settings.max_new_tokens, read.stream, read.usage) == (4, True, False)
    assert settings.sampling.acceptance == "coupled"


def test_a_request_without_a_seed_learns(known: ModelInfo) -> None:
    """A seed that the client did not ask for would reset what was learned about drafts and their costs at every
    request.
    """
    read: ParsedRequest = asked(known, lambda readers: readers.read("me", "completion", body(temperature=1.0, n=2)))
    for settings in read.each():
        assert settings.sampling.seed is None
        assert not settings.sampling.seeded_rejection
        assert settings.sampling.temperature == 1.0


def test_what_takes_too_much_ends_alone(known: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid schema that exceeds its time: other requests are parsed at the same time and afterwards."""
    shape = {"type": "object", "properties": {f"{number:x}": {} for number in range(5000)}}
    heavy, light = ({"type": "json_schema", "json_schema": {"schema": schema}} for schema in (shape, SCHEMA))

    async def work(readers: Readers) -> None:
        monkeypatch.setattr(readers._large, "_seconds", 0)  # no time is left
        slow = asyncio.create_task(readers.read("one", "completion", body(response_format=heavy)))
        for _ in range(5):
            assert (await readers.read("two", "completion", body())).choices == 1
        with pytest.raises(Failure, match="processor time"):
            await slow
        monkeypatch.setattr(readers._large, "_seconds", module.SLOW)
        assert (await readers.read("one", "completion", body(response_format=light))).settings.grammar is not None

    asked(known, work)


def test_too_many_that_wait_to_be_read_are_refused(known: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_ONE", 2)

    async def work(readers: Readers) -> list[object]:
        many = [asyncio.create_task(readers.read("one", "completion", body())) for _ in range(12)]
        await asyncio.sleep(0)
        other = asyncio.create_task(readers.read("two", "completion", body()))
        return await asyncio.gather(*many, other, return_exceptions=True)

    *many, other = asked(known, work)
    assert isinstance(other, ParsedRequest)
    refused = [one for one in many if isinstance(one, Busy)]
    assert refused
    assert all(isinstance(one, (Busy, ParsedRequest)) for one in many)


def test_errors_keep_their_field_and_kind(known: ModelInfo) -> None:
    async def work(readers: Readers) -> list[Any]:
        sent = (body(n=99), body(model="other"), body(prompt="word " * 4000), b"x")
        calls = [readers.read("me", "completion", one) for one in sent]
        return await asyncio.gather(*calls, return_exceptions=True)

    many, model, long, none = asked(known, work)
    assert (many.status, many.param) == (400, "n")
    assert (model.status, model.param) == (404, "model")
    assert (long.status, long.code) == (400, "context_length_exceeded")
    assert "not valid JSON" in str(none)


PROMPT = "ROMEO:\n"


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made


def test_models(client: openai.OpenAI, alone: Engine) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("demo", "edgespec")
    assert model.model_extra is not None
    assert model.model_extra["edgespec"]["methods"] == alone.methods
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_a_completion_is_the_engines_own_text(client: openai.OpenAI, alone: Engine) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0)
    expected = alone.generate(PROMPT, max_new_tokens=40, method="ar")
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens) == 40
    assert answer.usage.prompt_tokens == len(alone.codec.encode(PROMPT))


def test_a_stream_gives_the_same_text_and_ends_with_usage(client: openai.OpenAI, alone: Engine) -> None:
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    expected = alone.generate(PROMPT, max_new_tokens=40, method="ar")
    assert "".join(choice.text for event in events for choice in event.choices) == expected.text
    assert [choice.finish_reason for event in events for choice in event.choices][-1] == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 40


@pytest.mark.parametrize("method", ["ar", "ngram", "speculative", "self-spec", "medusa"])
def test_the_method_is_a_matter_of_the_request(client: openai.OpenAI, alone: Engine, method: str) -> None:
    own = {"edgespec": {"method": method, "fallback": False}}
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, extra_body=own)
    assert answer.choices[0].text == alone.generate(PROMPT, max_new_tokens=24, method="ar").text
    assert answer.model_extra is not None
    (said,) = answer.model_extra["edgespec"]
    assert said["method_used"] == method
    assert said["lossless"]
    assert said["rounds"] == 24 if method == "ar" else said["drafted"] > 0


def test_several_prompts_and_choices_with_a_seed(client: openai.OpenAI, alone: Engine) -> None:
    asked = {"model": "demo", "prompt": [PROMPT, "KING:\n"], "max_tokens": 16, "temperature": 0.8, "seed": 7, "n": 2}
    first = client.completions.create(**asked)  # type: ignore[call-overload]
    again = client.completions.create(**asked)  # type: ignore[call-overload]
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) > 2
    how: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.8, "acceptance": "coupled", "method": "ar"}
    expected = [alone.generate(text, seed=7 + which, **how).text for text in (PROMPT, "KING:\n") for which in (0, 1)]
    assert texts == expected


def test_stop_strings_and_logprobs(client: openai.OpenAI, alone: Engine) -> None:
    whole = alone.generate(PROMPT, max_new_tokens=40, method="ar", logprobs=True)
    word = whole.text.split()[3]
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stop=[word], logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == whole.text[: whole.text.index(word)]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert whole.logprobs is not None
    values = choice.logprobs.token_logprobs
    assert values is not None
    assert values == pytest.approx(whole.logprobs[: len(values)], abs=1e-4)


def test_token_ids_are_prompts_too(client: openai.OpenAI, alone: Engine) -> None:
    ids = alone.codec.encode(PROMPT)
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=12, temperature=0)
    assert answer.choices[0].text == alone.generate(ids, max_new_tokens=12, method="ar").text


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "other"}, "no model 'other'"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999]}, "outside the vocabulary"),
        ({"max_tokens": 0}, "max_tokens 0: expected 1 to"),
        ({"best_of": 3}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"logprobs": 50}, "logprobs"),
        ({"n": 99}, "n"),
        ({"stop": ["x" * 300]}, "stop.0: String should have at most 256 characters"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json: this API does not take it"),
        ({"extra_body": {"temprature": 1}}, "temprature: no such field\nhint: did you mean temperature"),
        ({"extra_body": {"edgespec": {"method": "magic"}}}, "magic"),
        ({"extra_body": {"edgespec": {"speed": 9}}}, "speed"),
        ({"prompt": "word " * 2000}, "no room"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, change: dict[str, object], message: str, stream: bool
) -> None:
    asked: dict[str, object] = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "stream": stream}
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.completions.create(**(asked | change))  # type: ignore[call-overload]
    assert caught.value.status_code in (400, 404)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["type"] == "invalid_request_error"


def test_a_model_without_a_template_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])


def test_a_schema_is_followed(client: openai.OpenAI, alone: Engine) -> None:
    shape = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [7, 40]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    own = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": shape}}}
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=60, temperature=0, extra_body=own)
    found = json.loads(answer.choices[0].text)
    assert found.keys() == {"name", "age"}
    assert answer.choices[0].finish_reason == "stop"
    plain = alone.generate(PROMPT, max_new_tokens=60, method="ar", grammar=Grammar.json_schema(shape))
    assert answer.choices[0].text == plain.text


def test_the_likeliest_tokens_are_told(client: openai.OpenAI, alone: Engine) -> None:
    """In greedy decoding the first is the chosen one; log-probabilities fall, and all tokens are different."""
    own = {"edgespec": {"method": "speculative", "fallback": False}}
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "extra_body": own}
    told = client.completions.create(**asked, logprobs=4).choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    for token, value, likeliest in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        names, values = list(likeliest), list(likeliest.values())
        assert (names[0], values[0]) == (token, value)
        assert values == sorted(values, reverse=True)
        assert len(names) == 4
    with_one = [list(one) for one in told.top_logprobs]
    streamed = client.completions.create(**asked, logprobs=4, stream=True)
    again = [
        one
        for event in streamed
        for choice in event.choices
        if choice.logprobs
        for one in choice.logprobs.top_logprobs or ()
    ]
    assert [list(one) for one in again] == with_one
