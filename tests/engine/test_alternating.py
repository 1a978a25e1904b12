"""Alternating conversations: each reuses its own state, and generates the same text as without the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.batch import RunningBatch
from edgespec.engine.engine import Engine
from edgespec.engine.pool import MOST_IDLE
from edgespec.engine.request import Request
from edgespec.engine.stream import Stream
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS

Fresh = Callable[..., Engine]
METHODS = ("ar", "ngram", "speculative", "self-spec", "swift", "medusa", "blockwise", "paradecode", "chain", "auto")
HOW: dict[str, dict[str, Any]] = {"chain": {"proposers": ("ngram", "speculative")}}
NEW = 24
NATIVE = pytest.mark.parametrize("operators", OPERATORS[1:], indirect=True)


def text(number: int, length: int) -> list[int]:
    """Return the tokens of a distinct conversation."""
    return [5 + (at * (number + 3) + number * 97) % 900 for at in range(length)]


class Talk:
    """A conversation of tokens: every prompt is the whole conversation so far, and some more tokens."""

    def __init__(self, number: int, length: int = 200, shared: Sequence[int] = ()) -> None:
        self.prompt, self.number, self.turns = [*shared, *text(number, length)], number, 0
        self.said: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.exact: list[bool] = []

    def take(self, tokens: Sequence[int], exact: bool = True) -> None:
        """Note ``tokens`` as the answer, and append it and the next question to the prompt."""
        self.prompts.append(list(self.prompt))
        self.said.append(list(tokens))
        self.exact.append(exact)
        self.turns += 1
        self.prompt += [*tokens, *text(50 + self.number + self.turns, 11)]

    def ask(self, engine: Engine, **how: Any) -> int:
        """Ask; returns how many tokens of the prompt were not read again."""
        result = engine.generate(self.prompt, max_new_tokens=NEW, ignore_eos=True, **how)
        assert result.stats.dropped_reason is None
        # the clock may choose a tree, whose rows stock operators add up in another order
        self.take(result.tokens, exact=result.stats.exact or engine.operators.kind == "native")
        return result.stats.reused_tokens

    def held(self) -> int:
        """Count the tokens that were computed so far: all except the pending one."""
        return len(self.prompts[-1]) + len(self.said[-1]) - 1

    def check(self, plain: Engine) -> None:
        """Check that ``plain`` writes every answer again, by plain decoding with nothing cached."""
        for prompt, said, exact in zip(self.prompts, self.said, self.exact, strict=True):
            plain.sessions.clear()
            found = plain.generate(prompt, max_new_tokens=NEW, ignore_eos=True, method="ar")
            assert found.stats.reused_tokens == 0
            assert found.tokens == said or not exact


@pytest.mark.parametrize("method", METHODS)
def test_two_conversations_read_only_what_is_new(
    fresh: Fresh, method: str, prefills: list[tuple[Slot, list[int]]]
) -> None:
    """The target's cache is there, and so are those of a draft: neither reads the text of the other conversation."""
    engine, talks = fresh(), [Talk(1), Talk(2)]
    how = {"method": method, "fallback": False, **HOW.get(method, {})}
    assert [talk.ask(engine, **how) for talk in talks] == [0, 0]
    prefills.clear()
    for _ in range(2):
        for talk in talks:
            held = talk.held()
            assert talk.ask(engine, **how) == held
    assert max((len(tokens) for _, tokens in prefills), default=0) < 50  # of 235 and more
    for talk in talks:
        talk.check(engine)


@NATIVE
@pytest.mark.parametrize("method", ["ar", "speculative", "ngram"])
def test_in_a_batch_that_runs_on(fresh: Fresh, method: str) -> None:
    engine, talks = fresh(), [Talk(1), Talk(2), Talk(3)]
    batch, settings = RunningBatch(engine, 4), Settings(method=method, max_new_tokens=NEW, ignore_eos=True)
    for turn in range(3):
        for talk in talks:
            stream = batch.join(talk.prompt, settings)
            while batch.requests:
                for _, got in batch.round():
                    assert not isinstance(got, Exception)
            assert stream.result.stats.reused_tokens == (talk.held() if turn else 0)
            talk.take(stream.result.tokens)
    for talk in talks:
        talk.check(engine)
    batch.close()


def test_what_all_begin_with_is_read_once(fresh: Fresh) -> None:
    """A system prompt is copied into the session of a new conversation; the others keep theirs."""
    engine, shared = fresh(), text(7, 300)
    talks = [Talk(number, 60, shared) for number in range(MOST_IDLE)]
    assert [talk.ask(engine, method="speculative") for talk in talks] == [0] + [300] * (MOST_IDLE - 1)
    for talk in talks:
        held = talk.held()
        assert talk.ask(engine, method="speculative") == held
    plain = fresh()
    for talk in talks:
        talk.check(plain)


def test_the_one_not_used_for_longest_gives_way(fresh: Fresh) -> None:
    engine, talks = fresh(), [Talk(number) for number in range(MOST_IDLE + 1)]
    assert [talk.ask(engine, method="ar") for talk in talks[:MOST_IDLE]] == [0] * MOST_IDLE
    assert talks[0].ask(engine, method="ar") > 200
    assert talks[MOST_IDLE].ask(engine, method="ar") == 0
    kept = [talk.ask(engine, method="ar") > 200 for talk in [talks[0], *talks[2:]]]
    assert kept == [True] * MOST_IDLE
    assert talks[1].ask(engine, method="ar") == 0
    assert len(engine.sessions.sessions) == MOST_IDLE


def test_another_try_and_another_ending_stay_in_their_session(fresh: Fresh) -> None:
    """The answer is left out of the next prompt, as by templates that keep no thoughts: it is no other conversation."""
    engine = fresh()
    prompt = text(1, 300)
    engine.generate(prompt, method="ar", max_new_tokens=200, ignore_eos=True)
    for end in ([], text(3, 20)):
        result = engine.generate([*prompt, *end], method="ar", max_new_tokens=NEW)
        assert result.stats.reused_tokens == len(prompt) - (not end)
    assert len(engine.sessions.sessions) == 1


@pytest.mark.parametrize("operators", OPERATORS[:1], indirect=True)
def test_other_owners_texts_are_neither_taken_up_nor_lent(fresh: Fresh) -> None:
    engine, prompt = fresh(), text(1, 200)
    settings, found = Settings(method="ar", max_new_tokens=4, ignore_eos=True), list[int]()
    for owner in ("a", "b", "a", None, "b"):
        stream = Stream(Request(engine, prompt, settings, owner=owner))
        for _ in stream:
            pass
        found.append(stream.result.stats.reused_tokens)
    assert found == [0, 0, 199, 0, 199]


def test_what_is_learned_belongs_to_the_engine(fresh: Fresh) -> None:
    """All sessions add to it, existing and new ones."""
    engine, talks = fresh(), [Talk(1), Talk(2), Talk(3)]
    assert [talk.ask(engine, method="ar") for talk in talks[:2]] == [0, 0]
    for talk in talks:
        talk.ask(engine, method="speculative")
    assert len(engine.sessions.sessions) == 3
    (learned,) = engine.experience.methods.values()
    assert learned.priced.plain_ms
    assert learned.evidence


@pytest.mark.parametrize("operators", OPERATORS[:1], indirect=True)
def test_what_is_counted_is_what_is_taken(fresh: Fresh) -> None:
    """Memory is counted with the session that the request then has."""
    engine = fresh()
    for number, length in ((1, 600), (2, 100), (3, 300)):
        Talk(number, length).ask(engine, method="ar")
    pool = engine.sessions
    for prompt in ([*text(1, 600), 7], [*text(2, 100), 7], text(3, 300), text(9, 50), text(2, 10)):
        expected = pool.match(prompt).kv_bytes
        before = len(pool.sessions)
        session = pool.take(prompt)
        assert expected == (session.kv_bytes if len(pool.sessions) == before else 0)
        pool.give_back(session)
