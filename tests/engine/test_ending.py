"""Every way to end a text, and what stays of it for the next request."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.engine.result import Chunk
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.conftest import PROMPTS
from tests.support import hf
from tests.support.requests import METHODS, NEW, PROMPT, Get, ask


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_new_tokens_is_kept_exactly(engine: Get, method: str, count: int) -> None:
    made = engine()
    result = ask(made, method=method, max_new_tokens=count, fallback=False)
    assert result.finish == "length"
    assert result.tokens == ask(made).tokens[:count]
    assert result.stats.tokens == count


@pytest.mark.parametrize("method", METHODS)
def test_eos_ends_the_text_even_inside_an_accepted_draft(fresh: Get, method: str) -> None:
    made = fresh()
    plain = ask(made).tokens
    for token in dict.fromkeys(plain[3:30:4]):
        made.eos = frozenset({token})
        result = ask(made, method=method, ignore_eos=False, fallback=False)
        assert result.finish == "eos"
        assert result.tokens == plain[: plain.index(token) + 1]
        assert ask(made, method=method, ignore_eos=True).tokens == plain
        assert (
            ask(made, [*made.codec.encode(PROMPT), *result.tokens], method=method, max_new_tokens=5).tokens
            == (plain[len(result.tokens) : len(result.tokens) + 5])
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(engine: Get, method: str) -> None:
    made = engine()
    plain = ask(made)
    for start, length in ((4, 3), (20, 7), (31, 1)):
        stop = plain.text[start : start + length]
        assert len(stop) == length
        result = ask(made, method=method, stop=stop, fallback=False)
        assert result.finish == "stop"
        assert result.text == plain.text[: plain.text.index(stop)]
        assert result.tokens == plain.tokens[: len(result.tokens)]
        assert stop in made.codec.decode(made.codec.encode(PROMPT) + result.tokens)
    both = ask(made, method=method, stop=("never to be found", plain.text[20:27], plain.text[10:14]))
    assert both.text == plain.text[: min(plain.text.index(plain.text[20:27]), plain.text.index(plain.text[10:14]))]
    assert ask(made, method=method, stop=("never to be found",)).text == plain.text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("context, left", [(70, 20), (None, 5)])  # None = the model's own limit
def test_the_context_ends_the_text(fresh: Get, method: str, context: int | None, left: int) -> None:
    made = fresh(context=context)
    prompt = (made.codec.encode(PROMPTS[18]) * 40)[: made.context - left]
    result = ask(made, prompt, method=method, max_new_tokens=500, fallback=False)
    assert (result.finish, len(result.tokens)) == ("context", left)
    assert result.tokens == ask(fresh(), prompt, max_new_tokens=left).tokens


def test_cancel_ends_after_the_round_at_hand(engine: Get) -> None:
    made, event = engine(), threading.Event()
    expected = ask(made).tokens
    seen: list[Chunk] = []

    def hear(chunk: Chunk) -> None:
        seen.append(chunk)
        if len(seen) == 3:
            event.set()

    result = made.generate(PROMPT, method="ar", max_new_tokens=NEW, ignore_eos=True, on_chunk=hear, cancel=event)
    assert result.finish == "cancelled"
    assert result.tokens == expected[:3]
    assert "".join(chunk.text for chunk in seen) == result.text
    before = made.generate(PROMPT, cancel=event)
    assert (before.tokens, before.text, before.finish) == ([], "", "cancelled")
    stream = made.stream(PROMPT, method="speculative", max_new_tokens=NEW, ignore_eos=True)
    next(stream)
    stream.cancel()
    assert all(chunk.round is None for chunk in stream)  # nothing but text that was held back
    assert stream.result.finish == "cancelled"
    assert stream.result.tokens == expected[: len(stream.result.tokens)]


def test_a_draft_with_less_context_than_its_target(tmp_path: Path) -> None:
    """It drafts up to its own context; then the target continues without it."""
    config = hf.CONFIGS["llama_tied_gqa"]
    target = hf.write_checkpoint(tmp_path / "target", config, 3)
    draft = hf.write_checkpoint(tmp_path / "draft", {**config, "max_position_embeddings": 64}, 3)
    export_model(
        ExportOptions(str(target), tmp_path / "b", ["speculative"], "fp32", draft=str(draft), threads=1), golden=False
    )
    made = load(tmp_path / "b", threads=1)
    result = ask(made, [5, 6, 7], method="speculative", adaptive=False, max_new_tokens=120)
    assert result.tokens == ask(made, [5, 6, 7], max_new_tokens=120).tokens
    assert result.stats.dropped_reason is None
    assert 0 < result.stats.accepted < 64


@pytest.mark.parametrize("method", METHODS)
def test_a_second_turn_recomputes_nothing(fresh: Get, method: str) -> None:
    made = fresh()
    prompt = made.codec.encode(PROMPT)
    first = ask(made, prompt, method=method)
    assert first.stats.reused_tokens == 0
    turn = [*prompt, *first.tokens, *made.codec.encode("\n\nQUEEN:\n")]
    second = ask(made, turn, method=method)
    assert second.stats.prompt_tokens == len(turn)
    assert second.stats.reused_tokens == len(prompt) + len(first.tokens) - 1
    alone = ask(fresh(), turn, method=method)
    assert alone.stats.reused_tokens == 0
    assert second.tokens == alone.tokens
    again = ask(made, prompt, method="ar")  # back to the first turn: the longer cache is cropped
    assert again.stats.reused_tokens == len(prompt) - 1
    assert again.tokens == first.tokens


@pytest.mark.parametrize("method", METHODS)
def test_a_closed_stream_leaves_a_sound_engine(fresh: Get, method: str) -> None:
    made = fresh()
    expected, other = ask(made, method="ar").tokens, ask(fresh(), PROMPTS[3]).tokens
    for rounds in range(4):
        stream = made.stream(PROMPT, method=method, max_new_tokens=NEW, ignore_eos=True, fallback=False)
        for _ in range(rounds):
            next(stream)
        stream.close()
        written = stream.result
        assert written.finish == "cancelled"
        assert written.tokens == expected[: len(written.tokens)]
        assert len(written.tokens) >= rounds
        assert not made.sessions._busy
        assert ask(made, method=method).tokens == expected
        assert ask(made, PROMPTS[3], method=method).tokens == other
