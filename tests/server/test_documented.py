"""The requests of the HTTP reference work as the page shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from edgespec.server.app import make_app
from edgespec.server.scheduler import Limits
from tests.server.conftest import models_of

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/http.md").read_text("utf-8")
OTHERS = {"orpheus", "painter"}  # models that speak and draw: their requests are compared with the description


def examples() -> list[tuple[str, Any]]:
    """List the JSON blocks of the page, each with the last path that was named before it."""
    found, path = [], ""
    for named, block in re.findall(r"`POST (/v1/[\w/]+)`(?! \|)|```json\n(.*?)```", PAGE, re.S):
        path = named or path
        if block:
            found.append((path, json.loads(block)))
    return found


REQUESTS = [(path, body) for path, body in examples() if "model" in body and "id" not in body]


@pytest.fixture(scope="module")
def client(chat_bundle: Path) -> Iterator[TestClient]:
    app = make_app(models_of(chat_bundle, "demo", Limits(parallel=2)))
    with TestClient(app, base_url="http://localhost:8000") as made:
        yield made


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_request_of_the_page(client: TestClient, path: str, body: dict[str, Any]) -> None:
    described = client.get("/openapi.json").json()
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate({**body, "model": "demo"}, {**schema, "components": described["components"]})
    if body["model"] not in OTHERS:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        shown = [other for place, other in examples() if place == path and "id" in other]
        assert all(other.keys() <= answer.json().keys() for other in shown)
        assert all(other["edgespec"][0].keys() == answer.json()["edgespec"][0].keys() for other in shown if own(other))


def own(answer: dict[str, Any]) -> bool:
    """Tell whether an example shows how its choices were decoded."""
    return bool(answer.get("edgespec"))


def test_the_page_has_every_path(client: TestClient) -> None:
    paths = {path.partition("{")[0].rstrip("/") for path in client.get("/openapi.json").json()["paths"]}
    assert len(REQUESTS) >= 10
    assert all(path in PAGE for path in paths)


def test_an_error_of_the_page(client: TestClient) -> None:
    (shown,) = [body for _, body in examples() if "error" in body]
    answer = client.post("/v1/completions", json={"model": "demo", "prompt": "ROMEO:", "temprature": 1})
    assert answer.status_code == 400
    assert answer.json() == shown
