"""The search for skip sets: what it finds, whom it believes, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.decoding.target import SkipSet
from edgespec.drafters.skip_search.search import OnlineSearch, Record
from edgespec.drafters.swift import StepCost
from tests.drafters.test_swift import FLAT, GOOD, LAYERS, START

# -- the search --------------------------------------------------------------------------------------------------------


def searched(seed: int, losses: Callable[[SkipSet], float], windows: int, layers: int = 12) -> OnlineSearch:
    """A search told the truth about acceptance, with the noise of 16 guesses."""
    odd = tuple(range(1, layers - 1, 2))
    search = OnlineSearch(layers, SkipSet(odd, odd), StepCost(0.03, 0.05), FLAT.v, seed)
    draw = np.random.default_rng(seed)
    for _ in range(windows):
        if search.stopped:
            break
        skip = search.ask()
        assert all(0 < layer < layers - 1 for layer in (*skip.attention, *skip.mlp))
        search.tell(skip, int(draw.binomial(16, np.exp(-losses(skip)))), 16)
    return search


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_a_planted_good_set(seed: int) -> None:
    def losses(skip: SkipSet) -> float:  # attention above layer 3 is free, everything else is dear
        return (
            0.005 * sum(i > 3 for i in skip.attention)
            + 0.2 * sum(i <= 3 for i in skip.attention)
            + 0.15 * len(skip.mlp)
        )

    search = searched(seed, losses, 250)

    def truth(skip: SkipSet) -> float:
        return search.speed(skip, float(np.exp(-losses(skip))))

    planted = truth(SkipSet(tuple(range(4, 11))))
    assert truth(search.best) > 0.92 * planted
    assert truth(search.best) > 1.1 * truth(search.initial)


def test_the_initial_set_is_scored_first_and_leads_until_another_is_confirmed() -> None:
    search = OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)
    assert search.ask() == START
    assert not search.tell(START, 12, 16)
    assert search.candidates == 0
    other = search.ask()
    assert other != START
    assert search.candidates == 1
    assert not search.tell(other, 16, 16)  # better, but seen once
    assert search.speed(other) > search.speed(START)
    assert search.best == START
    assert search.ask() == other
    assert search.tell(other, 16, 16)
    assert search.best == other
    third = search.ask()
    assert not search.tell(third, 0, 16)
    assert search.best == other


def test_what_led_is_scored_again_and_may_lose_its_lead() -> None:
    search = OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)
    search.tell(search.ask(), 16, 16)
    search.tell(START, 16, 16)
    search.records[GOOD] = Record(30, 32, 2)
    asked = []
    for _ in range(40):
        asked.append(skip := search.ask())
        search.tell(skip, 4, 16)  # the text has changed: nothing that was good is
        if search.best == GOOD:
            break
    assert START in asked
    assert search.best == GOOD


def test_the_search_ends() -> None:
    search = searched(1, lambda skip: 0.5 * len(skip), 5000)
    assert search.stopped.startswith("no better set")
    assert 50 < search.candidates <= 1000
    assert OnlineSearch(2, SkipSet(), StepCost(0.1, 0.1), FLAT.v).stopped
    assert len(search.records) <= 65


def test_what_others_have_seen_is_taken_over_up_to_an_end() -> None:
    found, others = searched(1, lambda skip: 0.5 * len(skip), 60), searched(2, lambda skip: 0.5 * len(skip), 60)
    best = others.best
    found.resume(others.records)
    assert len(found.records) <= 65
    assert {best, found.initial} <= found.records.keys()


def test_old_evidence_fades() -> None:
    record = Record()
    for _ in range(100):
        record.add(16, 16)
    assert record.seen <= 256
    for _ in range(32):
        record.add(0, 16)
    assert record.acceptance(0.5) < 0.2


def test_a_tiny_model_can_be_searched_through() -> None:
    search = searched(0, lambda skip: 0.1 * len(skip), 60, layers=3)
    assert search.records.keys() == {SkipSet((1,), (1,)), SkipSet((1,)), SkipSet((), (1,))}
