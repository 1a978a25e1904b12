"""Conversations with models that keep states: a turn reads what is new, and writes what it writes from nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load

pytestmark = pytest.mark.usefixtures("native")
SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse by the sea. " * 4}
QUESTIONS = ("How long have you been there, and what did you see of the storm that came last night?", "And then?")
NAMES = ("lfm2_conv", "qwen3_5_delta")
KINDS = (*NAMES, "qwen3_next_dense", "olmo_hybrid_nope", "granite_hybrid_dense")


@pytest.fixture
def fresh(chatty: Callable[[str], Path], name: str) -> Callable[..., Engine]:
    """Return a function that loads a new engine over the bundle ``name``."""
    return lambda **how: load(chatty(name), threads=1, **how)


def answer(engine: Engine, talk: Any, question: str, method: str) -> tuple[list[int], int, int]:
    """(tokens written, tokens of the prompt, how many of them were not read again)."""
    result = talk.ask(question, max_new_tokens=40, ignore_eos=True, method=method)
    return result.tokens, result.stats.prompt_tokens, result.stats.reused_tokens


@pytest.mark.parametrize("method", ["ar", "ngram"])
@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_reads_what_is_new(fresh: Callable[..., Engine], think: bool, method: str) -> None:
    """``think``: the next prompt lacks the tokens that asked for the answer, so that the text goes back."""
    engine = fresh()
    talk = engine.conversation([SYSTEM], template_options={"think": think})
    _, length, reused = answer(engine, talk, QUESTIONS[0], method)
    assert reused == 0
    again = fresh().conversation([SYSTEM], template_options={"think": think})
    again.messages = list(talk.messages)
    written, whole, reused = answer(engine, talk, QUESTIONS[1], method)
    from_nothing = answer(engine, again, QUESTIONS[1], "ar")
    assert (written, whole) == from_nothing[:2]
    assert from_nothing[2] == 0
    asked = len(engine.codec.encode("assistant: think ", special=False))
    assert reused >= length - asked - 1
    other = engine.conversation([SYSTEM], template_options={"think": think})
    got = answer(engine, other, "Who are you?", method)
    system = len(engine.codec.chat([SYSTEM], generation_prompt=False))
    assert got[2] >= system
    assert got[0] == answer(engine, fresh().conversation(other.messages[:1], template_options={"think": think}),
                            "Who are you?", "ar")[0]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_system_prompt_serves_many_conversations(fresh: Callable[..., Engine], tmp_path: Path) -> None:
    fresh().conversation([SYSTEM]).save(tmp_path / "a.session")
    engine = fresh()
    messages = engine.restore_session(tmp_path / "a.session")
    system = len(engine.codec.chat([SYSTEM], generation_prompt=False))
    for question in QUESTIONS:
        tokens, _, reused = answer(engine, engine.conversation(messages), question, "ngram")
        assert reused >= system
        assert tokens == answer(engine, fresh().conversation([SYSTEM]), question, "ar")[0]


@pytest.mark.parametrize("name", KINDS)
def test_a_long_conversation_is_restored(fresh: Callable[..., Engine], tmp_path: Path) -> None:
    """It is longer than rows of states are kept: it continues as if without interruption, twice."""
    unbroken = fresh()
    talk = unbroken.conversation([SYSTEM])
    talk.ask(QUESTIONS[0], max_new_tokens=150, ignore_eos=True, method="ar")
    talk.save(tmp_path / "a.session")
    for question in QUESTIONS[1:] * 2:
        engine = fresh()
        restored = engine.conversation(engine.restore_session(tmp_path / "a.session"))
        assert restored.messages == talk.messages
        saved = len(engine.codec.chat(talk.messages, generation_prompt=False))
        assert saved > 300
        expected = answer(unbroken, talk, question, "ar")
        got = answer(engine, restored, question, "ngram")
        assert got[:2] == expected[:2]
        assert got[2] >= saved
        restored.save(tmp_path / "a.session")


@pytest.mark.parametrize("method", ["ar", "ngram"])
@pytest.mark.parametrize("name", KINDS)
def test_conversations_that_alternate(fresh: Callable[..., Engine], method: str) -> None:
    """The second one begins with the states after the system prompt; later turns continue from their own."""
    engine = fresh()
    system = len(engine.codec.chat([SYSTEM], generation_prompt=False))
    talks = [engine.conversation([SYSTEM]) for _ in range(2)]
    questions = [QUESTIONS, ("Who are you, and who was here before you came?", "Tell me more.")]
    last, asked = [0, 0], len(engine.codec.encode("assistant: ", special=False))
    for turn in range(2):
        for number, talk in enumerate(talks):
            again = fresh().conversation(list(talk.messages))
            tokens, length, reused = answer(engine, talk, questions[number][turn], method)
            assert tokens == answer(engine, again, questions[number][turn], "ar")[0]
            assert reused >= (last[number] if turn else system * number)
            last[number] = length - asked - 1
    assert len(engine.sessions.sessions) == 2


@pytest.mark.parametrize("name", KINDS)
def test_where_two_texts_part_a_third_goes_on(fresh: Callable[..., Engine]) -> None:
    """The end of no turn: states are kept there once it has been seen that texts have it in common."""
    engine, how = fresh(), Settings(method="ar", max_new_tokens=4, ignore_eos=True)
    shared = [5 + at * 7 % 100 for at in range(150)]
    texts = [[*shared, *([token] * 140)] for token in (120, 121, 122)]
    results = [engine.generate(text, how) for text in texts]
    assert [result.stats.reused_tokens for result in results] == [0, 0, len(shared)]
    assert results[2].tokens == fresh().generate(texts[2], how).tokens


@pytest.mark.parametrize("name", NAMES[1:])
def test_without_memory_for_them_the_prompt_is_read_again(fresh: Callable[..., Engine]) -> None:
    engine = fresh(budget="off")
    most = engine.memory_budget.admit("ar", 512, gamma=4, greedy=True, methods=["ar"]).checkpoints
    assert most == 4
    takes = engine.memory_budget.memory("ar")
    kept = takes.part("checkpoints").private
    assert kept > 0
    with_all = fresh(budget=takes.peak + (64 << 20)).memory_budget
    found = with_all.admit("ar", 512, gamma=4, greedy=True, methods=["ar"])
    assert found.checkpoints == 4
    assert with_all.limit is not None
    used = found.predicted - kept  # memory of a request without checkpoints
    with_all.limit = used + kept // 4
    assert with_all.admit("ar", 512, gamma=4, greedy=True, methods=["ar"]).checkpoints == 1
    with_all.limit = used
    assert with_all.admit("ar", 512, gamma=4, greedy=True, methods=["ar"]).checkpoints == 0
