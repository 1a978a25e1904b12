"""The HTTP API: answers, and whose turn it is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from edgespec.decoding.loop import Round
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.request import Request as TextRequest
from edgespec.errors import BundleError, InvalidRequest
from edgespec.server.app import Access, make_app
from edgespec.server.errors import Busy, Stopped
from edgespec.server.queues import FairQueue
from edgespec.server.scheduler import Event, Limits, PendingRequest, Scheduler
from tests.server.conftest import models_of

URL = "http://localhost:8000"
JSON = {"Content-Type": "application/json"}
ASK = {"model": "chatty", "messages": [{"role": "user", "content": "Good night"}], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(chat_bundle: Path) -> Iterator[Engine]:
    loaded = load(chat_bundle, threads=1)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def client(chat_bundle: Path) -> Iterator[TestClient]:
    app = make_app(models_of(chat_bundle, "chatty", Limits(parallel=2, body=5000, tokens=200)))
    with TestClient(app, base_url=URL) as made:
        yield made


def events(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_is_answered_by_the_template(client: TestClient, engine: Engine) -> None:
    answer = client.post("/v1/chat/completions", json=ASK).json()
    expected = engine.chat(ASK["messages"], max_new_tokens=12, method="ar")  # type: ignore[arg-type]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)


def test_a_chat_as_a_stream(client: TestClient, engine: Engine) -> None:
    sent = client.post("/v1/chat/completions", json=ASK | {"stream": True, "logprobs": True})
    assert sent.headers["content-type"].startswith("text/event-stream")
    found = events(sent.text)
    first, *middle, last = [event["choices"][0] for event in found]
    assert first["delta"] == {"role": "assistant", "content": ""}
    text = engine.chat(ASK["messages"], max_new_tokens=12, method="ar").text  # type: ignore[arg-type]
    assert "".join(choice["delta"]["content"] for choice in middle) == text
    assert all(choice["logprobs"]["content"] for choice in middle)
    assert last["delta"] == {}
    assert last["finish_reason"] in ("length", "stop")
    assert found[-1]["edgespec"][0]["lossless"]


@pytest.mark.parametrize("stop", [None, "the"])
def test_a_stream_tells_its_guesses_apart(client: TestClient, stop: str | None) -> None:
    """Accepted draft tokens and the model's own tokens form the text, rejected ones do not, and the counts add up."""
    own = {"edgespec": {"method": "ngram", "fallback": False, "adaptive": False}}
    ask = ASK | {"max_tokens": 120, "stop": stop} | own
    plain = client.post("/v1/chat/completions", json=ask).json()
    own["edgespec"]["show_drafts"] = True
    *found, last = events(client.post("/v1/chat/completions", json=ask | own | {"stream": True}).text)[1:]
    said = [event["edgespec"][0] for event in found]
    for event, one in zip(found, said, strict=True):
        assert one["texts"]["accepted"] + one["texts"]["own"] == event["choices"][0]["delta"]["content"]
        assert bool(one["texts"]["accepted"]) <= (one["accepted"] > 0)
        assert bool(one["texts"]["refused"]) <= (one["drafted"] > one["accepted"])
    text = "".join(one["texts"]["accepted"] + one["texts"]["own"] for one in said)
    assert text == plain["choices"][0]["message"]["content"]
    (whole,) = last["edgespec"]
    rounds = [one for one in said if one["tokens"]]
    assert (len(rounds), sum(one["drafted"] for one in said)) == (whole["rounds"], whole["drafted"])
    if stop is None:
        assert sum(one["accepted"] for one in said) == whole["accepted"] > 0
        assert sum(one["tokens"] for one in said) == plain["usage"]["completion_tokens"]
        assert any(one["texts"]["refused"] for one in said)


def test_parts_of_text_and_tools_go_through_the_template(client: TestClient) -> None:
    parts = [{"type": "text", "text": "Good "}, {"type": "text", "text": "night"}]
    same = client.post("/v1/chat/completions", json=ASK | {"messages": [{"role": "user", "content": parts}]}).json()
    plain = client.post("/v1/chat/completions", json=ASK).json()
    assert same["choices"] == plain["choices"]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    more = client.post("/v1/chat/completions", json=ASK | {"tools": [tool]}).json()
    assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    none = client.post("/v1/chat/completions", json=ASK | {"tools": [tool], "tool_choice": "none"}).json()
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"response_format": {"type": "json_schema"}}, "json_schema with a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "expected an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, "what"),
        ({"response_format": {"type": "json_object"}, "edgespec": {"regex": "a"}}, "several grammars"),
        ({"edgespec": {"regex": "("}}, "regex"),
        ({"edgespec": {"show_drafts": True}}, "show_drafts without stream"),
        ({"top_logprobs": 3}, "top_logprobs 3 without logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_chats_that_cannot_be_answered(client: TestClient, change: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/chat/completions", json=ASK | change)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 3000, b'"x"', b"\xff"])
def test_bodies_that_are_no_requests(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_bodies_are_limited_with_and_without_a_length(client: TestClient) -> None:
    def pieces() -> Iterator[bytes]:
        yield from [b" " * 1000] * 100

    for content in (b" " * 6000, pieces()):
        answer = client.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 413
        assert "5000 bytes" in answer.json()["error"]["message"]


def test_a_client_that_hangs_up_within_its_body_is_no_failure(client: TestClient) -> None:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
             "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}  # fmt: skip

    async def asked() -> None:
        await client.app(scope, receive, send)

    asyncio.run(asked())


def test_a_key_is_asked_for(chat_bundle: Path) -> None:
    app = make_app(models_of(chat_bundle, "chatty"), access=Access(["other", "s\u00e9same"]))
    with TestClient(app, base_url=URL) as client:
        wrong = [{}, {"Authorization": "Bearer sesame"}, {"Authorization": "Basic x"}]
        for path in ("/v1/models", "/v1/models/chatty", "/metrics"):
            assert [client.get(path, headers=one).status_code for one in wrong] == [401] * 3
        assert client.post("/v1/completions", json={}).status_code == 401
        for right in ("Bearer s\u00e9same", "bearer  s\u00e9same", "BEARER other"):
            assert client.get("/v1/models", headers={"Authorization": right.encode()}).status_code == 200
        assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_figures(chat_bundle: Path) -> None:
    with TestClient(make_app(models_of(chat_bundle, "chatty")), base_url=URL) as client:
        client.post("/v1/chat/completions", json=ASK | {"edgespec": {"method": "ar"}})
        client.post("/v1/chat/completions", json=ASK | {"edgespec": {"method": "ngram"}})
        text = client.get("/metrics").text
    assert 'edgespec_requests_total{end="length",model="chatty"} 2.0' in text
    assert 'edgespec_tokens_total{method="ngram",model="chatty"} 12.0' in text
    assert 'edgespec_running_requests{model="chatty"} 0.0' in text


def test_unknown_paths_are_errors_of_the_same_shape(client: TestClient) -> None:
    answer = client.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "Not Found"


def test_a_request_that_fails_ends_alone(client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a text is sent as the last event, and the next request is served."""
    take = TextRequest._take  # of a round, whether its pass ran separately or in a batch
    calls = 0

    def broken(self: TextRequest, item: Round) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise BundleError("the weights are gone")
        return take(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(TextRequest, "_take", broken)
        sent = client.post("/v1/chat/completions", json=ASK | {"stream": True, "edgespec": {"method": "ar"}}).text
    last = events(sent)[-1]
    assert last["error"]["message"] == "the weights are gone"
    again = client.post("/v1/chat/completions", json=ASK).json()
    expected = engine.chat(ASK["messages"], max_new_tokens=12, method="ar")  # type: ignore[arg-type]
    assert again["choices"][0]["message"]["content"] == expected.text


# -- the scheduler without a server -----------------------------------------------------------------------------------


class Listener:
    """Takes the events of one ticket; ``at_first`` is called with the first text."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at_first: Callable[[], None] = lambda: None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == 1:
            self.at_first()


def submit(scheduler: Scheduler, engine: Engine, listener: Listener) -> PendingRequest:
    settings = Settings(max_new_tokens=300, ignore_eos=True)
    return scheduler.submit(PendingRequest(TextRequest(engine, "The king", settings), listener))


def test_time_is_limited(engine: Engine) -> None:
    """A running text is cut off and keeps its tokens; a waiting one gets an error."""
    scheduler = Scheduler(engine, Limits(parallel=1))
    first, second = Listener(), Listener()
    tickets: list[PendingRequest] = []

    def over() -> None:  # in the decoding thread, after the first round: both were lined up before
        tickets.append(submit(scheduler, engine, second))
        for ticket in tickets:
            ticket.deadline = 0.0

    first.at_first = over
    tickets.append(submit(scheduler, engine, first))
    assert tickets[0].done.wait(120)
    assert tickets[1].done.wait(120)
    scheduler.close()
    assert first.events[-1].timed_out
    assert first.events[-1].result is not None
    assert 0 < len(first.events[-1].result.tokens) < 300
    (only,) = second.events
    assert only.timed_out
    assert "did not come in time" in str(only.error)


def test_a_cancelled_request_leaves_its_place(engine: Engine) -> None:
    scheduler = Scheduler(engine, Limits(parallel=1))
    first, second = Listener(), Listener()
    ticket = submit(scheduler, engine, first)
    first.at_first = ticket.cancel
    after = submit(scheduler, engine, second)
    assert after.done.wait(120)
    scheduler.close()
    result = second.events[-1].result
    assert result is not None
    assert len(result.tokens) == 300
    assert ticket.done.is_set()


def test_the_queue_is_limited_and_stopping_ends_it(engine: Engine) -> None:
    scheduler = Scheduler(engine, Limits(parallel=1, queue=1, grace=0))
    listeners = [Listener() for _ in range(2)]
    refused: list[Exception] = []

    def fill() -> None:  # one runs, one may wait
        tickets.append(submit(scheduler, engine, listeners[1]))
        try:
            submit(scheduler, engine, Listener())
        except Busy as error:
            refused.append(error)
        filled.set()

    filled = threading.Event()
    listeners[0].at_first = fill
    tickets = [submit(scheduler, engine, listeners[0])]
    assert filled.wait(120)
    scheduler.close()
    assert all(ticket.done.is_set() for ticket in tickets)
    assert "wait already" in str(refused[0])
    with pytest.raises(Stopped, match="stopping"):
        submit(scheduler, engine, Listener())


def test_limits_are_checked() -> None:
    for wrong in ({"parallel": 0}, {"tokens": 0}, {"seconds": 0}, {"queue": -1}, {"seconds": float("nan")}):
        with pytest.raises(InvalidRequest, match="expected at least"):
            Limits(**wrong)


ITEMS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12")), max_size=30)


def test_one_with_much_waits_for_one_with_little() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(64):
        queue.add("many", "one request", f"many {number}")
    assert queue.take()[2] == "many 0"
    queue.add("other", "short", "other")
    queue.add("many", "second request", "second")
    assert [queue.take()[2] for _ in range(4)] == ["many 1", "other", "second", "many 2"]
    assert (len(queue), queue.of("many"), queue.of("other")) == (61, 61, 0)


def test_what_was_taken_too_early_is_next_again() -> None:
    queue: FairQueue[int] = FairQueue()
    for client, item in (("a", 1), ("b", 2), ("a", 3)):
        queue.add(client, "r", item)
    taken = queue.take()
    queue.put_back(*taken)
    assert [queue.take()[2] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(IndexError):
        queue.take()
    queue.put_back(*taken)
    queue.remove(1)
    assert len(queue) == 0


def test_leaving_a_long_queue_looks_at_nobody_else() -> None:
    """A thousand requests that end at once must not cost a million looks, in the loop that answers all."""
    looks = 0

    class Item:
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return self is other

        def __hash__(self) -> int:
            return id(self)

    queue, items = FairQueue[Item](), [Item() for _ in range(1000)]
    for number, item in enumerate(items):
        queue.add("abc"[number % 3], str(number % 50), item)
    for item in reversed(items):
        queue.remove(item)
    assert looks < len(items)
    assert (len(queue), queue.of("a")) == (0, 0)
    queue.remove(items[0])  # which has left


@given(ITEMS)
def test_everything_comes_once_and_in_the_order_of_its_request(items: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    own: dict[tuple[str, str], deque[int]] = {}
    for number, (client, request) in enumerate(items):
        queue.add(client, request, number)
        own.setdefault((client, request), deque()).append(number)
    assert sorted(queue) == list(range(len(items)))
    turns: list[str] = []
    while len(queue):
        client, request, item = queue.take()
        assert own[client, request].popleft() == item
        waiting = {client for (client, _), left in own.items() if left}
        for other in waiting - {client}:  # no client has two turns while another one waits
            assert turns[-len(waiting) :].count(client) <= 1 or other in turns[-len(waiting) :]
        turns.append(client)


def test_a_log_that_nobody_reads_stops_no_request(chat_bundle: Path) -> None:
    """Nothing that answers writes a line itself: a full pipe would stop it, and all clients with it."""
    unread, lines = threading.Event(), list[str]()

    def write(line: str) -> None:
        lines.append(line)
        unread.wait(60)

    with TestClient(make_app(models_of(chat_bundle, "chatty"), log=write), base_url=URL) as client:
        for name in ("first_new_field", "second_new_field", "third_new_field"):
            messages = [{"role": "user", "content": "Hello"}]
            asked = {"model": "chatty", "messages": messages, "max_tokens": 1, name: True}
            assert client.post("/v1/chat/completions", json=asked).status_code == 200
        assert client.get("/health").status_code == 200
        assert len(lines) == 1
        unread.set()
    assert "first_new_field" in lines[0]
