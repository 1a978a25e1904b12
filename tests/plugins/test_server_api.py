"""An API of another package: one module and an entry point, and the server has it, its shapes and its errors."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.plugins.test_extensions import package
from tests.server.conftest import kind, served_bundle, start, stop  # noqa: F401

ENTRIES = "[edgespec.server_apis]\ntokens = counted_tokens:API\nbroken = counted_tokens:NOTHING\n"
CODE = '''
from array import array
from starlette.responses import JSONResponse
from edgespec.server.apis import Api
from edgespec.server.requests import Name, StrictModel


class TokensRequest(StrictModel):
    """``POST /v1/tokens``."""

    ignored = ()
    model: Name
    text: str


def read(tokens, sent):
    return {"text": sent.text}, [array("i", tokens.codec.encode(sent.text))]


async def respond(jobs, call):
    return JSONResponse({"model": jobs.name, "tokens": call.prompts[0].tolist(), "of": len(call.asked["text"])})


SHAPE = {"type": "object", "properties": {"tokens": {"type": "array"}}}
API = Api("/v1/tokens", "Tokens of a text", TokensRequest, "Tokens", read=read, respond=respond,
          shapes={"Tokens": SHAPE})
'''


def test_an_api_of_another_package_is_served(
    served_bundle: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package(tmp_path, "counted_tokens", ENTRIES, CODE)))
    running = start(served_bundle, "--name", "demo")
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            found = http.post("/v1/tokens", json={"model": "demo", "text": "ROMEO:"}).json()
            assert (found["model"], found["of"]) == ("demo", 6)
            assert found["tokens"]
            wrong = http.post("/v1/tokens", json={"model": "demo", "text": 3})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text")
            assert http.post("/v1/tokens", json={"model": "other", "text": ""}).status_code == 404
            described = http.get("/openapi.json").json()
            assert described["paths"]["/v1/tokens"]["post"]["summary"] == "Tokens of a text"
            assert "Tokens" in described["components"]["schemas"]
            assert "/v1/images/generations" in described["paths"]
    finally:
        stop(running)
