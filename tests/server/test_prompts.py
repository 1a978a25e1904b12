"""A server that is started again finds the prompts that it has read."""

from __future__ import annotations

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

    def asked(key: str, *options: str) -> tuple[str, int]:
        options = ("--name", "demo", "--api-key", "first", "--api-key", "second", *options)
        running = start(served_bundle, *options, program=("-c", KEEPS_ALL))
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60).json()
        assert "Traceback" not in stop(running)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    text, cached = asked("first")
    assert cached == 0
    assert asked("second") == (text, 0)
    again, cached = asked("first")
    assert again == text
    assert cached > 500
    assert asked("second") == (text, cached)
    assert asked("first", "--no-prompt-cache") == (text, 0)
