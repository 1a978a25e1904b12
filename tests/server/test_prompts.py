"""A server that is started again finds the prompts that it has read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import PROMPTS
from tests.server.conftest import start, stop

KEEPS_ALL = (
    "from edgespec.engine import prompt_cache; prompt_cache.WORTH = 0; from edgespec.cli.app import main; main()"
)
"""However fast a prompt is read, it is kept."""


def test_prompts_are_found_after_a_restart(
    served_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever has the same key, and nobody else; the answer is the same."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    monkeypatch.delenv("EDGESPEC_PROMPT_CACHE")
    body = {"model": "demo", "prompt": PROMPTS[14] * 16, "max_tokens": 8, "temperature": 0}

    def asked(*keys: str, options: tuple[str, ...] = ()) -> list[tuple[str, int]]:
        options = ("--name", "demo", "--api-key", "first", "--api-key", "second", *options)
        running, found = start(served_bundle, *options, program=("-c", KEEPS_ALL)), []
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            found.append((answer["choices"][0]["text"], cached))
        assert "Traceback" not in stop(running)
        return found

    ((text, cached),) = asked("first")
    assert cached == 0
    other, (again, cached) = asked("second", "first")
    assert other == (text, 0)
    assert again == text
    assert cached > 500
    assert asked("first", options=("--no-prompt-cache",)) == [(text, 0)]


def test_clients_with_one_system_prompt_read_it_together(served_bundle: Path) -> None:
    """All at once, without a file: the answers are those of each alone, and nothing goes from key to key."""
    common, ends = PROMPTS[14] * 16, [PROMPTS[at][:20] for at in range(6)]
    options = ("--name", "demo", "--api-key", "first", "--api-key", "second", "--parallel", "6", "--no-prompt-cache")
    running = start(served_bundle, *options)

    def asked(key: str, end: str) -> tuple[str, int, int]:
        body = {"model": "demo", "prompt": common + end, "max_tokens": 8, "temperature": 0}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60).json()
        usage = answer["usage"]
        return (answer["choices"][0]["text"], usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"])  # fmt: skip

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda end: asked("first", end), ends))
    texts, lengths, cached = zip(*together, strict=True)
    assert sum(lengths) - sum(cached) < 2 * max(lengths)
    other, _, found = asked("second", ends[0])
    assert (other, found) == (texts[0], 0)
    assert texts == tuple(asked("second", end)[0] for end in ends)
    figures = httpx.get(f"{running.url}/metrics", headers={"authorization": "Bearer first"}).text
    (counted,) = (line for line in figures.splitlines() if line.startswith("edgespec_reused_prompt_tokens_total"))
    assert float(counted.split()[-1]) > sum(cached)
    assert "Traceback" not in stop(running)
