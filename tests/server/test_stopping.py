"""A server that stops, and one under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from edgespec.cli.app import cli
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from tests.server.conftest import Served, start, stop

ASK: dict[str, Any] = {"model": "demo", "prompt": "The king", "max_tokens": 4000, "temperature": 0, "stream": True}
OWN = {"edgespec": {"method": "ar"}, "stop": "\0"}


def ended(served: Served) -> str:
    """Return its output until it ended."""
    assert served.process.stderr is not None
    try:
        served.process.wait(60)
        return served.process.stderr.read()
    finally:
        served.process.kill()
        served.process.stderr.close()


def test_texts_that_run_on_are_cut_and_told_so(served_bundle: Path) -> None:
    """At the end of its grace a stream ends with an error event and [DONE], an answer in one piece with 503."""
    running = start(served_bundle, "--name", "demo", "--shutdown-timeout", "0", "--max-batch-size", "1")
    url = f"{running.url}/v1/completions"
    with httpx.stream("POST", url, json=ASK | OWN | {"n": 4, "max_tokens": 900}, timeout=60) as sent:
        lines = sent.iter_lines()
        next(lines)
        running.process.terminate()
        rest = [line.removeprefix("data: ") for line in lines if line]
    assert rest[-1] == "[DONE]"
    assert "the server stopped before" in json.loads(rest[-2])["error"]["message"]
    said = ended(running)
    assert re.search("stopping: [2-4] texts have up to 0 s", said)  # on a busy machine one may have ended by then
    assert "Traceback" not in said
    assert running.process.returncode in (-15, 143)


def test_a_second_signal_cuts_what_runs(served_bundle: Path) -> None:
    running = start(served_bundle, "--name", "demo", "--shutdown-timeout", "600")
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", json=ASK | OWN | {"n": 16, "max_tokens": 900}, timeout=60
    ) as sent:
        lines = sent.iter_lines()
        next(lines)
        running.process.terminate()
        assert running.process.stderr is not None
        assert "once more ends them at once" in running.process.stderr.readline()
        running.process.terminate()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert "Traceback" not in ended(running)


def test_it_stops_whatever_is_half_sent_or_being_read(served_bundle: Path) -> None:
    """A body that never ends, and a schema that takes seconds, do not delay the stop."""
    import socket

    running = start(served_bundle, "--name", "demo", "--shutdown-timeout", "600", "--read-timeout", "600")
    host, _, port = running.url.removeprefix("http://").partition(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    shape = {"type": "object", "properties": {f"{number:x}": {} for number in range(5000)}}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": shape}}}
    body = json.dumps(ASK | form).encode()
    with socket.create_connection((host, int(port))) as half, socket.create_connection((host, int(port))) as heavy:
        half.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        heavy.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)  # it is being read
        running.process.terminate()
        assert "Traceback" not in ended(running)


MODULE = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(10))
except BaseException as error:  # as C modules do whose own import fails
    raise ImportError("it failed to import") from error
"""
IMPORTING = """
import signal, sys
from edgespec.cli import app
app.import_module = lambda name: __import__("turning")
app.main()
"""


def test_a_signal_within_an_import_that_turns_it_into_an_error(tmp_path: Path) -> None:
    (tmp_path / "turning.py").write_text(MODULE, "utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", IMPORTING, "serve", "demo"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (ran.returncode, ran.stderr) == (143, "")


@pytest.mark.parametrize("moment", [0.2, 1.0])
def test_a_signal_while_it_starts(served_bundle: Path, moment: float) -> None:
    command = [sys.executable, "-m", "edgespec", "serve", str(served_bundle), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(moment)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert process.returncode in (-15, 143)


def test_a_port_that_is_taken_is_said_once(served: Served, served_bundle: Path) -> None:
    port = served.url.rpartition(":")[2]
    command = [sys.executable, "-m", "edgespec", "serve", str(served_bundle), "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use",
        "hint: --port 0 takes a free port",
    ]


@pytest.mark.parametrize(
    "options, variable, message",
    [
        (["--api-key", ""], None, "the API key is empty"),
        ([], "", "the API key is empty"),
        (["--host", "203.0.113.7"], None, "cannot listen on 203.0.113.7"),
    ],
)
def test_what_opens_nothing(served_bundle: Path, options: list[str], variable: str | None, message: str) -> None:
    command = ["serve", str(served_bundle), "--port", "0", *options]
    done = CliRunner().invoke(cli, command, env={"EDGESPEC_API_KEY": variable})
    assert isinstance(done.exception, EdgespecError)
    assert message in str(done.exception)


def test_ctrl_c_stops_it_too(served_bundle: Path) -> None:
    running = start(served_bundle)
    running.process.send_signal(signal.SIGINT)
    said = ended(running)
    assert "stopping" in said
    assert "Traceback" not in said
    assert running.process.returncode == 130


CLIENTS = 64
PROMPTS = (
    "ROMEO:\n",
    "First Citizen:\n",
    "The king is",
    "To be, or not",
    "JULIET:\nGood night",
    "Enter the DUKE",
    "O",
    "My lord,",
)


def body(number: int) -> dict[str, Any]:
    """Return request ``number``: long or short, greedy or sampled, with each kind of method."""
    method = (None, "ar", "ngram", "speculative", "medusa")[number % 5]
    drawn = number % 3 == 0
    return {
        "model": "demo",
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 40 if number % 4 == 0 else 8,
        "temperature": 0.9 if drawn else 0.0,
        "seed": number,
        "edgespec": {"method": method},
    }


def expected(engine: Engine, number: int) -> str:
    """Return that request's text by plain decoding, without a server."""
    asked = body(number)
    how: dict[str, Any] = {"temperature": asked["temperature"], "seed": number, "acceptance": "coupled", "method": "ar"}
    return engine.generate(str(asked["prompt"]), max_new_tokens=asked["max_tokens"], **how).text


def test_every_client_gets_its_own_text(served: Served, alone: Engine) -> None:
    url = f"{served.url}/v1/completions"

    def ask(number: int) -> str | None:
        """Make a client; every eighth goes away in the middle of a stream."""
        if number % 8 == 7:
            with httpx.stream(
                "POST", url, json=body(number) | {"stream": True, "max_tokens": 400}, timeout=300
            ) as sent:
                next(sent.iter_lines())
            return None
        answer = httpx.post(url, json=body(number), timeout=300)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        texts = list(pool.map(ask, range(CLIENTS)))
    for number, text in enumerate(texts):
        if text is not None:
            assert text == expected(alone, number), number
    after = httpx.post(url, json=body(1), timeout=300).json()["choices"][0]["text"]
    assert after == expected(alone, 1)
    health = httpx.get(f"{served.url}/health", timeout=60).json()
    assert health["waiting"] == 0


def test_a_stop_lets_requests_end(served_bundle: Path, alone: Engine) -> None:
    running = start(served_bundle, "--name", "demo")
    asked = {"model": "demo", "prompt": "The king", "max_tokens": 300, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=asked, timeout=300) as sent:
        lines = sent.iter_lines()
        first = next(lines)
        running.process.terminate()
        rest = [first, *lines]
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    stop(running)
    assert running.process.returncode in (0, -15, 143)  # exit codes that systems report for SIGTERM
