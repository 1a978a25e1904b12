"""Clients that mean harm, eight kinds at once, at a server that decodes meanwhile: others must be answered.

Each attack goes on until it is told to stop, and notes what it was answered: refusals (4xx) and, where a request is
large but sound, texts.  A watcher asks for /health all the while, over connections of its own.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

WAIT = 60.0  # seconds after which a client gives up
EVERY = 0.05  # seconds between two looks
MIB = 1 << 20


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


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        answers: by attack and status; "closed" = the connection was.
        health: seconds of each look at /health.
        bad: looks that failed, and answers of 500 and above.
        resident: bytes of the server and its children at each look, if it runs here.
        texts: that were written meanwhile for clients without harm.
    """

    answers: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    texts: int = 0

    def share(self, of: float) -> float:
        """Seconds within which so much of the looks was answered."""
        return sorted(self.health)[min(len(self.health) - 1, int(of * len(self.health)))] if self.health else 0.0

    def growth(self) -> float:
        """Resident memory of the last quarter over the second one, less one."""
        quarter = len(self.resident) // 4
        if not quarter:
            return 0.0
        return median(self.resident[-quarter:]) / median(self.resident[quarter : 2 * quarter]) - 1

    def report(self) -> dict[str, Any]:
        return {
            "answers": dict(sorted(self.answers.items())),
            "texts": self.texts,
            "looks": len(self.health),
            "health_ms": {
                name: round(1000 * self.share(of), 1) for name, of in (("p50", 0.5), ("p99", 0.99), ("most", 1))
            },
            "resident_mib": [round(size / MIB) for size in (min(self.resident), max(self.resident))]
            if self.resident
            else [],
            "growth": round(self.growth(), 4),
            "bad": self.bad[:20],
        }


Attack = Callable[[Place, Random], Iterator[str]]  # yields what it was answered


def attack(place: Place, seconds: float, pid: int | None = None, seed: int = 0) -> Outcome:
    """All attacks at once for so long.

    Args:
        place: where the server is.
        seconds: how long.
        pid: of the server, to look at its memory; None = it is elsewhere.
        seed: of what the attacks choose.
    """
    found, stop, lock = Outcome(), threading.Event(), threading.Lock()

    def go_on(name: str, one: Attack, number: int) -> None:
        random = Random(1000 * seed + number)
        while not stop.is_set():
            with suppress(OSError, httpx.HTTPError):
                for answer in one(place, random):
                    with lock:
                        found.answers[f"{name} {answer}"] += 1
                        if answer.isdigit() and int(answer) >= 500:
                            found.bad.append(f"{name}: {answer}")
                    if stop.is_set():
                        return
            stop.wait(0.01)

    def talk() -> None:
        asked = {"model": place.model, "prompt": "The king", "max_tokens": 200, "temperature": 0, "n": 2}
        with httpx.Client(timeout=WAIT, headers={"Authorization": f"Bearer {place.key}"}) as client:
            while not stop.is_set():
                with suppress(httpx.HTTPError):
                    answer = client.post(f"{place.url}/v1/completions", json=asked)
                    found.texts += answer.status_code == 200

    threads = [
        threading.Thread(target=go_on, args=(name, one, number)) for number, (name, one) in enumerate(ATTACKS.items())
    ]
    threads += [threading.Thread(target=talk) for _ in range(2)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        try:
            answer = httpx.get(f"{place.url}/health", timeout=WAIT)
            if answer.status_code != 200:
                found.bad.append(f"/health: {answer.status_code}")
        except httpx.HTTPError as error:
            found.bad.append(f"/health: {error!r}")
        found.health.append(time.perf_counter() - begun)
        if pid is not None:
            found.resident.append(resident(pid))
        time.sleep(EVERY)
    stop.set()
    for thread in threads:
        thread.join(WAIT)
    return found


def resident(pid: int) -> int:
    """Resident bytes of a process and its children; 0 where the system does not tell."""
    sizes: dict[int, int] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[1]
            )
            sizes[int(folder.name)] = 4096 * int((folder / "statm").read_text("ascii").split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes.get(one, 0) for one in family)


# -- the attacks -------------------------------------------------------------------------------------------------------


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
    """A prompt, or very many, of nearly a MiB."""
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
    """A body that comes a byte at a time, each in a chunk of its own."""
    with place.connected() as sock:
        sock.sendall(place.head("/v1/completions", "Transfer-Encoding: chunked"))
        with suppress(OSError):
            for _ in range(50):
                sock.sendall(b"1\r\n \r\n" * 40_000)
        yield _answer(sock)


def half_requests(place: Place, random: Random) -> Iterator[str]:
    """Connections without a request, and requests without an end."""
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
    """Requests sent behind one that is running, without waiting for its answer."""
    body = json.dumps({"model": place.model, "prompt": "x", "max_tokens": 200, "n": 2}).encode()
    with place.connected() as sock:
        sock.sendall(place.head("/v1/completions", f"Content-Length: {len(body)}") + body)
        with suppress(OSError):
            for _ in range(200):
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        yield _answer(sock)


def no_readers(place: Place, random: Random) -> Iterator[str]:
    """Streams that nobody reads, and that are left in the middle."""
    body = json.dumps(
        {"model": place.model, "prompt": "x", "max_tokens": 200, "n": 8, "stream": True, "logprobs": 1}
    ).encode()
    with place.connected() as sock:
        sock.sendall(place.head("/v1/completions", f"Content-Length: {len(body)}") + body)
        time.sleep(0.5)
        yield "left"


ATTACKS: dict[str, Attack] = {
    one.__name__.replace("_", " "): one
    for one in (
        large_prompts,
        heavy_grammars,
        deep_and_wide,
        many_fields,
        small_pieces,
        half_requests,
        behind_a_running_one,
        no_readers,
    )
}
