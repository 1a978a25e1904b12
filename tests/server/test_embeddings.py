"""Embeddings over HTTP, as OpenAI's own client asks for them."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.runtimes.options import LoadOptions
from edgespec.server.app import make_app
from edgespec.server.models import Models
from tests.server.conftest import Later, Served, start, stop

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TEXTS = ["Good night, good night!", "Speak", "Parting is such sweet sorrow"]


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("native")


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Iterator[Engine]:
    with load(bundle, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    running = start(bundle, "--name", "poet", "--max-body-size", "3000000")
    yield running
    stop(running)


def rows(answer: Any) -> Any:
    return np.array([one.embedding for one in answer.data], np.float32)


def test_they_are_those_of_the_engine(client: openai.OpenAI, alone: Engine) -> None:
    """Texts and token ids, one and several, as numbers and as base64, which is the client's default."""
    expected = alone.embed(TEXTS)
    answer = client.embeddings.create(model="poet", input=TEXTS)
    assert rows(answer).tobytes() == expected.tobytes()
    assert [one.index for one in answer.data] == [0, 1, 2]
    tokens = [alone.codec.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    assert rows(client.embeddings.create(model="poet", input=tokens)).tobytes() == expected.tobytes()
    for one in (TEXTS[0], tokens[0]):
        answer = client.embeddings.create(model="poet", input=one, encoding_format="float")
        assert rows(answer).tobytes() == expected[:1].tobytes()
    last = client.embeddings.create(model="poet", input=TEXTS, extra_body={"edgespec": {"pooling": "last"}})
    assert rows(last).tobytes() == alone.embed(TEXTS, pooling="last").tobytes()
    part = client.embeddings.create(model="poet", input=TEXTS, dimensions=16, user="somebody")
    assert rows(part).tobytes() == alone.embed(TEXTS, dimensions=16).tobytes()
    raw = client.embeddings.with_raw_response.create(model="poet", input="x", encoding_format="base64").http_response
    coded = base64.b64decode(raw.json()["data"][0]["embedding"])
    assert coded == alone.embed(["x"])[0].tobytes()


def test_they_come_while_texts_are_written(client: openai.OpenAI, alone: Engine) -> None:
    """Neither changes the other."""
    asked: dict[str, Any] = {"model": "poet", "prompt": "The king", "max_tokens": 300, "temperature": 0}
    expected, found = alone.embed(TEXTS).tobytes(), list[bytes]()

    def several() -> None:
        for _ in range(5):
            found.append(rows(client.embeddings.create(model="poet", input=TEXTS)).tobytes())

    thread = threading.Thread(target=several)
    thread.start()
    text = client.completions.create(**asked).choices[0].text
    thread.join()
    assert found == [expected] * 5
    assert text == client.completions.create(**asked).choices[0].text


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"input": ""}, "input 0 is empty"),
        ({"input": ["x", ""]}, "input 1 is empty"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1 << 25]}, "outside the vocabulary"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "king " * 5000}, "reads at most"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 1 << 20}, "the model's width"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "extra_body": {"edgespec": {"pooling": "sum"}}}, "pooling"),
        ({"input": "x", "extra_body": {"edgespec": {"prompt": "query"}}}, "has no prompts"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(client: openai.OpenAI, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.embeddings.create(model="poet", **asked)


def test_a_model_that_is_not_there_and_one_that_cannot(client: openai.OpenAI, bundles: Callable[..., Path]) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'poet'"):
        client.embeddings.create(model="prose", input="x")
    (told,) = client.models.list().data
    assert told.model_extra is not None
    assert told.model_extra["edgespec"]["embeddings"]
    stock = Models({"plain": bundles("stock")}, LoadOptions(threads=1, operators="stock"))
    with TestClient(make_app(stock), base_url="http://localhost:8000") as other:
        answer = other.post("/v1/embeddings", json={"model": "plain", "input": "x"})
        assert answer.status_code == 400
        assert "native operators" in answer.json()["error"]["message"]
        assert not other.get("/v1/models").json()["data"][0]["edgespec"]["embeddings"]
