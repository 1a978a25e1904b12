"""Who may use a server: names, pages, declared bodies, keys; and what one client learns of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.server.app import Access, make_app
from edgespec.server.guard import client_of, is_local
from edgespec.server.scheduler import Limits

ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 2, "temperature": 0}
PAGE = {"Origin": "https://chat.example", "Host": "localhost:8000"}


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("stock")


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[TestClient]:
    access = Access(hosts=["edge.example"], origins=["https://chat.example"])
    with TestClient(make_app(load(bundle, threads=1), "demo", access=access), base_url="http://localhost:8000") as made:
        yield made


@pytest.fixture(scope="module")
def plain(bundle: Path) -> Iterator[TestClient]:
    with TestClient(make_app(load(bundle, threads=1), "demo"), base_url="http://localhost:8000") as made:
        yield made


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "edge.example:80", "EDGE.example.", "a.localhost"],
)
def test_addresses_and_names_of_its_own_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "a@b", "[::1", "x:y"]
)
def test_a_name_that_was_made_to_point_here_is_refused(client: TestClient, host: str) -> None:
    """DNS rebinding: the page's own name is in the Host."""
    for path in ("/health", "/v1/models"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json=ASK, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:8000"])
def test_other_pages_may_not_use_it(client: TestClient, plain: TestClient, origin: str) -> None:
    for one in (client, plain):
        answer = one.post("/v1/completions", json=ASK, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "--allow-origin" in answer.json()["error"]["message"]
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert one.options("/v1/completions", headers=asked).status_code == 403


def test_a_page_that_was_allowed_asks_first_and_reads_the_answer(client: TestClient, plain: TestClient) -> None:
    asked = PAGE | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    before = client.options("/v1/completions", headers=asked)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "https://chat.example"
    answer = client.post("/v1/completions", json=ASK, headers=PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    own = plain.post("/v1/completions", json=ASK, headers={"Origin": "http://localhost:8000"})
    assert own.status_code == 200  # a page of its own


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_body_must_be_declared_as_json(client: TestClient, kind: str | None) -> None:
    """What a page can send without asking first is none of these."""
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/v1/completions", content=b'{"model": "demo", "prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    declared = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", json=ASK, headers=declared).status_code == 200


def test_an_empty_key_is_refused() -> None:
    for keys in ([""], [" "], ["right", ""]):
        with pytest.raises(InvalidRequest, match="the API key is empty"):
            Access(keys)


def test_what_only_this_machine_reaches() -> None:
    assert all(map(is_local, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_local, ("0.0.0.0", "::", "192.168.1.7", "host.example")))
    assert client_of("2001:db8:1:2::7") == client_of("2001:db8:1:2:ffff::1") != client_of("2001:db8:1:3::7")
    assert client_of("10.0.0.1") != client_of("10.0.0.2")


@pytest.mark.parametrize("shared", [False, True])
def test_what_one_client_asked_is_not_told_to_another(bundle: Path, shared: bool) -> None:
    """A right guess of another one's text must not be told from a wrong one, but by whoever shares on purpose."""
    secret = "The password of the king is a nightingale"
    access = Access(["one", "two"], shared=shared)
    app = make_app(load(bundle, threads=1), "demo", Limits(parallel=2), access)
    with TestClient(app, base_url="http://localhost") as made:

        def cached(key: str, text: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            answer = made.post("/v1/completions", json=ASK | {"prompt": text}, headers=headers).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("one", secret) == 0
        own = cached("one", secret)
        assert own > 8
        found = cached("two", secret)
        assert found == (own if shared else 0)
