"""Servers that are not there, refuse, end midway, or say odd things: the true cause, the right exit code."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgespec.cli.app import cli
from edgespec.judge import client
from tests.judge.canned import canned

MODELS = {"data": [{"id": "m"}]}
WORDS = ("a", "b", "c", "d")
QUICK = ["--max-prompts", "2", "--max-new-tokens", "4", "--repeats", "1", "--duration", "0", "--concurrency", "2"]
CHANCE = random.Random(3)
Fields = dict[str, Any]


def told(body: Fields, words: Any = WORDS, gap: float = 1.0, **more: Any) -> Fields:
    """Complete a prompt honestly: the next token depends only on its length, or it is x, less likely by ``gap``."""
    start, most = len(body["prompt"]), body["max_tokens"]  # a token is a character
    heat = body["temperature"]
    other = 1 / (1 + math.exp(gap / heat)) if heat else 0.0
    likeliest = min(body.get("logprobs") or 0, more.pop("most", 20))
    row = -math.log1p(math.exp(-gap))
    likely = [words[(start + at) % len(words)] for at in range(most)]
    tops = [dict([(token, row), ("x", row - gap)][:likeliest]) for token in likely]
    choices = []
    for at in range(body.get("n", 1)):
        tokens = [token if CHANCE.random() >= other else "x" for token in likely]
        said = {"tokens": tokens, "top_logprobs": [*map(dict, tops)]} if likeliest else None
        choices.append({"index": at, "text": "".join(tokens), "logprobs": said, "finish_reason": "length"})
    usage = {"prompt_tokens": start, "completion_tokens": most}
    return {"choices": choices, "usage": usage} | more


def served(path: str, body: Fields, change: Callable[[Fields], Any] = told) -> tuple[int, Any]:
    return (200, MODELS) if path.endswith("/models") else (200, change(body))


def run(*words: str) -> Result:
    found = CliRunner().invoke(cli, ["judge", *QUICK, *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert "Traceback" not in found.output
    return found


def test_an_honest_server_passes() -> None:
    with canned(served) as url, canned(served) as other:
        for words in ((url,), (url, "--against", other)):
            found = run(*words)
            assert (found.exit_code, "identical" in found.output) == (0, True), found.output


@pytest.mark.parametrize(
    "url, said",
    [
        ("127.0.0.1:8080", "expected a URL"),
        ("localhost", "expected a URL"),
        ("http://", "expected a URL"),
        ("http://127.0.0.1:99999", "Port out of range"),
        ("http://127.0.0.1:port", "expected a URL"),
        ("http://[::1", "expected a URL"),
        ("http://127.0.0.1:9/ö", "expected a URL"),
        ("http://127.0.0.1:9/a b", "expected a URL"),
        ("http://127.0.0.1:9/?key=1", "expected a URL"),
        ("http://me:secret@127.0.0.1:9", "expected a URL"),
        (f"http://{'a' * 70}.invalid", "no answer"),
        ("ftp://127.0.0.1", "expected a URL"),
        ("http://127.0.0.1:9", "no answer"),
    ],
)
def test_wrong_urls(url: str, said: str) -> None:
    found = run(url)
    assert found.exit_code == 2
    assert said in found.output


def test_https_where_http_is_spoken() -> None:
    with canned(served) as url:
        found = run(url.replace("http", "https"))
    assert (found.exit_code, "try http://" in found.output) == (2, True), found.output


def test_a_key_that_cannot_be_sent() -> None:
    assert run("http://127.0.0.1:9", "--api-key", "a\nb").exit_code == 2


@pytest.mark.parametrize(
    "status, found, said",
    [
        (401, {"error": "no key"}, "--api-key"),
        (403, b"", "--api-key"),
        (307, b"https://there", "give the URL"),
        (429, b"slow down", "still busy"),
        (503, b"loading", "still busy"),
        (200, b'data: {"choices": []}\n\n', "it streams"),
        (404, {"error": {"message": "the model m does not exist"}}, "the model m does not exist"),
        (200, {"error": {"message": "no such model"}}, "no such model"),
        (500, b"oops", "oops"),
        (200, b"[" * 100_000, "expected an answer in JSON"),
        (200, b"\xff\xfe", "expected an answer in JSON"),
        (200, {"choices": [{"text": ["a"]}]}, "with texts"),
        (200, {"choices": 5}, "with texts"),
    ],
)
def test_answers_that_are_no_texts(monkeypatch: pytest.MonkeyPatch, status: int, found: Any, said: str) -> None:
    monkeypatch.setattr(client, "WAITS", (0.0, 0.0))
    with canned(lambda path, body: (200, MODELS) if path.endswith("/models") else (status, found)) as url:
        done = run(url)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("listed", [{"data": []}, {"data": 5}, {"data": [{"id": None}]}, {}, b"[]", b"<html>"])
def test_models_that_are_not_listed(listed: Any) -> None:
    def answer(path: str, body: Fields) -> tuple[int, Any]:
        return (200, listed) if path.endswith("/models") else (200, told(body))

    with canned(answer) as url:
        found = run(url)
        assert (found.exit_code, "--model" in found.output) == (2, True), found.output
        assert run(url, "--model", "m").exit_code == 0


def test_a_busy_server_is_waited_for_while_its_abilities_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WAITS", (0.0, 0.0))
    asked = [0]

    def answer(path: str, body: Fields) -> tuple[int, Any]:
        asked[0] += 1
        return (429, b"") if asked[0] % 2 else served(path, body)

    with canned(answer) as url:
        server = client.Server(url, "m")
        server.probe()
        server.close()
    assert (server.abilities.likeliest, server.abilities.choices) == (20, 16)


@pytest.mark.parametrize("after", range(0, 60, 6))
def test_a_server_that_closes_midway_is_not_judged(after: int) -> None:
    """Whatever was asked last: the dead server is named, never a verdict of half of the work."""
    left = [after]

    def send(right: Any) -> Any:
        def sent(self: Any, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
            left[0] -= 1
            if left[0] < 0:
                raise client.ServerError("no answer: Connection refused")
            found: tuple[int, bytes] = right(self, method, path, body)
            return found

        return sent

    with canned(served) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.Http, "__call__", send(client.Http.__call__))
        found = run(url)
    assert (found.exit_code, left[0] < 0) in ((2, True), (0, False)), found.output


DYING = """
import http.server, json, os, sys
left = [int(sys.argv[2])]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.say({"data": [{"id": "m"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        left[0] -= 1
        if left[0] < 0:
            print("out of memory", flush=True)
            os._exit(7)
        self.say({"choices": [{"text": "ab", "finish_reason": "length"}]})
    def say(self, found):
        content = json.dumps(found).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(content))); self.end_headers()
        self.wfile.write(content)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_command_that_ends_midway_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING, "utf-8")
    found = run("--command", f"{sys.executable} {tmp_path / 'dying.py'} {{port}} 12")
    assert found.exit_code == 2
    assert "ended with 7" in found.output
    assert "out of memory" in found.output


def odd(**more: Any) -> Callable[[Fields], Any]:
    return lambda body: told(body, **more)


def without(*names: str) -> Callable[[Fields], Any]:
    def change(body: Fields) -> Any:
        found = told(body)
        for choice in found["choices"]:
            for name in names:
                choice.pop(name, None)
        return {key: value for key, value in found.items() if key not in names}

    return change


def renamed(body: Fields) -> Any:
    """Pieces of the vocabulary instead of the text's tokens."""
    found = told(body)
    for choice in found["choices"]:
        if choice["logprobs"]:
            choice["logprobs"]["tokens"] = [f"Ġ{token}?" for token in choice["logprobs"]["tokens"]]
    return found


def logits(body: Fields) -> Any:
    """Logits, and a NaN, in place of log-probabilities."""
    found = told(body)
    for choice in found["choices"]:
        for top in (choice["logprobs"] or {}).get("top_logprobs", []):
            top.update(x=math.nan, **{next(iter(top)): 17.5})
    return found


def chat(body: Fields) -> Any:
    text = "".join(WORDS)
    return {"choices": [{"message": {"content": None, "reasoning_content": text}, "finish_reason": "stop"}]}


KINDS: dict[str, Callable[[Fields], Any]] = {
    "five at most, without an error": odd(most=5),
    "one at most": odd(most=1),
    "text alone": without("logprobs"),
    "no usage": without("usage"),
    "usage is no numbers": odd(usage={"prompt_tokens": "7", "completion_tokens": None, "prompt_tokens_details": 3}),
    "usage is a list": odd(usage=[]),
    "no finish reason, no index": without("finish_reason", "index"),
    "tokens of the vocabulary": renamed,
    "logits": logits,
    "a surrogate": odd(words=("a", "\ud800")),
    "parts of characters": odd(words=("\ufffd", "b")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_but_honest_servers_are_not_called_wrong(kind: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    def answer(path: str, body: Fields) -> tuple[int, Any]:
        return served(path, body, KINDS[kind])

    with canned(answer) as url, canned(served) as plain:
        for words in (
            (url,),
            (url, "--against", url),
            *([(url, "--against", plain)] if kind[:2] not in ("a ", "pa") else []),
        ):
            found = run(*words, "--json", "--report", str(page), "--duration", "0.2", "--draws", "64")
            assert found.exit_code == 0, found.output
            assert json.loads(found.stdout)["verdict"] == "identical"
            assert page.is_file()


def test_chats_that_only_think_are_texts() -> None:
    def answer(path: str, body: Fields) -> tuple[int, Any]:
        return (200, MODELS) if path.endswith("/models") else (200, chat(body)) if "chat" in path else (404, b"no")

    with canned(answer) as url:
        found = run(url, "--json")
    assert json.loads(found.stdout)["greedy"][0]["tokens"] == 2 * len(WORDS)


def test_empty_texts_are_nothing_to_compare() -> None:
    with canned(lambda path, body: served(path, body, odd(words=("",)))) as url:
        found = run(url)
    assert (found.exit_code, "every text is empty" in found.output) == (2, True), found.output


@pytest.mark.parametrize("gap, code", [(0.05, 0), (0.3, 0), (3.0, 1)])
def test_a_near_tie_is_rounding_and_a_wide_margin_is_not(gap: float, code: int) -> None:
    """The judged server takes the second token once; its rows show how exact they are."""

    def judged(body: Fields) -> Any:
        found = told(body, gap=gap - min(gap, 0.3))  # its rounding changes rows by less than the margin, or by 0.3
        for choice in found["choices"]:
            if body["max_tokens"] == 4:
                choice["text"] = "x" + choice["text"][1:]
                if choice["logprobs"]:
                    choice["logprobs"]["tokens"][0] = "x"
        return found

    with (
        canned(lambda path, body: served(path, body, judged)) as url,
        canned(lambda path, body: served(path, body, odd(gap=gap))) as plain,
    ):
        found = run(url, "--against", plain)
    assert found.exit_code == code, found.output


def test_two_models_are_told() -> None:
    def other(body: Fields) -> Any:
        found = told(body, words=("p", "q"), gap=5.0)
        found["usage"]["prompt_tokens"] += 1
        return found

    with (
        canned(lambda path, body: served(path, body, other)) as url,
        canned(lambda path, body: served(path, body, odd(gap=5.0))) as plain,
    ):
        found = run(url, "--against", plain)
    assert found.exit_code == 1
    assert "the same model" in found.output


def test_what_is_wrong_with_options_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    found = run("http://127.0.0.1:9", "--report", str(tmp_path / "no" / "page.html"))
    assert (found.exit_code, "no such folder" in found.output) == (2, True)
    (tmp_path / "prompts").write_bytes(b"\xff\xfe\x00")
    found = run("http://127.0.0.1:9", "--prompts", str(tmp_path / "prompts"))
    assert (found.exit_code, "UTF-8" in found.output) == (2, True)
    found = run("http://127.0.0.1:9", "--prompts", str(tmp_path / "none"))
    assert (found.exit_code, "No such file" in found.output) == (2, True)
    found = run("--command", "serve 'it --port {port}")
    assert (found.exit_code, "not a command" in found.output) == (2, True)
