"""A conditioned drafter's cache: what it keeps of a text, when it reads it, and its inputs, over a toy target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.policy import Ask, Outcome, Policy
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.drafters.draft_cache import FIRST_ROWS, InputRows
from edgespec.drafters.hidden_state import MOST_OWED, ROUND, HiddenStateDrafter
from tests.support.toy import naive_distribution, plain
from tests.support.toy_drafter import (
    HIDDEN,
    TAPS,
    VOCAB,
    TappedToy,
    ToySlot,
    block_guesses,
    embedded,
    likely,
    named,
    rounds,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 8]


def made(branch: tuple[int, ...] | None = None) -> tuple[TappedToy, Any, HiddenStateDrafter]:
    target, slot = TappedToy(), ToySlot()
    return target, slot, HiddenStateDrafter(target, slot, branch=branch)  # type: ignore[arg-type]


def entries(text: list[int], count: int) -> list[list[float]]:
    """Return the first ``count`` rows by definition: row i has token i + 1 of ``text`` and the states at token i."""
    return [[*embedded(text[i + 1]), *named(text[: i + 1], "tap", TAPS)] for i in range(count)]


@pytest.mark.parametrize("branch", [None, (3,), (2, 2, 1)])
def test_after_every_round_entries_are_the_texts(branch: tuple[int, ...] | None) -> None:
    """They match everything that was known when it drafted, for any accepted branch of a tree."""
    target, slot, drafter = made(branch)
    text, jumps, known, stats = list(PROMPT), 0, 0, Stats()
    for done in decode(target, drafter, PROMPT, DecodeOptions(max_new_tokens=60), stats):
        known = len(text) if done.drafted else known
        text += done.tokens
        jumps += list(done.path) != list(range(len(done.path)))
        held = [row.tolist() for row in slot.held[: len(slot.tokens)]]
        assert held == entries(text, known - 1)
    assert stats.dropped_reason is None
    assert text == PROMPT + plain(likely, VOCAB, PROMPT, 60)
    assert 0 < stats.accepted < stats.drafted
    assert (jumps > 2) == (branch is not None)
    assert slot.strange == []


class Resting(Policy):
    """Asks in the first rounds, and once after ``rest`` others; checks that this took no more than usual."""

    def __init__(self, drafter: HiddenStateDrafter, rest: int, before: int = 0) -> None:
        super().__init__([drafter])
        self.before, self.rest, self.round, self.found = before, rest, -1, list[bool]()

    def choose(self, tokens: list[int], budget: int) -> Sequence[Ask]:
        self.round += 1
        if self.round >= self.before and self.round != self.before + self.rest:
            return []
        return super().choose(tokens, budget)

    def told(self, outcome: Outcome) -> None:
        super().told(outcome)
        self.found += [ask.drafter.caught_up for ask, _ in outcome.took]


def test_what_is_owed_does_not_grow_while_nothing_is_guessed() -> None:
    """It is read now and then, in few passes."""
    target, slot, drafter = made()
    length, most = len(PROMPT), 0
    slot.passes.clear()
    for done in decode(target, Resting(drafter, 999), PROMPT, DecodeOptions(max_new_tokens=400), Stats()):
        length += len(done.tokens)
        most = max(most, length - len(slot.tokens))
    assert MOST_OWED <= most <= MOST_OWED + MOST_OWED // 4 + 2
    assert 400 // (MOST_OWED + MOST_OWED // 4) <= len(slot.passes) <= 400 // MOST_OWED + 2


@pytest.mark.parametrize("rest", [0, ROUND - 2, ROUND - 1, ROUND, 3 * MOST_OWED])
def test_a_round_after_a_rest_is_not_timed(rest: int) -> None:
    """Where it has more to read than rounds bring: a row of the prompt, and one of each round."""
    target, slot, drafter = made()
    text, resting = list(PROMPT), Resting(drafter, rest)
    for done in rounds(target, resting, PROMPT, rest + 8):
        text += done.tokens
    first = next(size for what, size, recycled, _ in slot.passes if what == "given" and not recycled)
    assert first == rest + 1 if rest <= ROUND else first <= MOST_OWED + MOST_OWED // 4
    assert resting.found == [first <= ROUND]
    held = [row.tolist() for row in slot.held[: len(slot.tokens)]]
    assert held == entries(text, len(held))


@pytest.mark.parametrize("rest", [1, ROUND, 2 * MOST_OWED])
def test_entries_after_a_rest_are_the_texts(rest: int) -> None:
    """Tokens that it missed are appended after the last round's entries."""
    target, slot, drafter = made()
    text, resting = list(PROMPT), Resting(drafter, rest, 4)
    for done in decode(target, resting, PROMPT, DecodeOptions(max_new_tokens=rest + 40), Stats()):
        text += done.tokens
        held = [row.tolist() for row in slot.held[: len(slot.tokens)]]
        assert held == entries(text, len(held))
    assert len(resting.found) == 5


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_prompt_is_read_as_it_comes(chunk: int) -> None:
    """All except its last row, which the first pass of a round reads."""
    target, slot, drafter = made()
    target.chunk = chunk
    assert drafter.begin(DraftRequest(PROMPT)) == 0
    read = 0

    def sink(first: int, taps: Any) -> None:
        nonlocal read
        assert first == read
        drafter.absorb(first, taps)
        read += len(taps)
        assert len(slot.tokens) == read - 1

    for output in target.read(PROMPT[:-1], aux_hidden=True):
        assert output.aux_hidden is not None
        sink(len(target.tokens) - len(output.aux_hidden), output.aux_hidden)
    assert [row.tolist() for row in slot.held] == entries(PROMPT, 8)


@pytest.mark.parametrize("branch", [None, (2,)])
def test_rows_that_need_not_be_read_again(branch: tuple[int, ...] | None) -> None:
    """Entry i belongs to tokens i and i + 1; the last one of a prompt is left to the first round.

    States of tokens that were appended without an entry are still there, if no entry before them was taken back.
    """
    text = PROMPT + plain(likely, VOCAB, PROMPT, 20)
    others = [text, text[:-1], text[:20], [*text[:15], 10, 10, 7], [*text, 5, 6], [7, *text[1:]], text[:1], text[:2]]
    for other in others:
        target, slot, drafter = made(branch)
        rounds(target, drafter, PROMPT, 20)
        held = len(slot.tokens)
        same = next(
            (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
        )
        kept = sum(i + 1 < same for i in range(min(held, max(len(other) - 2, 0))))
        known = min(same, len(other) - 1, len(text) - 1)
        assert drafter.begin(DraftRequest(other)) == (max(kept, known) if kept == held else kept)
        assert len(slot.tokens) == kept
        found = rounds(target, drafter, other, 9)
        assert [t for done in found for t in done.tokens] == plain(likely, VOCAB, other, 9)
        whole = other + [t for done in found for t in done.tokens]
        assert [row.tolist() for row in slot.held[: len(slot.tokens)]] == entries(whole, len(slot.tokens))


def test_steps_that_are_timed_are_those_of_rounds() -> None:
    """They have as many rows, over as long a text, and none is kept."""
    target, slot, drafter = made()
    rounds(target, drafter, PROMPT, 60)
    seen, held = set(slot.passes), len(slot.tokens)
    slot.passes.clear()
    assert drafter.benchmark_step()
    assert drafter.benchmark_step(first=True)
    assert slot.passes == [("given", 1, True, True), ("given", FIRST_ROWS, False, True)]
    assert set(slot.passes) <= seen
    assert len(slot.tokens) == held


def test_embeddings_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _, drafter = made()
    rounds(target, drafter, PROMPT, 60)
    assert len(target.asked) == len(set(target.asked)) <= VOCAB
    assert np.isin(PROMPT[1:], target.asked).all()


def test_rows_of_other_texts_have_other_names() -> None:
    """The first row depends on two tokens; a row of a block's drafter only on its own."""
    text = [3, 1, 4, 1]
    for made_one, count in ((made, 3), (made_blocks, 4)):
        cache = made_one()[2].cache
        names = cache.names(text)
        assert len(names) == count
        for at in range(4):
            other = cache.names([*text[:at], 9, *text[at + 1 :]])
            assert [i for i, (a, b) in enumerate(zip(names, other, strict=True)) if a != b] == [max(at + count - 4, 0)]
        assert cache.names([]) == []


COLUMNS = HIDDEN + 4


def test_rows_are_embeddings_and_what_stands_beside_them() -> None:
    """They follow the order of the tokens, also for repeated ones; missing states are zeros."""
    target = TappedToy()
    given = InputRows(target, COLUMNS, HIDDEN)
    for tokens in ([4, 1, 4], [7], [1, 7, 2, 1]):
        for width in (0, 1, 4):
            state = np.random.default_rng(width).standard_normal((len(tokens), width)).astype(np.float32)
            expected = [[*embedded(token), *row, *[0] * (4 - width)] for token, row in zip(tokens, state, strict=True)]
            found = given(tokens, state)
            assert found.dtype == np.float32
            assert found.tolist() == np.array(expected, np.float32).tolist()
    assert sorted(target.asked) == [1, 2, 4, 7]  # each once


def test_one_state_beside_all_rows() -> None:
    state = np.array([[5, 6]], np.float32)
    assert InputRows(TappedToy(), COLUMNS, HIDDEN)([4, 1], state)[:, HIDDEN:].tolist() == [[5, 6, 0, 0]] * 2


def test_embeddings_that_are_kept_take_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for five, no more are kept, and a dropped one is computed again when needed."""
    monkeypatch.setattr("edgespec.drafters.draft_cache.EMBEDDING_BYTES", 5 * HIDDEN * 4)
    target = TappedToy()
    given, state = InputRows(target, HIDDEN, HIDDEN), np.zeros((1, 0), np.float32)
    for tokens in ([0, 1, 2], [3], [0], [4], [0], [5], [6, 7], [0, 5]):
        assert given(tokens, state).tolist() == [embedded(token).tolist() for token in tokens]
        assert len(given._token_embeddings) <= 5
    assert target.asked == [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 5]


# -- blocks ------------------------------------------------------------------------------------------------------------

BLOCK = 5


def made_blocks(known: list[int] | None = None) -> tuple[TappedToy, Any, HiddenStateDrafter]:
    target, slot = TappedToy(), ToySlot(BLOCK, known)
    return target, slot, HiddenStateDrafter(target, slot)  # type: ignore[arg-type]


def proposed(known: list[int] | None, params: SamplingParams, budget: int) -> Proposal:
    """Prefill a block drafter with the prompt; return the proposal of its first round, of up to ``budget`` tokens."""
    target, _, drafter = made_blocks(known)
    drafter.begin(DraftRequest(PROMPT, params, Noise(params.seed)))
    for output in target.read(PROMPT[:-1], aux_hidden=True):
        assert output.aux_hidden is not None
        drafter.absorb(len(target.tokens) - len(output.aux_hidden), output.aux_hidden)
    return drafter.propose(PROMPT, budget)


@pytest.mark.parametrize("known", [None, [0, 2, 5, 6, 10]])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=4.0),
        SamplingParams(logit_bias={5: 2.0}),
        SamplingParams(temperature=1.4, top_p=0.9, seed=2),
        SamplingParams(temperature=1.4, acceptance="coupled", seed=2),
    ],
    ids=["greedy", "penalised", "biased", "drawn", "coupled"],
)
@pytest.mark.parametrize("budget", [1, 3, 9])
def test_each_guess_is_of_its_own_row(known: list[int] | None, params: SamplingParams, budget: int) -> None:
    """It is one of the tokens that the LM head scores, under the request's rules."""
    found = proposed(known, params, budget)
    assert len(found) == min(budget, BLOCK - 1)
    assert (found.probs is not None) == (params.temperature > 0 and params.acceptance == "rejection")
    text = list(PROMPT)
    for at, guess in enumerate(found.tokens.tolist()):
        row = np.full(VOCAB, -np.inf)
        columns = list(range(VOCAB)) if known is None else known
        row[columns] = block_guesses(PROMPT[-1], at + 1)[columns]
        chances = naive_distribution(row.tolist(), params, text)
        if found.probs is not None:
            np.testing.assert_allclose(found.probs[at], chances, atol=1e-6)
        assert chances[guess] > 0
        text.append(guess)


def test_after_every_round_entries_are_what_was_tapped() -> None:
    target, slot, drafter = made_blocks()
    text, known = list(PROMPT), 0
    for done in decode(target, drafter, PROMPT, DecodeOptions(max_new_tokens=60), Stats()):
        known = len(text) if done.drafted else known
        text += done.tokens
        held = [row.tolist() for row in slot.held[: len(slot.tokens)]]
        assert held == [[*[0] * HIDDEN, *named(text[: i + 1], "tap", TAPS)] for i in range(known - 1)]
    assert {best for what, _, _, best in slot.passes if what == "block"} == {True}  # no logits if nothing is sampled


def test_steps_that_are_timed_are_those_of_rounds_of_blocks() -> None:
    """A block has its trained size, and follows rows of accepted tokens; none is kept."""
    target, slot, drafter = made_blocks()
    rounds(target, drafter, PROMPT, 60, gamma=9)
    held = len(slot.tokens)
    slot.passes.clear()
    whole = "block", BLOCK, True, True
    assert drafter.benchmark_step()
    assert slot.passes == [whole]
    assert drafter.benchmark_step(first=True)
    assert slot.passes == [whole, ("absorb", FIRST_ROWS, False, False), whole]
    assert len(slot.tokens) == held
    assert drafter.steps_at_once
