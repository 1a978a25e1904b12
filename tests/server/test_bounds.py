"""Limits of one client: connections, bytes, and the time of readers and of the decoding thread."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from edgespec.engine.engine import Engine
from edgespec.errors import BundleError, EdgespecError, InvalidRequest
from edgespec.planning.budget import parse_bytes
from edgespec.runtimes.files.checked import take_digest
from edgespec.runtimes.files.json_file import open_regular
from edgespec.runtimes.options import LoadOptions
from edgespec.server import held as module
from edgespec.server.audio import read_form
from edgespec.server.errors import Busy, Failure
from edgespec.server.guard import BodyLimit
from edgespec.server.held import ASIDE, Held, HeldBytes
from edgespec.server.models import Models
from edgespec.server.readers import ended
from edgespec.server.reading import ModelInfo, ParsedRequest, Reader, _predicted, _told
from edgespec.server.responses import ResponsesRequest
from edgespec.server.scheduler import Limits
from edgespec.server.serving import SPARE, Open
from edgespec.server.stored import BYTES_OF_ONE, Stored
from tests.server.conftest import Served, start, stop

PLACES = 8  # connections
ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 2000, "temperature": 0, "stream": True}
MIB = 1 << 20


@pytest.fixture(scope="module")
def crowded(served_bundle: Path) -> Iterator[Served]:
    """Make a server with few places for connections, and one text at a time."""
    running = start(served_bundle, "--name", "demo", "--connections", str(PLACES), "--max-batch-size", "1")
    yield running
    stop(running)


def send(served: Served, method: str, path: str, body: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), 60, (source, 0))
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    return made


def status(sock: socket.socket) -> int:
    with sock:
        return int(sock.recv(1 << 16).split(maxsplit=2)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of this machine")
def test_health_is_answered_while_one_client_has_all_places_that_it_may(crowded: Served) -> None:
    body = json.dumps(ASK).encode()
    with ExitStack() as stack:
        for _ in range(PLACES - PLACES // 4):
            one = stack.enter_context(send(crowded, "POST", "/v1/completions", body))
            assert one.recv(12).endswith(b"200")  # its answer has begun
        assert status(send(crowded, "GET", "/health")) == 200
        with send(crowded, "GET", "/v1/models") as refused:
            answer = refused.recv(1 << 16)
        assert answer.split(maxsplit=2)[1] == b"429"
        assert b"retry-after" in answer
        assert b"as many connections as it may" in answer
        for path in ("/health", "/v1/models"):
            assert status(send(crowded, "GET", path, source="127.0.0.2")) == 200  # a newcomer


def test_a_client_has_three_quarters_of_the_places_and_idle_connections_give_way() -> None:
    @dataclass(eq=False)
    class One:
        client_name: str
        running: bool
        cut: bool = False

        def abort(self) -> None:
            opened.all.pop(cast(Any, self), None)
            opened.spare.pop(cast(Any, self), None)

    def place(client: str, running: bool = True) -> bool:
        return opened.place(cast(Any, One(client, running)))

    opened = Open(Limits(connections=PLACES))
    assert [place("one") for _ in range(7)] == [True] * 6 + [False]
    assert [place("two"), place("two", running=False), place("three"), place("four")] == [True, True, True, False]
    assert [place("one") for _ in range(3 * SPARE)] == [False] * 3 * SPARE
    assert (len(opened.all), len(opened.spare)) == (PLACES, SPARE)


def test_requests_hold_so_many_bytes_each_client_and_all_together() -> None:
    every = HeldBytes(MIB)
    mine, other, third = (Held(every, name) for name in ("one", "two", "three"))
    mine.set(every.most // 2)
    with pytest.raises(Busy, match="of this client"):
        mine.add(1)
    with pytest.raises(Busy, match="of this client"):
        Held(every, "one").set(1)
    other.set(every.most // 2)
    with pytest.raises(Busy, match="requests hold"):
        third.set(1)
    assert every.bytes == every.most
    other.close()
    other.add(5)  # changes after the answer are ignored
    third.set(7)
    assert every.bytes == every.most // 2 + 7
    assert HeldBytes(200 * MIB).most >= 2 * 200 * MIB  # a body of the largest size fits the half of one client


def test_what_requests_hold_counts_against_the_budget(served_bundle: Path) -> None:
    models = Models({"demo": served_bundle}, LoadOptions(threads=1, budget="400MiB"))
    free = models._free()
    assert free is not None
    assert 0 < free < parse_bytes("400MiB")
    assert Models({"demo": served_bundle}, LoadOptions(threads=1))._free() is None
    small = HeldBytes(MIB, lambda: ASIDE + MIB)
    one = Held(small, "one")
    one.set(ASIDE + MIB)
    assert small.beyond == MIB
    with pytest.raises(Busy, match="requests hold"):
        one.add(1)
    HeldBytes(MIB, lambda: -5).change("one", ASIDE)  # which the budget keeps for them


def test_the_event_loop_waits_for_no_text_that_begins(served_bundle: Path) -> None:
    """A session is handed out under a lock; what the budget leaves for a body is asked by the loop that answers all."""
    models = Models({"demo": served_bundle}, LoadOptions(threads=1, budget="400MiB"))
    models.open("demo")
    jobs = models.all["demo"].jobs
    assert jobs is not None
    before, pools = models._free(), jobs.engine.reservations.pools
    with ThreadPoolExecutor(1) as elsewhere, ExitStack() as stack:
        for pool in pools:
            stack.enter_context(pool._lock)
        assert elsewhere.submit(models._free).result(timeout=30) == before
    models.close()


def body_of(length: bytes, pieces: list[bytes], most: int = MIB) -> tuple[list[Message], HeldBytes]:
    """Send a body through the limit -> what is answered, and what is still held."""
    held, said, left = HeldBytes(most), list[Message](), [*pieces]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        piece = left.pop(0) if left else b""
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message: Message) -> None:
        said.append(message)

    scope = {"type": "http", "path": "/", "headers": [(b"content-length", length)], "client": ("10.0.0.1", 1)}
    asyncio.run(BodyLimit(app, most, held)(scope, receive, send))
    return said, held


@pytest.mark.parametrize(
    ("length", "expected"),
    [(b"0" * 5000, 200), (b"0" * 5000 + b"2", 200), (b"9" * 5000, 413), (b"1x", 413), (b"", 413)],
)
def test_the_announced_length_may_be_any_text(length: bytes, expected: int) -> None:
    said, held = body_of(length, [b"ab"])
    assert said[0]["status"] == expected
    assert held.bytes == 0


def test_a_body_is_counted_while_it_comes_and_freed_with_its_request() -> None:
    said, held = body_of(b"3000000", [b"x" * MIB] * 3)
    assert said[0]["status"] == 413
    assert held.bytes == 0


def form(*parts: tuple[str, bytes], boundary: str = "x") -> bytes:
    found = b""
    for disposition, data in parts:
        found += f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + data + b"\r\n"
    return found + f"--{boundary}--\r\n".encode()


SOUND = ('name="file"; filename="a.wav"', b"RIFF\r\n--almost\x00" * 999)


def test_a_form_is_read_where_requests_are_read() -> None:
    body = form(('name="model"', "démo".encode()), SOUND, ('name="stream"', b"true"))
    found, prompts = Reader.read(cast(Reader, None), "transcriptions", body, b"multipart/form-data; boundary=x")
    assert (found["audio"]["model"], found["audio"]["stream"]) == ("démo", True)
    assert found["blobs"]["sound"] == SOUND[1]
    assert prompts == []


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        (b"multipart/form-data; boundary=x; charset=punycode", form(SOUND), "UTF-8"),
        (b"multipart/form-data; boundary=x; charset=utf-7", form(SOUND), "UTF-8"),
        (b"multipart/form-data", form(SOUND), "boundary"),
        (b"multipart/form-data; boundary=x", b"nothing", "no form"),
        (b"multipart/form-data; boundary=x", form(('name="model"', b"m")), "expected a recording"),
        (b"multipart/form-data; boundary=x", form(SOUND, SOUND), "Too many files"),
        (b"multipart/form-data; boundary=x", form(*[(f'name="f{n}"', b"") for n in range(40)]), "Too many fields"),
        (b"multipart/form-data; boundary=x", form(('name="model"', b"m" * (1 << 17))), "exceeded"),
        (b"multipart/form-data; boundary=x", form(SOUND, ('name="model"', b"m"), ('name="color"', b"")), "color"),
    ],
)
def test_a_form_that_is_none_is_refused(content_type: bytes, body: bytes, message: str) -> None:
    with pytest.raises(Failure, match=message):
        read_form(body, content_type, "transcriptions")


@pytest.fixture(scope="module")
def known(alone: Engine) -> ModelInfo:
    facts, eos = alone.bundle.manifest.target.facts, alone.bundle.manifest.tokenizer.eos
    return ModelInfo(str(alone.bundle.path), "demo", facts.vocab, alone.context, tuple(eos), {}, 200)


@pytest.fixture(scope="module")
def reader(known: ModelInfo) -> Reader:
    return Reader([known])


def test_a_prediction_is_tokenized_once_and_cut_to_the_context(alone: Engine, known: ModelInfo, reader: Reader) -> None:
    tokens, text = reader._tokens("demo"), "My lord, the king is dead."
    assert list(_predicted(tokens, text)) == alone.codec.encode(text, special=False)
    assert len(_predicted(tokens, "a b " * 50_000)) == known.context
    told, prompts = reader.read("completion", json.dumps({"model": "demo", "prompt": "The king", "n": 16}).encode())
    found = ParsedRequest.of(told | {"predicted": True}, [*prompts, array("i", [5, 6])])
    assert [one.prediction for one in found.each()] == [(5, 6)] * 16
    assert len(found.prompts) == 1


def test_tokens_that_are_expected_are_guesses_as_their_text_is(alone: Engine) -> None:
    plain = alone.generate("The king", max_new_tokens=40, temperature=0)
    text = alone.generate("The king", max_new_tokens=40, temperature=0, prediction=plain.text)
    tokens = alone.generate("The king", max_new_tokens=40, temperature=0, prediction=tuple(plain.tokens))
    assert text.tokens == tokens.tokens == plain.tokens
    assert tokens.stats.rounds < plain.stats.rounds


def test_why_a_reader_ended_is_said() -> None:
    assert "6 s of processor time" in ended(-signal.SIGXCPU, 6).message
    assert "SIGABRT" in ended(-signal.SIGABRT, 6).message
    assert "processor time" not in ended(-signal.SIGABRT, 6).message
    assert (ended(1, 6).status, "exit code 1" in ended(1, 6).message) == (500, True)


def test_a_mistake_while_reading_ends_no_process() -> None:
    class Panic(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    for error in (KeyError("type"), TypeError("no text"), Panic("index out of range")):
        with _told() as told:
            fail(error)
        message, status, *_ = told["refused"]
        assert status == 500
        assert type(error).__name__ in message


def test_a_server_without_the_library_of_grammars_says_so(known: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    ask = {"model": "demo", "prompt": "x", "response_format": {"type": "json_object"}}
    with pytest.raises(InvalidRequest, match="llguidance is not installed"):
        Reader([known]).read("completion", json.dumps(ask).encode())


@pytest.mark.parametrize("metadata", [{str(n): "" for n in range(17)}, {"a": "x" * 513}, {"a" * 65: ""}, {"a": [[]]}])
def test_metadata_is_bounded_as_openai_does(reader: Reader, metadata: dict[str, Any]) -> None:
    with pytest.raises((EdgespecError, ValueError), match="metadata"):
        ResponsesRequest.model_validate({"model": "demo", "input": "x", "metadata": metadata})


def test_stored_bytes_are_counted_as_they_come_and_go() -> None:
    kept = Stored()
    for number in range(64):
        kept.put(f"{number % 3}", str(number % 20), b"x" * number * 1000, b"y" * number)
    kept.put("0", "large", b"x" * (BYTES_OF_ONE + 1), b"")
    assert kept.get("0", "large") is None
    kept.put("0", "fits", b"x" * (BYTES_OF_ONE - 10), b"")
    assert kept.get("0", "fits") is not None
    for owner, own in kept._kept.items():
        assert kept._bytes[owner] == sum(len(one) + len(two) for one, two in own.values()) <= BYTES_OF_ONE


def test_module_limits_hold_several_bodies() -> None:
    assert HeldBytes(25 * MIB).most >= module.BODIES * 25 * MIB


def test_a_stream_is_read_by_one_thread_at_a_time(alone: Engine) -> None:
    stream = alone.stream("The king", max_new_tokens=8, temperature=0)
    first = next(stream)
    with stream._reading, pytest.raises(InvalidRequest, match="being read already"):
        next(stream)  # as if another thread were reading it
    rest = "".join(chunk.text for chunk in stream)
    assert first.text + rest == alone.generate("The king", max_new_tokens=8, temperature=0).text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no FIFOs in folders")
def test_a_pipe_among_files_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(BundleError, match="not a regular file"):
        take_digest(tmp_path / "pipe")
