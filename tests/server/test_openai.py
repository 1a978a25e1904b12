"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from edgespec.decoding.settings import Grammar
from edgespec.engine.engine import Engine
from tests.server.conftest import Served

PROMPT = "ROMEO:\n"


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_models(client: OpenAI, alone: Engine) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("demo", "edgespec")
    assert model.model_extra is not None
    assert model.model_extra["edgespec"]["methods"] == alone.methods
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_a_completion_is_the_engines_own_text(client: OpenAI, alone: Engine) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0)
    expected = alone.generate(PROMPT, max_new_tokens=40, method="ar")
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens) == 40
    assert answer.usage.prompt_tokens == len(alone.codec.encode(PROMPT))


def test_a_stream_gives_the_same_text_and_ends_with_usage(client: OpenAI, alone: Engine) -> None:
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
def test_the_method_is_a_matter_of_the_request(client: OpenAI, alone: Engine, method: str) -> None:
    own = {"edgespec": {"method": method, "fallback": False}}
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0, extra_body=own)
    assert answer.choices[0].text == alone.generate(PROMPT, max_new_tokens=24, method="ar").text
    assert answer.model_extra is not None
    (said,) = answer.model_extra["edgespec"]
    assert said["method_used"] == method
    assert said["lossless"]
    assert said["rounds"] == 24 if method == "ar" else said["drafted"] > 0


def test_several_prompts_and_choices_with_a_seed(client: OpenAI, alone: Engine) -> None:
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


def test_stop_strings_and_logprobs(client: OpenAI, alone: Engine) -> None:
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


def test_token_ids_are_prompts_too(client: OpenAI, alone: Engine) -> None:
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
        ({"max_tokens": 10**6}, "this server's limit"),
        ({"temperature": -1}, "temperature"),
        ({"presence_penalty": 0.5}, "not supported"),
        ({"logprobs": 5}, "logprobs 5"),
        ({"n": 99}, "n"),
        ({"stop": [""]}, "stop.0: String should have at least 1 character"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"extra_body": {"edgespec": {"method": "magic"}}}, "magic"),
        ({"extra_body": {"edgespec": {"speed": 9}}}, "speed"),
        ({"prompt": "word " * 2000}, "no room"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_by_name(
    client: OpenAI, change: dict[str, object], message: str, stream: bool
) -> None:
    asked: dict[str, object] = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "stream": stream}
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.completions.create(**(asked | change))  # type: ignore[call-overload]
    assert caught.value.status_code in (400, 404)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["type"] == "invalid_request_error"


def test_a_model_without_a_template_says_so(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])


def test_a_schema_is_followed(client: OpenAI, alone: Engine) -> None:
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
