"""Clients that mean harm, or are broken: each is told why and cut, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from edgespec.server.scheduler import Limits
from edgespec.server.serving import with_limits
from tests.server.conftest import Served, start, stop

MOST = 16  # connections
ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 400, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def small(served_bundle: Path) -> Iterator[Served]:
    """A server with few connections and little patience."""
    running = start(served_bundle, "--name", "demo", "--connections", str(MOST), "--arrive", "1.5", "--idle", "1")
    yield running
    assert running.process.poll() is None
    stop(running)


def connect(served: Served, window: int = 0) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    made = socket.socket()
    if window:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.settimeout(60)
    made.connect((host, int(port)))
    return made


def request(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def rest(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    try:
        while piece := sock.recv(1 << 16):
            found += piece
    except ConnectionError:
        pass
    return found


def status(answer: bytes) -> int:
    return int(answer.split(maxsplit=2)[1])


def well(served: Served) -> bool:
    return httpx.get(f"{served.url}/health", timeout=60).status_code == 200


def figure(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics", timeout=60).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def resident(served: Served) -> int:
    pages = Path(f"/proc/{served.process.pid}/statm")
    return int(pages.read_text("ascii").split()[1]) * 4096 if pages.exists() else 0


@pytest.mark.parametrize(
    "half",
    [
        b"G",
        b"GET /health HTTP/1.1\r\nHost: loc",
        request(b"", "Content-Length: 1000"),
        request(b'{"model', "Content-Length: 99"),
    ],
)
def test_a_request_that_does_not_arrive_is_told_so(small: Served, half: bytes) -> None:
    with connect(small) as sock:
        sock.sendall(half)
        answer = rest(sock)
    assert status(answer) == 408
    assert "did not arrive within 1.5 seconds" in answer.decode()
    assert well(small)


def test_connections_without_a_request_are_closed(small: Served) -> None:
    with connect(small) as silent, connect(small) as once:
        once.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert rest(silent) == b""
        assert status(rest(once)) == 200


def test_many_connections_close_no_door(small: Served) -> None:
    """Ten times as many as there may be, silent and half sent: whoever comes is answered, and descriptors stay few."""
    with ExitStack() as stack:
        for number in range(10 * MOST):
            sock = stack.enter_context(connect(small))
            if number % 2:
                sock.sendall(request(b"", "Content-Length: 5"))
        assert well(small)
        descriptors = Path(f"/proc/{small.process.pid}/fd")
        if descriptors.is_dir():
            assert len([one for one in descriptors.iterdir() if "socket" in str(one.readlink())]) <= MOST + 8


def test_a_body_in_pieces_of_one_byte(small: Served) -> None:
    with connect(small) as sock:
        sock.sendall(request(b"1\r\n \r\n" * 20_000, "Transfer-Encoding: chunked"))
        answer = rest(sock)
    assert status(answer) == 400
    assert b"too many pieces" in answer
    assert well(small)


def test_a_body_that_is_too_large_is_refused_while_it_comes(small: Served) -> None:
    """The answer is read by a client that goes on sending, announced or not."""
    for headers, body in (
        ("Content-Length: 3000000", b" " * 3_000_000),
        ("Transfer-Encoding: chunked", (b"10000\r\n" + b" " * 65536 + b"\r\n") * 40),
    ):
        with connect(small) as sock:
            sock.sendall(request(body, headers))
            assert status(rest(sock)) == 413
    assert well(small)


def test_headers_without_an_end(small: Served) -> None:
    for piece in (b"X-%d: y\r\n", b"y%d"):
        with connect(small) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
            try:
                sock.sendall(b"".join(piece.replace(b"%d", b"%d" % number) for number in range(20_000)))
            except ConnectionError:
                continue
            answer = rest(sock)
            assert not answer or status(answer) == 431
    assert well(small)


@pytest.mark.parametrize(
    "bad", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions\r\n\r\n", b"\x16\x03\x01" * 9]
)
def test_what_is_no_http(small: Served, bad: bytes) -> None:
    with connect(small) as sock:
        sock.sendall(bad)
        answer = rest(sock)
    assert status(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_what_comes_behind_a_running_request_is_bounded(small: Served) -> None:
    before = resident(small)
    with connect(small) as sock:
        body = json.dumps(ASK | {"n": 4}).encode()
        sock.sendall(request(body, f"Content-Length: {len(body)}"))
        sent = 0
        try:
            while sent < 200 << 20:
                sent += sock.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        except OSError:
            pass  # it was cut
    assert sent < 64 << 20
    assert resident(small) < before + (64 << 20)
    assert well(small)


def test_a_client_that_does_not_read_is_left_behind(served_bundle: Path) -> None:
    """Its texts end, and are counted, running or waiting; no machine writes all of them in the time."""
    running = start(served_bundle, "--name", "demo", "--arrive", "0.5", "--parallel", "2")
    try:
        body = json.dumps(ASK | {"n": 16, "max_tokens": 900, "logprobs": 1}).encode()
        with connect(running, window=4096) as sock:
            sock.sendall(request(body, f"Content-Length: {len(body)}"))
            ends = [f'edgespec_requests_total{{end="{end}"}}' for end in ("cancelled", "length", "eos")]
            while sum(figure(running, end) for end in ends) < 16:
                time.sleep(0.1)
        assert sum(figure(running, end) for end in ends) == 16
        assert figure(running, ends[0]) > 0
    finally:
        stop(running)


def test_requests_whose_clients_left_are_counted(small: Served) -> None:
    def ended() -> float:
        return sum(figure(small, f'edgespec_requests_total{{end="{end}"}}') for end in ("cancelled", "length", "eos"))

    before, cancelled = ended(), figure(small, 'edgespec_requests_total{end="cancelled"}')
    for _ in range(6):
        with httpx.stream("POST", f"{small.url}/v1/completions", json=ASK | {"n": 2}, timeout=60) as sent:
            next(sent.iter_lines())
    while ended() < before + 12:
        time.sleep(0.05)
    assert ended() == before + 12
    assert figure(small, 'edgespec_requests_total{end="cancelled"}') > cancelled


def test_a_client_that_left_as_it_was_refused() -> None:
    """The socket is no longer connected when the answer's end is sent, and the loop does not know it yet."""

    async def serve() -> tuple[bool, list[dict[str, Any]]]:
        def gone() -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        loop, failures = asyncio.get_running_loop(), list[dict[str, Any]]()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        kind, _ = with_limits(Limits(arrive=0.05))
        config = uvicorn.Config(lambda *_: None, http=kind, log_config=None)
        config.load()
        ours, theirs = socket.socketpair()
        with theirs:
            transport, made = await loop.connect_accepted_socket(
                lambda: kind(config=config, server_state=ServerState(), app_state={}, _loop=loop), ours
            )
            setattr(transport, "write_eof", gone)  # noqa: B010  the loop does not know yet that it is closed
            theirs.sendall(b"POST / HTTP/1.1\r\n")  # half a request, which is late soon
            while not (made.cut or failures):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            return made.cut, failures

    cut, failures = asyncio.run(serve())
    assert failures == []
    assert cut
