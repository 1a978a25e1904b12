"""Many clients at once, from another process than the server's: no text is lost, mixed or changed."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec.engine.engine import Engine
from tests.server.conftest import Served, start, stop

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
    """Client ``number``'s request: long and short, greedy and drawn, by every kind of method."""
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
    """What that request gives by itself, by plain decoding."""
    asked = body(number)
    how: dict[str, Any] = {"temperature": asked["temperature"], "seed": number, "acceptance": "coupled", "method": "ar"}
    return engine.generate(str(asked["prompt"]), max_new_tokens=asked["max_tokens"], **how).text


def test_every_client_gets_its_own_text(served: Served, alone: Engine) -> None:
    url = f"{served.url}/v1/completions"

    def ask(number: int) -> str | None:
        """A client; every eighth goes away in the middle of a stream."""
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
    assert running.process.returncode in (0, -15, 143)  # however SIGTERM is told


@pytest.mark.parametrize(
    "options, message",
    [
        (["--parallel", "0"], "expected at least 1"),
        (["--seconds", "-1"], "expected at least"),
        (["--port", "99999"], "port"),
    ],
)
def test_wrong_options(served_bundle: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "edgespec", "serve", str(served_bundle), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode in (1, 2)
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_port_that_is_taken(served: Served, served_bundle: Path) -> None:
    port = served.url.rpartition(":")[2]
    command = [sys.executable, "-m", "edgespec", "serve", str(served_bundle), "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
