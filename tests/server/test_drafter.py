"""A bundle with a drafter that reads hidden states behind a real server: streams hold plain decoding's text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.runtimes.files.manifest import Operators
from tests.server.conftest import start, stop

PROMPTS = ("ROMEO:\n", "KING RICHARD III:\nWhat", "First Citizen:\nWe are")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory, kind: Operators) -> Path:
    """The embedded model with its EAGLE-3 drafter."""
    folder = tmp_path_factory.mktemp("eagle") / "bundle"
    Exporter(ExportOptions("builtin:shakespeare", folder, ["eagle"], "fp32", operators=kind, threads=1)).run()
    return folder


@pytest.fixture(scope="module")
def client(eagle: Path) -> Iterator[OpenAI]:
    running = start(eagle, "--name", "eagle", "--parallel", "2")
    try:
        with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
            yield made
    finally:
        stop(running)


def test_streams_are_plain_decodings_text(client: OpenAI, eagle: Path, kind: Operators) -> None:
    """Alone, together in one pass, and once more on slots that others have used."""

    def stream(prompt: str) -> str:
        own = {"edgespec": {"method": "eagle", "fallback": False}}
        events = client.completions.create(
            model="eagle", prompt=prompt, max_tokens=32, temperature=0, stream=True, extra_body=own
        )
        return "".join(choice.text for event in events for choice in event.choices)

    with load(eagle, threads=1, operators=kind) as engine:
        expected = [engine.generate(prompt, max_new_tokens=32, method="ar").text for prompt in PROMPTS]
    assert [stream(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(stream, PROMPTS)) == expected
    assert stream(PROMPTS[0]) == expected[0]


def test_its_guesses_are_taken(client: OpenAI) -> None:
    own = {"edgespec": {"method": "eagle", "fallback": False}}
    answer = client.completions.create(model="eagle", prompt=PROMPTS[0], max_tokens=32, temperature=0, extra_body=own)
    assert answer.model_extra is not None
    (said,) = answer.model_extra["edgespec"]
    assert said["method_used"] == "eagle"
    assert 0 < said["accepted"] <= said["drafted"]
