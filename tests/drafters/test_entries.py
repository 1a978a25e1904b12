"""What a drafter conditioned on a target keeps of a text, and when it reads it, row by row over a toy target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest, Wrapper
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.stats import Stats
from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.drafters.hidden_state import MOST_OWED, ROUND, HiddenStateDrafter
from tests.support.toy import plain
from tests.support.toy_drafter import TAPS, VOCAB, TappedToy, ToySlot, embedded, likely, named, rounds

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 8]


def made(branch: tuple[int, ...] | None = None) -> tuple[TappedToy, Any, HiddenStateDrafter]:
    target, slot = TappedToy(), ToySlot()
    return target, slot, HiddenStateDrafter(target, slot, branch=branch)  # type: ignore[arg-type]


def entries(text: list[int], count: int) -> list[list[float]]:
    """The first so many, by their definition: of token i + 1, and of what is tapped at token i."""
    return [[*embedded(text[i + 1]), *named(text[: i + 1], "tap", TAPS)] for i in range(count)]


@pytest.mark.parametrize("branch", [None, (3,), (2, 2, 1)])
def test_after_every_round_entries_are_the_texts(branch: tuple[int, ...] | None) -> None:
    """Of all that was known when it guessed, whichever branch of a tree was accepted before."""
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


class Resting(Wrapper):
    """Guesses in the first rounds, and once after so many others; notes whether that took no more than usual."""

    def __init__(self, inside: HiddenStateDrafter, rest: int, before: int = 0) -> None:
        super().__init__([inside])
        self.before, self.rest, self.round, self.found = before, rest, -1, list[bool]()

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        self.round += 1
        if self.round >= self.before and self.round != self.before + self.rest:
            return EMPTY
        found = self.inside[0].propose(tokens, budget)
        self.found.append(self.inside[0].caught_up)
        return found


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
    """What was read in the meantime goes on from what the last guesses left."""
    target, slot, drafter = made()
    text, resting = list(PROMPT), Resting(drafter, rest, 4)
    for done in decode(target, resting, PROMPT, DecodeOptions(max_new_tokens=rest + 40), Stats()):
        text += done.tokens
        held = [row.tolist() for row in slot.held[: len(slot.tokens)]]
        assert held == entries(text, len(held))
    assert len(resting.found) == 5


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_prompt_is_read_as_it_comes(chunk: int) -> None:
    """All but its last row, which is the first pass of a round's."""
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

    target.tap_sink = sink
    target.prefill(PROMPT[:-1])
    assert [row.tolist() for row in slot.held] == entries(PROMPT, 8)


@pytest.mark.parametrize("branch", [None, (2,)])
def test_rows_that_need_not_be_read_again(branch: tuple[int, ...] | None) -> None:
    """Entry i is of tokens i and i + 1; the last one of a prompt is left to the first round."""
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
        assert drafter.begin(DraftRequest(other)) == kept == len(slot.tokens)
        found = rounds(target, drafter, other, 9)
        assert [t for done in found for t in done.tokens] == plain(likely, VOCAB, other, 9)
        whole = other + [t for done in found for t in done.tokens]
        assert [row.tolist() for row in slot.held[: len(slot.tokens)]] == entries(whole, len(slot.tokens))


def test_steps_that_are_timed_are_those_of_rounds() -> None:
    """As many rows, of as much; and nothing of them is kept."""
    target, slot, drafter = made()
    rounds(target, drafter, PROMPT, 60)
    seen, held = set(slot.passes), len(slot.tokens)
    slot.passes.clear()
    assert drafter.dry_step()
    assert drafter.dry_step(first=True)
    assert slot.passes == [("given", 1, True, True), ("given", FIRST_ROWS, False, True)]
    assert set(slot.passes) <= seen
    assert len(slot.tokens) == held


def test_embeddings_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _, drafter = made()
    rounds(target, drafter, PROMPT, 60)
    assert len(target.asked) == len(set(target.asked)) <= VOCAB
    assert np.isin(PROMPT[1:], target.asked).all()
