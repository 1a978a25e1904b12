"""Requests that are rejected before they are parsed get errors in the shape of the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served, start, stop
from tests.server.test_connections import connect, request, rest, status

KEY = "Authorization: Bearer k"
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
EARLY: dict[str, tuple[bytes, int, str]] = {  # what is sent to PATH; status; type of Anthropic's API
    "no key": (request(b"{}", "Content-Length: 2", path="PATH"), 401, "authentication_error"),
    "no JSON": (b"POST PATH HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", 415, "invalid_request_error"),
    "another host": (b"POST PATH HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n", 403, "permission_error"),
    "announced as too large": (request(b"", KEY, "Content-Length: 5000", path="PATH"), 413, "request_too_large"),
    "too large": (
        request(b"fff\r\n" + b"x" * 4095 + b"\r\n" + b"0\r\n\r\n", KEY, "Transfer-Encoding: chunked", path="PATH"),
        413,
        "request_too_large",
    ),
    "headers too large": (b"POST PATH HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000, 431, "request_too_large"),
    "too slow": (request(b'{"model', KEY, "Content-Length: 99", path="PATH?beta=true"), 408, "timeout_error"),
    "a method that is none": (
        f"PUT PATH HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nContent-Length: 0\r\n\r\n".encode(),
        405,
        "invalid_request_error",
    ),
}


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Served]:
    options = (
        "--name",
        "it",
        "--read-timeout",
        "0.5",
        "--max-body-size",
        "3000",
        "--api-key",
        "k",
        "--keep-alive-timeout",
        "0.05",
    )
    running = start(chat_bundle, *options)
    yield running
    stop(running)


def answer(served: Served, sent: bytes) -> tuple[int, dict[str, Any]]:
    with connect(served) as sock:
        sock.sendall(sent)
        found = rest(sock)
    return status(found), json.loads(found.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("what", EARLY)
@pytest.mark.parametrize("path", OPENAI + ANTHROPIC)
def test_an_early_error_has_its_apis_shape(server: Served, path: str, what: str) -> None:
    sent, code, anthropic = EARLY[what]
    found, body = answer(server, sent.replace(b"PATH", path.encode()))
    assert found == code
    if path in ANTHROPIC:
        assert body.keys() == {"type", "error"}
        assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
        assert body["error"]["type"] == anthropic
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"]
