"""The process that accepts connections: what it answers, what it hands over, and in which order."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from edgespec.server.front import POSSIBLE, STALE, WAITING, Front
from edgespec.server.serving import listen
from tests.server.conftest import Served, start

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="connections cannot be handed over here")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc, and 127.0.0.2, are there on Linux alone")
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
SECONDS = 60


class Place:
    """A process that accepts, whose server receives nothing until ``take``."""

    def __init__(self) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.front = Front(self.listener, ["Edge.example."], False)
        self.front.beat(2, 3)

    def close(self) -> None:
        self.front.close()
        self.listener.close()

    def connect(self, data: bytes, source: str = "127.0.0.1") -> socket.socket:
        made = socket.create_connection(self.listener.getsockname(), SECONDS, (source, 0))
        made.sendall(data)
        return made

    def take(self, count: int) -> list[socket.socket]:
        """Take ``count`` connections."""
        found: list[socket.socket] = []
        while len(found) < count:
            assert select.select([self.front.channel], [], [], SECONDS)[0], f"{len(found)} of {count} came"
            taken = self.front.take()
            assert taken is not None
            found += taken
        for one in found:
            one.settimeout(SECONDS)
        return found


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def answer(sock: socket.socket) -> tuple[bytes, bytes]:
    """Read an answer to its end -> its head and its body."""
    with sock:
        found = b""
        while piece := sock.recv(1 << 16):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]", "EDGE.example"])
def test_health_is_answered_while_the_server_takes_no_connection(place: Place, host: str) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(place.connect(POST))
        head, body = answer(place.connect(ASK.replace(b"localhost", host.encode())))
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"content-length: {len(body)}\r\n".encode() in head
    assert json.loads(body) == {"status": "ok", "running": 2, "waiting": 3}


def test_a_request_in_pieces_is_answered(place: Place) -> None:
    sock = place.connect(ASK[:3])
    sock.sendall(ASK[3:])
    assert answer(sock)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "said",
    [
        POST,
        ASK.replace(b"GET", b"HEAD"),
        ASK.replace(b"/health", b"/healthy"),
        ASK.replace(b"/health", b"/health/x"),
        ASK.replace(b"localhost", b"evil.example"),
        ASK.replace(b"Host: localhost\r\n", b""),
        ASK.replace(b"\r\n\r\n", b"\r\nHost: localhost\r\n\r\n"),
        ASK.replace(b"\r\n\r\n", b"\r\nOrigin: https://evil.example\r\n\r\n"),
        ASK.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n"),
        ASK.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ASK.replace(b"\r\n\r\n", b"\r\n folded\r\n\r\n"),
        ASK.replace(b"\r\n\r\n", b"\r\nX: \xff\r\n\r\n"),
        ASK.replace(b"1.1", b"2.0"),
        ASK * 2,
        ASK[:9],
        ASK[:-2],
        b"\x16\x03\x01",
        b"\r\n\r\n",
    ],
)
def test_what_is_no_plain_request_for_health_is_handed_over_as_it_is(place: Place, said: bytes) -> None:
    with place.connect(said) as sock:
        (taken,) = place.take(1)
        with taken:
            found = b""
            while len(found) < len(said):
                found += taken.recv(1 << 16)
            assert found == said
            assert taken.getpeername() == sock.getsockname()


def test_a_connection_without_a_word_is_handed_over(place: Place) -> None:
    with place.connect(b"") as sock:
        (taken,) = place.take(1)
        with taken:
            sock.sendall(POST)
            assert taken.recv(1 << 16) == POST


def test_a_server_that_is_stuck_is_not_called_well(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    now = time.monotonic()
    monkeypatch.setattr("edgespec.server.front.time.monotonic", lambda: now - STALE - 1)
    place.front.beat(0, 0)
    with place.connect(ASK):
        (taken,) = place.take(1)
        with taken:
            assert taken.recv(1 << 16) == ASK


@linux
def test_clients_take_turns(place: Place) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(place.connect(POST))
        stack.enter_context(place.connect(POST, "127.0.0.2"))
        answer(place.connect(ASK))  # all of them have been accepted
        taken = [stack.enter_context(one) for one in place.take(201)]
        order = [one.getpeername()[0] for one in taken]
    assert order.index("127.0.0.2") < 20  # after those that were under way


@linux
def test_whoever_has_most_waiting_loses_the_last_of_them(place: Place) -> None:
    with ExitStack() as stack:
        first = [stack.enter_context(place.connect(POST, "127.0.0.2")) for _ in range(3)]
        many = [stack.enter_context(place.connect(POST)) for _ in range(WAITING + 40)]
        answer(place.connect(ASK))
        closed = [one for one in many if select.select([one], [], [], 0)[0]]
        assert 0 < len(closed) <= 43
        assert not select.select(first, [], [], 0)[0]
        with suppress(ConnectionResetError):
            assert closed[0].recv(1) == b""


@linux
def test_more_clients_than_may_wait(place: Place) -> None:
    """Each has one connection, so that the one that is closed was its client's only one."""
    with ExitStack() as stack:
        for number in range(WAITING + 20):
            stack.enter_context(place.connect(POST, f"127.1.{number // 200}.{number % 200 + 1}"))
        assert answer(place.connect(ASK))[0].startswith(b"HTTP/1.1 200")
        for taken in place.take(WAITING):
            taken.close()


@linux
def test_health_is_answered_where_there_are_few_descriptors() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, before[1]))
    try:
        place = Place()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(place.connect(POST))
            assert answer(place.connect(ASK))[0].startswith(b"HTTP/1.1 200")
    finally:
        place.close()


def test_the_process_ends_with_its_server(place: Place) -> None:
    pid = place.front._process.pid
    place.front.channel.close()  # as where the server is killed
    assert os.waitpid(pid, 0)[0] == pid


def children(pid: int) -> dict[int, str]:
    """Return the processes that a process has started, with what they run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
    return found


@linux
def test_where_the_process_has_ended_the_server_accepts(chat_bundle: Path) -> None:
    served: Served = start(chat_bundle, "--name", "demo")
    try:
        assert httpx.get(f"{served.url}/health", timeout=SECONDS).status_code == 200
        (accepts,) = [one for one, runs in children(served.process.pid).items() if "edgespec.server.front" in runs]
        os.kill(accepts, signal.SIGKILL)
        assert served.process.stderr is not None
        for line in served.process.stderr:
            if "has ended: the server accepts them itself" in line:
                break
        asked = {"model": "demo", "prompt": "Good night", "max_tokens": 2}
        for _ in range(2):
            assert httpx.get(f"{served.url}/health", timeout=SECONDS).json()["status"] == "ok"
            assert httpx.post(f"{served.url}/v1/completions", json=asked, timeout=SECONDS).status_code == 200
    finally:
        served.process.terminate()
        _, said = served.process.communicate(timeout=SECONDS)
    assert "Traceback" not in said
    assert "stopping" in said
