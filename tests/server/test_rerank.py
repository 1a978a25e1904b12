"""Encoders over HTTP: embeddings by OpenAI's client, and rerank as clients of Cohere and Jina ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

import edgespec
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.server.conftest import Later, Served, start, stop
from tests.support import encoders

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TEXTS = encoders.TEXTS
QUERY = "who is the king?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an encoder with prompts, and a cross-encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    encoders.save(encoders.torch_model("xlm-roberta"), folder / "e5", encoders.unigram())
    encoders.add_sentences(folder / "e5", query="speak: ", passage="a ")
    encoders.save(encoders.torch_model("bert", "ForSequenceClassification", num_labels=1), folder / "cross")
    for name in ("e5", "cross"):
        export_model(ExportOptions(str(folder / name), folder / f"{name}-edge", [], "int8", threads=1))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    running = start(folder / "e5-edge", str(folder / "cross-edge"))
    yield running
    stop(running)


def post(server: Served, path: str, **asked: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=asked, timeout=60)


def rows(answer: Any) -> Any:
    return np.array([one.embedding for one in answer.data], np.float32)


def test_embeddings_are_those_of_the_engine(client: openai.OpenAI, folder: Path) -> None:
    """For any number of texts, with prompts by every name that other APIs have for them."""
    with edgespec.load(folder / "e5-edge", threads=1) as engine:
        texts = [*TEXTS * 20, "a king"]
        answer = client.embeddings.create(model="e5-edge", input=texts)
        assert rows(answer).tobytes() == engine.embed(texts).tobytes()
        for more, prompt in (
            ({"input_type": "query"}, "query"),
            ({"input_type": "search_query"}, "query"),
            ({"task": "retrieval.passage"}, "passage"),
            ({"input_type": "search_document"}, "passage"),
            ({"edgespec": {"prompt": "passage"}}, "passage"),
            ({"input_type": "classification"}, None),
            ({"edgespec": {"prompt": ""}}, None),
        ):
            answer = client.embeddings.create(model="e5-edge", input=TEXTS, extra_body=more)
            assert rows(answer).tobytes() == engine.embed(TEXTS, prompt=prompt).tobytes()
        long = "king " * 500
        with pytest.raises(openai.BadRequestError, match="tokens"):
            client.embeddings.create(model="e5-edge", input=long)
        answer = client.embeddings.create(model="e5-edge", input=long, extra_body={"truncate": "END"})
        assert rows(answer).tobytes() == engine.embed([long], truncate=True).tobytes()
        part = client.embeddings.create(model="e5-edge", input=TEXTS, dimensions=16)
        assert rows(part).tobytes() == engine.embed(TEXTS, dimensions=16).tobytes()


@pytest.mark.parametrize("model", ["cross-edge", "e5-edge"])
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_rerank_is_that_of_the_engine(server: Served, folder: Path, model: str, path: str) -> None:
    with edgespec.load(folder / model, threads=1) as engine:
        wanted = engine.rerank(QUERY, TEXTS)
    found = post(server, path, model=model, query=QUERY, documents=TEXTS).json()
    assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [
        (one.index, pytest.approx(one.score, abs=1e-7)) for one in wanted
    ]
    assert found["model"] == model
    assert found["usage"]["total_tokens"] > 0
    assert found["meta"]["billed_units"]["search_units"] == 1
    few = post(server, path, model=model, query=QUERY, documents=[{"text": one} for one in TEXTS], top_n=2,
               return_documents=True, max_chunks_per_doc=4).json()  # fmt: skip
    assert [one["index"] for one in few["results"]] == [one.index for one in wanted[:2]]
    assert few["results"][0]["document"] == {"text": TEXTS[wanted[0].index]}
    assert few["results"][0]["relevance_score"] == found["results"][0]["relevance_score"]


def test_documents_may_be_cut(server: Served) -> None:
    asked = {"model": "cross-edge", "query": QUERY}
    first, other = (
        post(server, "/v2/rerank", **asked, documents=[text], max_tokens_per_doc=3).json()["results"]
        for text in ("king speak love", "king speak love hate moon")
    )
    assert first == other


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"documents": []}, "documents"),
        ({"documents": ["x", " "]}, "document 1 is empty"),
        ({"documents": ["x"], "query": " "}, "query is empty"),
        ({"documents": ["x"], "query": "king " * 300}, "leaves no room"),
        ({"documents": ["x"], "top_n": 0}, "top_n"),
        ({"documents": [3]}, "documents"),
        ({"documents": ["x"] * 1025}, "documents"),
        ({"documents": [{"text": "x", "title": "y"}]}, "title"),
        ({"documents": ["\ud800"]}, ""),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(server: Served, asked: dict[str, Any], message: str) -> None:
    answer = httpx.post(
        f"{server.url}/v1/rerank",
        content=json.dumps({"model": "cross-edge", "query": QUERY} | asked),
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 400
    assert message in answer.text


def test_an_encoder_writes_no_texts(client: openai.OpenAI, server: Served) -> None:
    """And a cross-encoder makes no embeddings; the list of models says what each does."""
    for ask in (
        lambda: client.completions.create(model="e5-edge", prompt="x"),
        lambda: client.chat.completions.create(model="cross-edge", messages=[{"role": "user", "content": "x"}]),
        lambda: client.responses.create(model="e5-edge", input="x"),
    ):
        with pytest.raises(openai.BadRequestError, match="is an encoder: it reads texts and writes none"):
            ask()
    with pytest.raises(openai.BadRequestError, match="scores pairs of texts"):
        client.embeddings.create(model="cross-edge", input="x")
    about = {one.id: one.model_extra["edgespec"] for one in client.models.list().data if one.model_extra}
    assert (about["e5-edge"]["embeddings"], about["e5-edge"]["reranks"]) == (True, True)
    assert (about["cross-edge"]["embeddings"], about["cross-edge"]["reranks"]) == (False, True)
    assert post(server, "/v1/rerank", model="none", query="x", documents=["y"]).status_code == 404
