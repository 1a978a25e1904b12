"""Attacks of hostile clients on a server: eight kinds, and seven more that hold much or make others wait.

Each is one round, which yields the answers.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

WAIT = 60.0  # seconds until a client gives up


@dataclass(frozen=True)
class Place:
    """A server.

    Attributes:
        host, port: where.
        model: its name.
        key: that it asks for.
    """

    host: str
    port: int
    model: str
    key: str = "none"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def head(self, path: str, *headers: str) -> bytes:
        """Line and headers of a request."""
        lines = [f"POST {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Content-Type: application/json"]
        return "\r\n".join([*lines, f"Authorization: Bearer {self.key}", *headers, "", ""]).encode()

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.create_connection((self.host, self.port), timeout=WAIT) as sock:
            yield sock


Attack = Callable[[Place, Random], Iterator[str]]  # yields what it was answered


def _posted(place: Place, path: str, body: bytes) -> str:
    headers = {"Authorization": f"Bearer {place.key}", "Content-Type": "application/json"}
    return str(httpx.post(f"{place.url}{path}", content=body, headers=headers, timeout=WAIT).status_code)


def _completion(place: Place, **change: Any) -> str:
    asked = {"model": place.model, "prompt": "x", "max_tokens": 2} | change
    return _posted(place, "/v1/completions", json.dumps(asked).encode())


def _answer(sock: socket.socket) -> str:
    """Status of what comes, read to its end."""
    found = b""
    with suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            found = (found + piece)[:64]
    status = re.match(rb"HTTP/1.1 (\d+)", found)
    return status[1].decode() if status else "closed"


def large_prompts(place: Place, random: Random) -> Iterator[str]:
    """Make a prompt, or very many, of nearly a MiB."""
    yield _completion(place, prompt="a b " * 250_000)
    yield _completion(place, prompt=["x"] * 200_000)
    yield _completion(place, prompt=["word " * 6000] * 32, n=16)
    yield _completion(place, prompt=[random.randrange(300) for _ in range(180_000)])


def heavy_grammars(place: Place, random: Random) -> Iterator[str]:
    """Schemas and expressions that take long to compile, each another one."""
    own = random.randrange(10**6)
    for count in (20_000, 5000, 500):
        shape = {
            "type": "object",
            "properties": {f"{own}{number:x}" if count < 5000 else f"{number:x}": {} for number in range(count)},
        }
        form = {"type": "json_schema", "json_schema": {"schema": shape | {"title": str(own)}}}
        yield _completion(place, response_format=form)
    yield _completion(place, edgespec={"regex": f"((a{{1,100}}){{1,100}}){{1,100}}{own}"})
    yield _completion(
        place, edgespec={"lark": "start: " + " | ".join(f'"{own} {number}" start' for number in range(3000))}
    )


def deep_and_wide(place: Place, random: Random) -> Iterator[str]:
    """Messages and tools that nest, or are many; JSON without an end."""
    chat = {"model": place.model, "max_tokens": 2}
    nested: Any = "x"
    for _ in range(random.randrange(100, 900)):
        nested = [nested]
    said = [{"role": "user", "content": "x"}]
    for change in (
        {"messages": [{"role": "user", "content": nested}]},
        {"messages": said, "tools": [{"deep": nested}]},
        {
            "messages": said,
            "tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(15_000)],
        },
        {"messages": said * 20_000},
        {"messages": [{"role": "user", "content": "x y " * 200_000}]},
    ):
        yield _posted(place, "/v1/chat/completions", json.dumps(chat | change).encode())
    yield _posted(place, "/v1/completions", b"[" * 500_000)


def many_fields(place: Place, random: Random) -> Iterator[str]:
    """Very many stop strings and biases, endless names."""
    yield _completion(place, stop=["ab"] * 150_000)
    yield _completion(place, logit_bias={str(number): -100 for number in range(60_000)})
    yield _completion(place, **{f"field{number}": random.random() for number in range(30_000)})
    yield _completion(place, model="x" * 900_000)


def small_pieces(place: Place, random: Random) -> Iterator[str]:
    """Make a body that comes byte by byte, each in a separate chunk."""
    with place.connected() as sock:
        sock.sendall(place.head("/v1/completions", "Transfer-Encoding: chunked"))
        with suppress(OSError):
            for _ in range(50):
                sock.sendall(b"1\r\n \r\n" * 40_000)
        yield _answer(sock)


def half_requests(place: Place, random: Random) -> Iterator[str]:
    """Return connections without a request, and requests without an end."""
    with ExitStack() as stack:
        socks = []
        for _ in range(100):
            sock = stack.enter_context(place.connected())
            sock.sendall(random.choice([b"", b"GET", place.head("/v1/completions", "Content-Length: 99")]))
            socks.append(sock)
        yield "opened"
        for sock in socks[:2]:
            yield _answer(sock)


def behind_a_running_one(place: Place, random: Random) -> Iterator[str]:
    """Send requests while another one on the connection runs, without waiting for its answer."""
    body = json.dumps({"model": place.model, "prompt": "x", "max_tokens": 200, "n": 2}).encode()
    with place.connected() as sock:
        sock.sendall(place.head("/v1/completions", f"Content-Length: {len(body)}") + body)
        with suppress(OSError):
            for _ in range(200):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        yield _answer(sock)


def no_readers(place: Place, random: Random) -> Iterator[str]:
    """Streams that are never read, and that are closed in the middle."""
    body = json.dumps(
        {"model": place.model, "prompt": "x", "max_tokens": 200, "n": 8, "stream": True, "logprobs": 1}
    ).encode()
    with place.connected() as sock:
        sock.sendall(place.head("/v1/completions", f"Content-Length: {len(body)}") + body)
        time.sleep(0.5)
        yield "left"


def expected_texts(place: Place, random: Random) -> Iterator[str]:
    """Make a text of nearly a MiB that is expected, for many choices."""
    text = "the quick brown fox jumps " * 38_000
    chat = {"model": place.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "n": 16}
    yield _posted(place, "/v1/chat/completions", json.dumps(chat | {"prediction": {"content": text}}).encode())


def repeated_objects(place: Place, random: Random) -> Iterator[str]:
    """Make requests of which the answer repeats very many small objects."""
    lists: Any = [[]] * 300_000
    asked = {"model": place.model, "input": "x", "stream": True, "max_output_tokens": 1}
    tool = {"type": "function", "name": "f", "parameters": {"enum": lists}}
    for change in (
        {"metadata": {"a": lists}},
        {"tools": [tool]},
        {"instructions": "x" * 900_000},
        {"text": {"a": lists}},
    ):
        yield _posted(place, "/v1/responses", json.dumps(asked | change).encode())


def growing_grammars(place: Place, random: Random) -> Iterator[str]:
    """Write expressions of few characters whose lexer grows while a text is written."""
    for _ in range(4):
        wide = rf"(.*a.{{{random.randrange(50, 99)}}}b.*|.*c.{{{random.randrange(50, 99)}}}d.*)"
        yield _completion(place, max_tokens=200, temperature=2, edgespec={"regex": wide})
    dead = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {}}, "type": "object"}
    form = {"type": "json_schema", "json_schema": {"schema": dead}}
    yield _completion(place, max_tokens=200, temperature=2, response_format=form)


def odd_forms(place: Place, random: Random) -> Iterator[str]:
    """Make a form in a charset that is decoded in quadratic time."""
    fields = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="f%d-"\r\n\r\n' % number + b"b" * 65_000 + b"\r\n"
        for number in range(15)
    )
    for charset in ("punycode", "utf-8"):
        headers = {"Authorization": f"Bearer {place.key}"}
        headers["Content-Type"] = f"multipart/form-data; boundary=x; charset={charset}"
        url = f"{place.url}/v1/audio/transcriptions"
        yield str(httpx.post(url, content=fields + b"--x--\r\n", headers=headers, timeout=WAIT).status_code)


def half_bodies(place: Place, random: Random) -> Iterator[str]:
    """Send most of many large bodies, and wait."""
    with ExitStack() as stack:
        socks = [stack.enter_context(place.connected()) for _ in range(80)]
        for sock in socks:
            with suppress(OSError):
                sock.sendall(place.head("/v1/completions", f"Content-Length: {1 << 20}") + b" " * ((1 << 20) - 99))
        yield "sent"
        time.sleep(1)
        yield _answer(socks[-1])


def every_place(place: Place, random: Random) -> Iterator[str]:
    """Fill all places for connections with requests that run or wait."""
    texts = json.dumps({"model": place.model, "input": ["x y z " * 50] * 24}).encode()
    with ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(place.connected())
            with suppress(OSError):
                sock.sendall(place.head("/v1/embeddings", f"Content-Length: {len(texts)}") + texts)
        yield "opened"
        time.sleep(2)


def broken_parts(place: Place, random: Random) -> Iterator[str]:
    """Send message parts that are not objects, in all APIs."""
    odd: list[Any] = [["plain"], [None], [[]], [1.5], [{"type": None}], [{"type": []}], {"type": "text"}]
    results = [{"type": "tool_result", "tool_use_id": "c", "content": one} for one in odd]
    for content in [*odd, *([one] for one in results)]:
        message = {"role": random.choice(["user", "assistant", "tool"]), "content": content}
        chat = {"model": place.model, "max_tokens": 1, "messages": [message]}
        for path in ("/v1/chat/completions", "/v1/messages"):
            yield _posted(place, path, json.dumps(chat).encode())
        items = {"model": place.model, "max_output_tokens": 1, "input": [message]}
        yield _posted(place, "/v1/responses", json.dumps(items).encode())


def _named(*attacks: Attack) -> dict[str, Attack]:
    return {one.__name__.replace("_", " "): one for one in attacks}


ATTACKS = _named(
    large_prompts,
    heavy_grammars,
    deep_and_wide,
    many_fields,
    small_pieces,
    half_requests,
    behind_a_running_one,
    no_readers,
)
MORE = _named(
    expected_texts, repeated_objects, growing_grammars, odd_forms, half_bodies, every_place, broken_parts
)  # in addition to those
ALL = ATTACKS | MORE
