"""Closing an engine: its memory is freed immediately, and further calls raise an error."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from tests.support.requests import PROMPT, Get, ask

CLOSED = "this engine is closed"
EVERY = ("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode", "auto", "chain")


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the garbage collector: memory is freed only by the last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("method", EVERY)
def test_everything_is_free_at_once(fresh: Get, uncollected: None, method: str) -> None:
    made = fresh()
    ask(made, method=method, max_new_tokens=8)
    made.generate_batch([PROMPT, "The"], method=method, max_new_tokens=4)
    session = made.sessions._idle[0]
    held: list[Any] = [made.model, made.model.session, session.target]
    held += [part for draft in made._drafts.values() for part in (draft, draft.session)]
    watched = [weakref.ref(one) for one in (*held, made)]
    del held, session
    made.close()
    model, kernel, slot, *draft, engine = watched
    assert [one() for one in (model, kernel, *draft[: len(draft)])] == [None] * (2 + len(draft))
    assert made.kv_bytes() == 0
    del made
    assert engine() is None
    assert slot() is None or not vars(slot())  # a drafter may still name the slot: it is empty


def test_a_with_block_closes_it_and_results_stay(fresh: Get) -> None:
    with fresh() as made:
        with made.stream(PROMPT, method="ar", max_new_tokens=6, ignore_eos=True) as stream:
            next(stream)
        whole = ask(made, max_new_tokens=6)
    assert len(whole.tokens) == 6
    assert stream.result.tokens == whole.tokens[: len(stream.result.tokens)]
    made.close()  # again, for nothing


def test_use_after_close_is_refused(fresh: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))  # without what earlier engines proved
    made = fresh()
    conversation = made.conversation()
    made.close()
    for use in (
        lambda: made.generate(PROMPT),
        lambda: made.stream(PROMPT),
        lambda: made.generate_batch([PROMPT, PROMPT]),
        lambda: made.plain(),
        lambda: made.model,
    ):
        with pytest.raises(InvalidRequest, match=CLOSED) as error:
            use()
        assert error.value.hint == "load the bundle again"
    assert made.rows_exact() == (made.operators.kind == "stock")  # tried when it was opened, or never
    assert conversation.messages == []


@pytest.mark.parametrize("method", ["ar", "speculative", "auto"])
def test_a_running_stream_ends_with_an_error_and_keeps_its_text(fresh: Get, method: str) -> None:
    made = fresh()
    expected = ask(made, max_new_tokens=20).tokens
    stream = made.stream(PROMPT, method=method, max_new_tokens=20, ignore_eos=True, fallback=False)
    unread = made.stream(PROMPT, method=method)
    next(stream)
    made.close()
    with pytest.raises(InvalidRequest, match=CLOSED):
        next(stream)
    assert list(stream) == []
    written = stream.result
    assert written.finish == "cancelled"
    assert 0 < len(written.tokens) < 20
    assert written.tokens == expected[: len(written.tokens)]
    with pytest.raises(InvalidRequest, match=CLOSED):
        next(unread)
    unread.close()
    assert unread.result.tokens == []


def test_a_stream_of_another_thread_ends_too(fresh: Get) -> None:
    made, begun = fresh(), threading.Event()
    errors: list[Exception] = []

    def read() -> None:
        try:
            for _ in made.stream(PROMPT, method="ar", max_new_tokens=400, ignore_eos=True):
                begun.set()
        except InvalidRequest as error:
            errors.append(error)

    with made.lock:  # it cannot finish before the engine is closed
        thread = threading.Thread(target=read)
        stream = made.stream(PROMPT, method="ar", max_new_tokens=4, ignore_eos=True)
        thread.start()
        made.close()
    thread.join()
    assert not thread.is_alive()
    assert len(errors) == 1
    assert not begun.is_set()
    with pytest.raises(InvalidRequest, match=CLOSED):
        list(stream)
