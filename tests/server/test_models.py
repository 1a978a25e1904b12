"""Several bundles in one server: loaded on demand, freed for others, and running concurrently."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.testclient import TestClient

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.loading import load
from edgespec.planning.footprint import SERVER, memory_of
from edgespec.planning.memory_budget import MemoryBudget
from edgespec.runtimes.options import LoadOptions
from edgespec.server.app import make_app
from edgespec.server.models import Models
from edgespec.server.scheduler import Limits
from tests.server.conftest import Later, start, stop

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")

URL = "http://localhost:8000"
NAMES = ("demo", "chatty", "third")
ASK: dict[str, Any] = {"prompt": "The king", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folders(served_bundle: Path, chat_bundle: Path, bundles: Callable[..., Path]) -> dict[str, Path]:
    return dict(zip(NAMES, (served_bundle, chat_bundle, served_bundle), strict=True))


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path]) -> dict[str, str]:
    """Generate each model's text without a server."""
    found = {}
    for name, folder in folders.items():
        with load(folder, threads=1) as engine:
            found[name] = engine.generate("The king", max_new_tokens=12, method="ar").text
    return found


def room(folder: Path, texts: int, models: float) -> int:
    """Return the bytes of a server with this bundle loaded ``models`` times, and one request."""
    model = Models({"x": folder}, LoadOptions(threads=1)).all["x"]
    use = replace(model.run, method="ar", context=64 * texts, checkpoints=0)
    alone = MemoryBudget(model.manifest, model.run, "1GiB")
    return int(memory_of(model.manifest, use).peak + SERVER + (models - 1) * alone.loaded_bytes())


def loaded(client: Any) -> list[str]:
    return [one["id"] for one in client.get("/v1/models").json()["data"] if one["edgespec"]["loaded"]]


def ask(client: Any, model: str, **changes: Any) -> Any:
    return client.post("/v1/completions", json=ASK | {"model": model} | changes)


@pytest.fixture
def serving(folders: dict[str, Path]) -> Iterator[Callable[..., TestClient]]:
    """Start a server with all models in this process."""
    with ExitStack() as stack:

        def started(budget: str | int | None = None, seconds: float = 60, **how: Any) -> TestClient:
            models = Models(folders, LoadOptions(threads=1, budget=budget), Limits(parallel=2, seconds=seconds), **how)
            return stack.enter_context(TestClient(make_app(models), base_url=URL))

        yield started


def test_the_request_picks_the_model(serving: Callable[..., TestClient], texts: dict[str, str]) -> None:
    """Each model is loaded at its first request, and its text is the same as without a server, also when streamed."""
    client = serving()
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == list(NAMES)
    assert loaded(client) == []
    for at, name in enumerate(NAMES):
        answer = ask(client, name).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
        assert loaded(client) == list(NAMES[: at + 1])
        streamed = [line.removeprefix("data: ") for line in ask(client, name, stream=True).text.splitlines() if line]
        assert streamed.pop() == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in streamed) == texts[name]
    figures = client.get("/metrics").text
    for name in NAMES:
        assert f'edgespec_requests_total{{end="length",model="{name}"}} 2.0' in figures
        assert f'edgespec_loaded{{model="{name}"}} 1.0' in figures
    assert client.get("/v1/models/chatty").json()["id"] == "chatty"
    described = client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    assert described["properties"]["model"]["enum"] == list(NAMES)


def test_a_model_that_is_not_there_is_told_with_the_nearest(serving: Callable[..., TestClient]) -> None:
    client = serving()
    meant = "this server has 'demo', 'chatty', 'third'; did you mean 'chatty'?"
    answer = ask(client, "chaty")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"no model 'chaty': {meant}"
    assert answer.json()["error"]["param"] == "model"
    assert meant in client.get("/v1/models/chaty").json()["error"]["message"]
    wrong = {"model": "chaty", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    assert client.post("/v1/messages", json=wrong).json()["error"]["type"] == "not_found_error"
    assert loaded(client) == []


def test_what_others_need_is_freed(
    serving: Callable[..., TestClient], folders: dict[str, Path], texts: dict[str, str]
) -> None:
    """Two fit: the third takes the place of the one that was used least recently."""
    client = serving(room(folders["demo"], 2, 2.5))
    for name in ("demo", "chatty", "demo", "third"):
        assert ask(client, name).json()["choices"][0]["text"] == texts[name]
    assert loaded(client) == ["demo", "third"]
    assert ask(client, "chatty").json()["choices"][0]["text"] == texts["chatty"]
    assert loaded(client) == ["chatty", "third"]


def test_a_running_request_keeps_its_model(
    serving: Callable[..., TestClient], folders: dict[str, Path], texts: dict[str, str]
) -> None:
    """Only one model fits: a request for another one waits until the text has ended, and the text is complete."""
    client = serving(room(folders["demo"], 8, 1.5))
    long = {"max_tokens": 400, "prompt": "The king"}
    with client.stream("POST", "/v1/completions", json=ASK | long | {"model": "demo", "stream": True}) as sent:
        lines = sent.iter_lines()
        next(lines)
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(ask(client, "chatty")))
        other.start()
        whole = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    other.join()
    assert whole[-1]["choices"][0]["finish_reason"] == "length"
    assert found[0].json()["choices"][0]["text"] == texts["chatty"]
    assert loaded(client) == ["chatty"]


def test_two_models_answer_side_by_side(serving: Callable[..., TestClient], texts: dict[str, str]) -> None:
    """A short answer of one comes while a long one of another is on its way."""
    client = serving()
    ask(client, "chatty")
    with client.stream(
        "POST", "/v1/completions", json=ASK | {"model": "demo", "max_tokens": 900, "stream": True}
    ) as sent:
        lines = sent.iter_lines()
        next(lines)
        assert ask(client, "chatty").json()["choices"][0]["text"] == texts["chatty"]
        assert client.get("/health").json()["running"] == 1


def test_what_cannot_fit_is_refused_at_once(serving: Callable[..., TestClient], folders: dict[str, Path]) -> None:
    """In the shape of each API; what is loaded stays."""
    client = serving(room(folders["demo"], 1, 1))
    assert ask(client, "demo").status_code == 200
    refused = ask(client, "demo", prompt="x " * 200, max_tokens=500)
    assert refused.status_code == 503
    assert "tokens of prompt and answer need" in refused.json()["error"]["message"]
    small = serving(room(folders["demo"], 1, 0.2))
    answer = ask(small, "demo")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert "this bundle needs at least" in answer.json()["error"]["message"]
    asked = {"model": "chatty", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    answer = small.post("/v1/messages", json=asked)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert loaded(small) == []


def test_a_model_that_nobody_asks_for_is_freed(serving: Callable[..., TestClient], texts: dict[str, str]) -> None:
    client = serving(idle=0.4)
    assert ask(client, "demo").status_code == 200
    while loaded(client):
        time.sleep(0.05)
    assert 'edgespec_loaded{model="demo"} 0.0' in client.get("/metrics").text
    assert ask(client, "demo").json()["choices"][0]["text"] == texts["demo"]


def test_many_clients_over_few_places(
    serving: Callable[..., TestClient], folders: dict[str, Path], texts: dict[str, str]
) -> None:
    """Loading, freeing and answering at once: every text is whole."""
    client = serving(room(folders["demo"], 4, 2.5))
    found: list[tuple[str, str]] = []

    def several(first: int) -> None:
        for at in range(6):
            name = NAMES[(first + at) % 3]
            found.append((name, ask(client, name).json()["choices"][0]["text"]))

    threads = [threading.Thread(target=several, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 18
    assert all(text == texts[name] for name, text in found)


def test_the_command(served_bundle: Path, chat_bundle: Path) -> None:
    """Two folders and their names, asked by OpenAI's and Anthropic's own clients; the log names the models."""
    running = start(served_bundle, str(chat_bundle), "--name", "plain", "--name", "chatty")
    assert "plain, chatty at http" in running.said
    with running.openai() as client:
        assert [one.id for one in client.models.list()] == ["plain", "chatty"]
        assert client.completions.create(model="plain", prompt="x", max_tokens=3).model == "plain"
        with pytest.raises(openai.NotFoundError, match="did you mean 'plain'"):
            client.completions.create(model="plan", prompt="x", max_tokens=3)
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as other:
        answer = other.messages.create(model="chatty", max_tokens=3, messages=[{"role": "user", "content": "x"}])
        assert answer.model == "chatty"
    lines = [line.split()[3:6] for line in stop(running).splitlines() if " POST " in line]
    assert lines == [
        ["/v1/completions", "200", "plain"],
        ["/v1/completions", "404", "-"],
        ["/v1/messages", "200", "chatty"],
    ]


SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.mark.parametrize("own", [None, SAMPLED])
@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.5}, {"min_p": 0.2}])
def test_who_decides_where_a_request_says_nothing(
    chat_bundle: Path, tmp_path: Path, own: dict[str, Any] | None, given: dict[str, Any]
) -> None:
    """Options of serve, before what the model's card says; without both, greedy decoding."""
    folder = tmp_path / "chatty"
    shutil.copytree(chat_bundle, folder)
    file = folder / "edgespec.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"sampling": own}), "utf-8")
    expected: dict[str, Any] = {"temperature": 0.0, **(own or {}), **given}
    models = Models({"chatty": folder}, LoadOptions(threads=1, check=False), sampling=given)
    with TestClient(make_app(models), base_url=URL) as client, load(folder, threads=1, check=False) as engine:
        for asked in ({}, {"temperature": 0.3, "top_k": 3}):
            alone = engine.generate("ROMEO:", Settings(sampling=SamplingParams(seed=3, **expected | asked)),
                                    max_new_tokens=16)  # fmt: skip
            body = {"model": "chatty", "prompt": "ROMEO:", "max_tokens": 16, "seed": 3} | asked
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == alone.text


def test_serve_takes_sampling_as_options(chat_bundle: Path) -> None:
    """Through the command, and in all three APIs; without them, two answers are the same one."""
    chat: dict[str, Any] = {"model": "chatty", "messages": [{"role": "user", "content": "Speak."}], "max_tokens": 12}
    asked = {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"model": "chatty", "input": "Speak.", "max_output_tokens": 12},
    }
    texts: dict[str, set[str]] = {}
    for options in ((), ("--temperature", "1.5", "--top-k", "200")):
        served = start(chat_bundle, "--name", "chatty", *options)
        try:
            for path, body in asked.items():
                found = [httpx.post(f"{served.url}{path}", json=body, timeout=60) for _ in range(3)]
                assert [one.status_code for one in found] == [200] * 3
                texts[f"{options} {path}"] = {_said(one.json()) for one in found}
        finally:
            assert "Traceback" not in stop(served)
    assert [len(each) > 1 for each in texts.values()] == [False] * 3 + [True] * 3


def _said(answer: dict[str, Any]) -> str:
    """Return the text of an answer, in any API."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    return str((answer.get("content") or answer["output"][0]["content"])[0]["text"])
