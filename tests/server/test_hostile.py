"""A short battery of what tests.stress and tests.fuzz do for longer: answers are looked at, not times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fuzz.http import try_all
from tests.server.conftest import Served, start, stop
from tests.stress.attacks import ATTACKS, Place
from tests.stress.hostile import attack

SECONDS = 6.0
EXAMPLES = 25


@pytest.fixture(scope="module")
def attacked(chat_bundle: Path) -> Iterator[Served]:
    """A server that knows conversations; nothing of what it is asked may end in a traceback."""
    running = start(chat_bundle, "--name", "demo", "--arrive", "2", "--connections", "64")
    yield running
    assert running.process.poll() is None
    said = stop(running)
    assert "Traceback" not in said, said


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


def test_requests_made_from_the_description(attacked: Served) -> None:
    found = try_all(attacked.url, EXAMPLES)
    assert found.wrong == []
    assert {200, 400} <= found.statuses.keys()
    assert max(found.statuses) < 500
