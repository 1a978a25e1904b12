"""Guesses of a block are drawn from their own rows; what is timed of it is what a round runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.drafters.hidden_state import HiddenStateDrafter
from tests.support.toy import naive_distribution
from tests.support.toy_drafter import HIDDEN, TAPS, VOCAB, TappedToy, ToySlot, block_guesses, named, rounds

PROMPT, BLOCK = [3, 1, 4, 1, 5, 9, 2, 6, 5, 8], 5


def made(known: list[int] | None = None) -> tuple[TappedToy, Any, HiddenStateDrafter]:
    target, slot = TappedToy(), ToySlot(BLOCK, known)
    return target, slot, HiddenStateDrafter(target, slot)  # type: ignore[arg-type]


def proposed(known: list[int] | None, params: SamplingParams, budget: int) -> Proposal:
    """A first round's."""
    target, _, drafter = made(known)
    drafter.begin(DraftRequest(PROMPT, params, Noise(params.seed)))
    target.tap_sink = drafter.absorb
    target.prefill(PROMPT[:-1])
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
    """Of the tokens that the LM head scores, under the request's rules."""
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
    target, slot, drafter = made()
    text, known = list(PROMPT), 0
    for done in decode(target, drafter, PROMPT, DecodeOptions(max_new_tokens=60), Stats()):
        known = len(text) if done.drafted else known
        text += done.tokens
        held = [row.tolist() for row in slot.held[: len(slot.tokens)]]
        assert held == [[*[0] * HIDDEN, *named(text[: i + 1], "tap", TAPS)] for i in range(known - 1)]
    assert {best for what, _, _, best in slot.passes if what == "block"} == {True}  # no logits where nothing is drawn


def test_steps_that_are_timed_are_those_of_rounds() -> None:
    """A block as it was trained, after rows of what was accepted; nothing is kept of them."""
    target, slot, drafter = made()
    rounds(target, drafter, PROMPT, 60, gamma=9)
    held = len(slot.tokens)
    slot.passes.clear()
    whole = "block", BLOCK, True, True
    assert drafter.dry_step()
    assert slot.passes == [whole]
    assert drafter.dry_step(first=True)
    assert slot.passes == [whole, ("absorb", FIRST_ROWS, False, False), whole]
    assert len(slot.tokens) == held
    assert drafter.steps_at_once
