"""Adapters in the server: a request asks for one as MODEL:ADAPTER."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.engine.loading import load
from edgespec.export.source.source import resolve
from edgespec.runtimes.options import LoadOptions
from edgespec.server.app import Access, make_app
from edgespec.server.models import Models
from tests.conftest import TARGET
from tests.support.checkpoints import write_adapter

ASK: dict[str, Any] = {"prompt": "The king", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    config = json.loads((resolve(TARGET) / "config.json").read_text("utf-8"))
    for name, rank in (("poet", 4), ("clerk", 9)):
        write_adapter(folder / name, config, ("q_proj", "v_proj", "down_proj"), rank)
    return {name: folder / name for name in ("poet", "clerk")}


@pytest.fixture(scope="module")
def folder(native: object, bundles: Callable[..., Path]) -> Path:
    return bundles("native", "int8")


@pytest.fixture(scope="module")
def client(folder: Path, adapters: dict[str, Path]) -> Iterator[TestClient]:
    models = Models({"demo": folder}, LoadOptions(threads=1, adapters=adapters))
    with TestClient(make_app(models, Access(hosts=("*",)))) as client:
        yield client


def test_a_request_chooses_an_adapter(client: TestClient, folder: Path, adapters: dict[str, Path]) -> None:
    texts = {}
    with load(folder, threads=1, adapters=adapters) as engine:
        for name in (None, "poet", "clerk"):
            model = "demo" if name is None else f"demo:{name}"
            answer = client.post("/v1/completions", json=ASK | {"model": model}).json()
            assert answer["model"] == model
            texts[model] = answer["choices"][0]["text"]
            assert texts[model] == engine.generate(ASK["prompt"], adapter=name, max_new_tokens=12, temperature=0).text
    assert len(set(texts.values())) == 3


def test_models_list_their_adapters(client: TestClient) -> None:
    names = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert names == ["demo", "demo:poet", "demo:clerk"]
    assert client.get("/v1/models/demo:poet").json()["id"] == "demo:poet"
    described = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    assert described["properties"]["model"]["enum"] == names


def test_unknown_adapters_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/completions", json=ASK | {"model": "demo:pet"})
    assert answer.status_code == 404
    assert "did you mean 'demo:poet'" in answer.json()["error"]["message"]
    answer = client.post("/v1/embeddings", json={"model": "demo:poet", "input": "a text"})
    assert answer.status_code == 400
    assert "adapters are for texts" in answer.json()["error"]["message"]
