"""Requests fit the abilities of each server, and its answers are read."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from edgespec.judge.client import Server, ServerError, side_by_side
from edgespec.judge.launch import running
from edgespec.judge.rows import Noise, margin, next_row
from tests.judge.canned import canned

LEGACY = {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": [{"a": -0.1, "c": -3}, {"b": -0.2}]}
MODELS = {"data": [{"id": "m"}]}


def content(*tokens: str) -> dict[str, Any]:
    tops = [{"token": "?", "bytes": [0xC3, 0xA9], "logprob": -0.5}, {"token": "b", "logprob": -math.inf}]
    return {"content": [{"token": token, "logprob": -0.5, "top_logprobs": tops} for token in tokens]}


def completion(body: dict[str, Any], logprobs: Any, text: str = "ab") -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    one = {"text": text, "logprobs": logprobs, "finish_reason": "length"}
    return {"choices": [one | {"index": at} for at in range(body.get("n", 1))], "usage": usage}


@contextmanager
def serving(answer: Any) -> Iterator[Server]:
    with canned(answer) as url, closing(Server(url, "m")) as server:
        yield server


def probed(answer: Any) -> Server:
    with serving(answer) as server:
        server.probe()
        return server


def test_a_server_that_takes_everything() -> None:
    with canned(lambda path, body: (200, MODELS if path == "/v1/models" else completion(body, LEGACY))) as url:
        server = Server(f"{url}/v1/")
        server.probe()
        (answer,) = server.ask("x", 2)
        server.close()
    assert server.model == "m"
    assert (server.abilities.api, server.abilities.likeliest, server.abilities.choices) == ("completions", 20, 16)
    assert set(server.abilities.fields) == {"top_p", "top_k", "min_p", "repeat_penalty", "repetition_penalty"}
    assert [token.text for token in answer.tokens] == ["a", "b"]
    assert answer.tokens[0].top == {"a": -0.1, "c": -3}
    assert (answer.prompt_tokens, answer.cached, answer.written, answer.ended) == (3, 1, 2, False)


def test_fields_that_are_refused_are_left_out() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if {"min_p", "n"} & set(body) or (body.get("logprobs") or 0) > 5:
            return 400, {"error": {"message": "unknown"}}
        return 200, completion(body, content("a", "b"))

    server = probed(answer)
    assert (server.abilities.likeliest, server.abilities.choices) == (5, 1)
    assert "min_p" not in server.abilities.fields
    assert "top_k" in server.abilities.fields


def test_chats_without_log_probabilities() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if "chat" not in path:
            return 404, b"not here"
        assert body["messages"][0]["role"] == "user"
        return 200, {"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}]}

    server = probed(answer)
    assert (server.abilities.api, server.abilities.likeliest) == ("chat", 0)
    assert next_row(server, "x", ["a"], None) == {}


def test_tokens_are_their_bytes_and_impossible_ones_are_left_out() -> None:
    with serving(lambda path, body: (200, completion(body, content("x"), "x"))) as server:
        (answer,) = server.ask("x", 1)
    assert answer.tokens[0].top == {"é": -0.5}


@pytest.mark.parametrize(
    "status, found",
    [
        (500, b"oops"),
        (200, b"<html>"),
        (200, {"choices": []}),
        (200, {"error": "no"}),
        (200, {"choices": [{"text": 1}, 7]}),
    ],
)
def test_other_answers_are_named(status: int, found: Any) -> None:
    with serving(lambda path, body: (status, found)) as server, pytest.raises(ServerError, match="expected"):
        server.ask("x", 1)


def test_a_full_queue_is_asked_again() -> None:
    left = [429, 503]

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (left.pop(), b"full") if left else (200, completion(body, None))

    with serving(answer) as server:
        assert server.ask("x", 1)[0].text == "ab"


def test_work_side_by_side_comes_in_order_and_a_failure_ends_it() -> None:
    def work(item: int) -> int:
        time.sleep(0.01 * (4 - item))
        return 10 // item

    assert side_by_side(work, [3, 1, 2], 2) == [3, 10, 5]
    assert side_by_side(work, [], 2) == []
    with pytest.raises(ZeroDivisionError):
        side_by_side(work, [1, 0, 2], 2)


def test_nobody_there() -> None:
    with pytest.raises(ServerError, match="no answer"):
        Server("http://127.0.0.1:9", "m").ask("x", 1)
    with pytest.raises(ServerError, match="expected a URL"):
        Server("localhost:80", "m")


def test_a_text_that_is_read_as_other_tokens_gives_no_row() -> None:
    with serving(lambda path, body: (200, completion(body, LEGACY))) as server:
        server.abilities.likeliest = 20
        assert next_row(server, "x", ["a"], 2)  # 2 + 1 tokens, as the server counts
        assert next_row(server, "x", ["a", "b"], 2) == {}
        assert next_row(server, "x", ["\ufffd"], 2) == {}


def test_margins_and_noise() -> None:
    row = {"a": -0.1, "b": -0.3, "c": -5.0}
    assert margin(row, "a", "b") == pytest.approx((0.2, False))
    assert margin(row, "a", "z") == pytest.approx((4.9, True))
    assert margin(row, "z", "a") is None
    noise = Noise()
    noise.add(row, {"a": -0.15, "b": -0.3, "c": -9.0})  # an unlikely token says nothing
    assert noise.largest == pytest.approx(0.05)
    assert noise.limit == pytest.approx(0.2)
    assert Noise(stated=0.5).limit == 0.5


def test_a_command_that_fails_is_told_with_its_last_words() -> None:
    with (
        pytest.raises(ServerError, match="ended with 3: no such model"),
        running(f"{sys.executable} -c \"import sys; print('no such model {{port}}'[:13]); sys.exit(3)\""),
    ):
        pass
    with pytest.raises(ServerError, match=r"\{port\}"), running("serve it"):
        pass
    with pytest.raises(ServerError, match="cannot be started"), running("no-such-program-here {port}"):
        pass
