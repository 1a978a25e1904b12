"""Connections, who may use them, and hostile clients."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient
from uvicorn.server import ServerState

from edgespec.errors import InvalidRequest
from edgespec.runtimes.options import LoadOptions
from edgespec.server.app import Access, make_app
from edgespec.server.hosts import client_of, is_local
from edgespec.server.models import Models
from edgespec.server.scheduler import Limits
from edgespec.server.serving import Connection, Open
from tests.server.conftest import Served, models_of, start, stop
from tests.stress.attacks import ATTACKS, Place
from tests.stress.hostile import attack

MOST = 16  # connections
ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 400, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def small(served_bundle: Path) -> Iterator[Served]:
    """Make a server with few connections and little patience."""
    running = start(
        served_bundle,
        "--name",
        "demo",
        "--connections",
        str(MOST),
        "--read-timeout",
        "1.5",
        "--keep-alive-timeout",
        "1",
    )
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


def counted(served: Served, end: str) -> float:
    """Count the texts that ended so."""
    return figure(served, f'edgespec_requests_total{{end="{end}",model="demo"}}')


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
    """With ten times the allowed connections, silent or half sent, clients get answers, and descriptors stay few."""
    with ExitStack() as stack:
        for number in range(10 * MOST):
            sock = stack.enter_context(connect(small))
            if number % 2:
                sock.sendall(request(b"", "Content-Length: 5"))
        assert well(small)
        descriptors = Path(f"/proc/{small.process.pid}/fd")
        if descriptors.is_dir():  # the accepting process hands over one after another, so it takes a moment
            end = time.monotonic() + 20
            while (held := sockets(descriptors)) > MOST + 8 and time.monotonic() < end:
                time.sleep(0.05)
            assert held <= MOST + 8


def sockets(descriptors: Path) -> int:
    """Count the sockets among a process's descriptors."""
    found = 0
    for one in descriptors.iterdir():
        with suppress(OSError):  # closed meanwhile
            found += "socket" in str(one.readlink())
    return found


def test_a_body_in_pieces_of_one_byte(small: Served) -> None:
    with connect(small) as sock:
        sock.sendall(request(b"1\r\n \r\n" * 20_000, "Transfer-Encoding: chunked"))
        answer = rest(sock)
    assert status(answer) == 400
    assert b"too many pieces" in answer
    assert well(small)


def test_a_body_that_is_too_large_is_refused_while_it_comes(small: Served) -> None:
    """A client that keeps sending reads the answer, with and without a Content-Length."""
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
    running = start(served_bundle, "--name", "demo", "--read-timeout", "0.5", "--max-batch-size", "2")
    try:
        body = json.dumps(ASK | {"n": 16, "max_tokens": 900, "logprobs": 1}).encode()
        with connect(running, window=4096) as sock:
            sock.sendall(request(body, f"Content-Length: {len(body)}"))
            ends = ("cancelled", "length", "eos")
            while sum(counted(running, end) for end in ends) < 16:
                time.sleep(0.1)
        assert sum(counted(running, end) for end in ends) == 16
        assert counted(running, ends[0]) > 0
    finally:
        stop(running)


def test_requests_whose_clients_left_are_counted(small: Served) -> None:
    def ended() -> float:
        return sum(counted(small, end) for end in ("cancelled", "length", "eos"))

    before, cancelled = ended(), counted(small, "cancelled")
    for _ in range(6):
        with httpx.stream("POST", f"{small.url}/v1/completions", json=ASK | {"n": 2}, timeout=60) as sent:
            next(sent.iter_lines())
    while ended() < before + 12:
        time.sleep(0.05)
    assert ended() == before + 12
    assert counted(small, "cancelled") > cancelled


def test_a_client_that_left_as_it_was_refused() -> None:
    """The socket is no longer connected when the answer's end is sent, and the loop does not know it yet."""

    async def serve() -> tuple[bool, list[dict[str, Any]]]:
        def gone() -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        loop, failures = asyncio.get_running_loop(), list[dict[str, Any]]()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        config = uvicorn.Config(lambda *_: None, http=Connection, log_config=None)
        config.load()
        ours, theirs = socket.socketpair()
        with theirs:
            how = {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": loop}
            opened = Open(Limits(arrive=0.05))
            transport, made = await loop.connect_accepted_socket(lambda: Connection(opened, **how), ours)
            setattr(transport, "write_eof", gone)  # noqa: B010  the loop does not know yet that it is closed
            theirs.sendall(b"POST / HTTP/1.1\r\n")  # half a request, which is late soon
            while not (made.cut or failures):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            return made.cut, failures

    cut, failures = asyncio.run(serve())
    assert failures == []
    assert cut


ASK_GUARD: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 2, "temperature": 0}
PAGE = {"Origin": "https://chat.example", "Host": "localhost:8000"}


@pytest.fixture(scope="module")
def bundle(bundles: Callable[..., Path]) -> Path:
    return bundles("stock")


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[TestClient]:
    access = Access(hosts=["edge.example"], origins=["https://chat.example"])
    with TestClient(make_app(models_of(bundle, "demo"), access=access), base_url="http://localhost:8000") as made:
        yield made


@pytest.fixture(scope="module")
def plain(bundle: Path) -> Iterator[TestClient]:
    with TestClient(make_app(models_of(bundle, "demo")), base_url="http://localhost:8000") as made:
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
    assert client.post("/v1/completions", json=ASK_GUARD, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:8000"])
def test_other_pages_may_not_use_it(client: TestClient, plain: TestClient, origin: str) -> None:
    for one in (client, plain):
        answer = one.post("/v1/completions", json=ASK_GUARD, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "--allow-origin" in answer.json()["error"]["message"]
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert one.options("/v1/completions", headers=asked).status_code == 403


def test_a_page_that_was_allowed_asks_first_and_reads_the_answer(client: TestClient, plain: TestClient) -> None:
    asked = PAGE | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    before = client.options("/v1/completions", headers=asked)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "https://chat.example"
    answer = client.post("/v1/completions", json=ASK_GUARD, headers=PAGE)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    own = plain.post("/v1/completions", json=ASK_GUARD, headers={"Origin": "http://localhost:8000"})
    assert own.status_code == 200  # the server's own page


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_a_body_must_be_declared_as_json(client: TestClient, kind: str | None) -> None:
    """Web pages can send only other types without a preflight."""
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/v1/completions", content=b'{"model": "demo", "prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    declared = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", json=ASK_GUARD, headers=declared).status_code == 200


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
    """Timing must not tell a client whether it guessed another client's text, unless prefixes are shared on purpose."""
    secret = "The password of the king is a nightingale"
    models = Models({"demo": bundle}, LoadOptions(threads=1), Limits(parallel=2), shared=shared)
    app = make_app(models, Access(["one", "two"]))
    with TestClient(app, base_url="http://localhost") as made:

        def cached(key: str, text: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            answer = made.post("/v1/completions", json=ASK_GUARD | {"prompt": text}, headers=headers).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("one", secret) == 0
        own = cached("one", secret)
        assert own > 8
        found = cached("two", secret)
        assert found == (own if shared else 0)


SECONDS = 3.0


@pytest.fixture(scope="module")
def attacked(chat_bundle: Path) -> Iterator[Served]:
    """Start a server with a chat template; no request may end in a traceback."""
    running = start(chat_bundle, "--name", "demo", "--read-timeout", "2", "--connections", "64")
    assert running.process.stderr is not None
    said = list[str]()
    reader = threading.Thread(target=said.extend, args=(running.process.stderr,))
    reader.start()  # thousands of log lines would fill the pipe and block the server
    yield running
    assert running.process.poll() is None
    running.process.terminate()
    reader.join(60)
    running.process.stderr.close()
    running.process.wait(60)
    assert "Traceback" not in "".join(said)


@pytest.fixture(scope="module")
def place(attacked: Served) -> Place:
    host, _, port = attacked.url.removeprefix("http://").partition(":")
    return Place(host, int(port), "demo")


def test_others_are_answered_meanwhile(attacked: Served, place: Place) -> None:
    found = attack(place, SECONDS, attacked.process.pid)
    assert found.bad == []
    assert found.health
    assert {name for name in ATTACKS if any(one.startswith(name) for one in found.answers)} >= {*ATTACKS} - {
        "behind a running one"  # which may still wait for its answer
    }
    assert any(one.endswith(" 400") for one in found.answers)
    assert httpx.get(f"{attacked.url}/health", timeout=60).status_code == 200


def test_a_short_request_overtakes_a_large_one(attacked: Served) -> None:
    """48 texts of one request wait, and another one comes: it is not the last to end."""
    url, ends = f"{attacked.url}/v1/completions", []
    begun = threading.Event()

    def large() -> None:
        asked: dict[str, Any] = {
            "model": "demo",
            "prompt": ["The king", "O", "My"],
            "n": 16,
            "max_tokens": 60,
            "stream": True,
        }
        with httpx.stream("POST", url, json=asked, timeout=300) as sent:
            for line in sent.iter_lines():
                begun.set()
                if '"edgespec"' in line:  # the last event of a text
                    ends.append("large")

    thread = threading.Thread(target=large)
    thread.start()
    assert begun.wait(300)
    short = httpx.post(url, json={"model": "demo", "prompt": "ROMEO:", "max_tokens": 4}, timeout=300)
    at = len(ends)
    thread.join(300)
    assert short.status_code == 200
    assert len(ends) == 48
    assert at < 40


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_requests_made_from_the_description(attacked: Served, examples: int) -> None:
    from tests.fuzz.http import try_all  # schemathesis takes long to import

    found = try_all(attacked.url, examples)
    assert found.wrong == []
    assert {200, 400} <= found.statuses.keys()
    assert max(found.statuses) < 500
