"""A long prompt is read by chunks: in between a cancel is seen, and other requests run; the text stays the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest

from edgespec.control.adaptive import Control
from edgespec.decoding.settings import Settings
from edgespec.engine.batch import RunningBatch
from edgespec.engine.engine import Engine
from edgespec.engine.sharing import ALONE, BESIDE, PrefillBudget
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot

LONG = [5 + at % 900 for at in range(6 * PREFILL_CHUNK)]
PLAIN = Settings(method="ar", max_new_tokens=8, ignore_eos=True)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Use chunks of these sizes in turn, independent of timing."""

    def use(*sizes: int) -> None:
        turn = cycle(sizes)
        monkeypatch.setattr(PrefillBudget, "rows", lambda self, most, alone: min(most, next(turn)))

    return use


def test_the_text_and_what_was_reused(fresh: Callable[..., Engine], prefills: list[tuple[Slot, list[int]]]) -> None:
    engine = fresh()
    first = engine.generate(LONG, PLAIN)
    assert sum(len(tokens) >= 8 for _, tokens in prefills) >= 6
    assert (first.stats.prompt_tokens, first.stats.reused_tokens) == (len(LONG), 0)
    again = engine.generate(LONG, PLAIN)
    assert again.tokens == first.tokens
    assert again.stats.reused_tokens == len(LONG) - 1
    other = engine.generate(LONG[:131] + LONG, PLAIN)
    assert other.stats.reused_tokens == 131


def test_a_cancel_is_seen_between_chunks(
    fresh: Callable[..., Engine], prefills: list[tuple[Slot, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, cancel = fresh(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("edgespec.engine.stream.time.sleep", lambda _: cancel.set() if len(prefills) == 2 else None)
        result = engine.generate(LONG, PLAIN, cancel=cancel)
    assert (result.finish, result.tokens, len(prefills)) == ("cancelled", [], 2)
    assert len(engine.generate(LONG, PLAIN).tokens) == 8


@pytest.mark.parametrize("method", ["ar", "speculative"])
def test_another_request_runs_between_chunks(
    fresh: Callable[..., Engine],
    prefills: list[tuple[Slot, list[int]]],
    rows: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """After every third chunk, of the draft's reading as of the target's."""
    engine, texts = fresh(), list[list[int]]()
    settings = PLAIN.changed(method=method, adaptive=False)
    rows(PREFILL_CHUNK)
    alone = engine.generate("ROMEO:", settings).tokens
    expected = engine.generate(LONG, settings).tokens
    engine.sessions.clear()
    prefills.clear()
    reading = threading.get_ident()

    def other(_: float) -> None:
        if threading.get_ident() == reading and len(prefills) % 3 == 0:
            running = threading.Thread(target=lambda: texts.append(engine.generate("ROMEO:", settings).tokens))
            running.start()
            running.join()

    monkeypatch.setattr("edgespec.engine.stream.time.sleep", other)
    assert engine.generate(LONG, settings).tokens == expected
    assert texts
    assert all(text == alone for text in texts)
    counts: dict[Slot, int] = {}
    for slot, tokens in prefills:
        counts[slot] = counts.get(slot, 0) + len(tokens)
        assert len(tokens) <= PREFILL_CHUNK
    assert [count for count in counts.values() if count > PREFILL_CHUNK] == [len(LONG) - 1] * (1 + (method != "ar"))


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_draft_taken_up_in_the_middle_of_a_text_reads_it_by_chunks(
    fresh: Callable[..., Engine],
    prefills: list[tuple[Slot, list[int]]],
    rows: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    cancelled: bool,
) -> None:
    """Control drafts from the fourth round on: the draft has read nothing until then."""
    engine, texts, cancel = fresh(), list[list[int]](), threading.Event()
    rows(PREFILL_CHUNK)
    expected = engine.generate(LONG, PLAIN).tokens
    alone = engine.generate("ROMEO:", PLAIN).tokens
    pays, reading = list[bool](), threading.get_ident()
    monkeypatch.setattr(Control, "_best", lambda self, record, rows: (int(bool(pays)), 1.0, 0.5))
    monkeypatch.setattr(Control, "_to_probe", lambda self, *given: 0)
    monkeypatch.setattr("edgespec.control.adaptive.REST", 1)

    def other(_: float) -> None:
        if threading.get_ident() == reading and pays and not texts:
            if cancelled:
                cancel.set()
            running = threading.Thread(target=lambda: texts.append(engine.generate("ROMEO:", PLAIN).tokens))
            running.start()
            running.join()

    monkeypatch.setattr("edgespec.engine.stream.time.sleep", other)
    stream = engine.stream(LONG, PLAIN.changed(method="speculative"), cancel=cancel)
    for number, _ in enumerate(stream):
        if number == 3:
            pays.append(True)
            prefills.clear()
    assert texts == [alone]
    assert stream.result.tokens == expected[: len(stream.result.tokens)]
    assert max(len(tokens) for _, tokens in prefills) <= PREFILL_CHUNK
    read = sum(len(tokens) for _, tokens in prefills) >= len(
        LONG
    )  # except the last tokens, with those written until then
    assert (stream.result.finish, read) == (("cancelled", False) if cancelled else ("length", True))


def test_a_batch_decodes_beside_a_long_prompt(fresh: Callable[..., Engine], rows: Callable[..., None]) -> None:
    """One thread for all, as the server: a short request has ended before a long prompt is read."""
    engine = fresh()
    rows(32)
    alone = [engine.generate(prompt, PLAIN).tokens for prompt in (LONG, LONG[7:16])]
    engine.sessions.clear()
    batch = RunningBatch(engine, 3)
    cancel = threading.Event()
    long, gone = batch.join(LONG, PLAIN), batch.join(LONG[1:], PLAIN, cancel)
    list(batch.round())
    short = batch.join(LONG[7:16], PLAIN)
    rounds = drained(batch, lambda: short.ended)
    assert long.reading
    assert short.result.tokens == alone[1]
    assert rounds < 12
    cancel.set()
    drained(batch, lambda: not batch.requests)
    assert (gone.result.finish, gone.result.tokens) == ("cancelled", [])
    assert long.result.tokens == alone[0]
    batch.close()


def drained(batch: RunningBatch, until: Callable[[], bool]) -> int:
    """Run rounds of ``batch`` until ``until`` holds; return how many. No request may fail."""
    for number in range(1000):
        if until():
            return number
        for _, answer in batch.round():
            assert not isinstance(answer, Exception), answer
    raise AssertionError("no end")


def costs(pace: PrefillBudget, fixed: float, row: float, alone: bool, chunks: int = 80) -> Iterator[tuple[int, float]]:
    """Yield rows and seconds of chunks on a machine with these costs per pass and per row."""
    for _ in range(chunks):
        size = pace.rows(PREFILL_CHUNK, alone)
        pace.took(size, fixed + size * row)
        yield size, fixed + size * row


def test_chunks_are_bounded_by_time() -> None:
    assert PrefillBudget().rows(PREFILL_CHUNK, alone=True) == 16
    assert PrefillBudget().rows(5, alone=True) == 5
    pace = PrefillBudget()
    fast = list(costs(pace, 0.0, 1e-5, alone=True))
    assert fast[1][0] == PREFILL_CHUNK
    slower = list(costs(pace, 0.001, 0.003, alone=True))  # the same, deep in a long text
    assert sum(seconds > ALONE for _, seconds in slower) < 8  # larger ones are tried now and then
    beside = list(costs(pace, 0.001, 0.003, alone=False))
    assert all(seconds <= BESIDE for _, seconds in beside[1:])
    assert beside[-1][0] == 8
    assert next(costs(pace, 0.001, 0.0001, alone=True))[0] >= 8


def test_chunks_are_larger_where_a_pass_costs_more_than_its_rows() -> None:
    pace = PrefillBudget()
    sizes = [size for size, _ in costs(pace, 0.2, 0.001, alone=True)]
    assert sizes[5:] == [PREFILL_CHUNK] * 75
    assert pace.rows(PREFILL_CHUNK, alone=False) == 8
