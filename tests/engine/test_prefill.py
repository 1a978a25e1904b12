"""A long prompt is filled in by chunks: in between a cancel is seen, and other requests run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot

LONG = [5 + at % 900 for at in range(6 * PREFILL_CHUNK)]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every call that fills a slot."""
    found: list[int] = []
    original = Slot.prefill

    def counted(self: Slot, tokens: Sequence[int]) -> None:
        found.append(len(tokens))
        original(self, tokens)

    monkeypatch.setattr(Slot, "prefill", counted)
    return found


def test_the_text_and_what_was_reused(bundle: Callable[..., Path], chunks: list[int]) -> None:
    engine = load(bundle("int4"), threads=1, budget="off")
    first = engine.generate(LONG, method="ar", max_new_tokens=8, ignore_eos=True)
    assert chunks.count(PREFILL_CHUNK) == 5
    assert (first.stats.prompt_tokens, first.stats.reused_tokens) == (len(LONG), 0)
    again = engine.generate(LONG, method="ar", max_new_tokens=8, ignore_eos=True)
    assert again.tokens == first.tokens
    assert again.stats.reused_tokens == len(LONG) - 1
    other = engine.generate(LONG[: PREFILL_CHUNK + 3] + LONG, method="ar", max_new_tokens=8, ignore_eos=True)
    assert other.stats.reused_tokens == PREFILL_CHUNK + 3


def test_a_cancel_is_seen_between_chunks(
    bundle: Callable[..., Path], chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cancel = load(bundle("int4"), threads=1, budget="off"), threading.Event()
    monkeypatch.setattr("edgespec.engine.request.time.sleep", lambda _: cancel.set() if len(chunks) == 2 else None)
    result = engine.generate(LONG, method="ar", max_new_tokens=8, cancel=cancel)
    assert (result.finish, result.tokens, chunks) == ("cancelled", [], [PREFILL_CHUNK] * 2)
    monkeypatch.undo()
    assert len(engine.generate(LONG, method="ar", max_new_tokens=8, ignore_eos=True).tokens) == 8


def test_another_request_runs_between_chunks(
    bundle: Callable[..., Path], chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(bundle("int4"), threads=1, budget="off")
    texts: list[list[int]] = []
    alone = engine.generate("ROMEO:", method="ar", max_new_tokens=8).tokens
    expected = engine.generate(LONG, method="ar", max_new_tokens=8, ignore_eos=True).tokens
    engine.sessions.clear()
    chunks.clear()

    def other(_: float) -> None:
        if len(chunks) == 2 and not texts:
            texts.append([])
            running = threading.Thread(
                target=lambda: texts.append(engine.generate("ROMEO:", method="ar", max_new_tokens=8).tokens)
            )
            running.start()
            running.join()

    monkeypatch.setattr("edgespec.engine.request.time.sleep", other)
    assert engine.generate(LONG, method="ar", max_new_tokens=8, ignore_eos=True).tokens == expected
    assert texts == [[], alone]
