"""The search for skip sets: what it finds, whom it believes, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.decoding.target import SkipSet
from edgespec.drafters.skip_sets import OnlineSearch, Record
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


# -- its arithmetic, computed again ------------------------------------------------------------------------------------

INNER = LAYERS - 2
SINGLES = [*(SkipSet((layer,)) for layer in range(1, LAYERS - 1)), *(SkipSet((), (i,)) for i in range(1, LAYERS - 1))]


def test_a_record_counts_and_forgets() -> None:
    record = Record()
    record.add(3, 8)
    assert (record.matched, record.seen, record.windows) == (3, 8, 1)
    assert record.acceptance(0.5) == (3 + 8 * 0.5) / (8 + 8)  # the prior counts as eight guesses
    record = Record(50, 100, 2)
    record.add(150, 200)  # 256 are remembered: 56 of the old hundred
    assert [record.matched, record.seen, record.windows] == pytest.approx([178, 256, 3])
    record.add(1, 300)
    assert (record.matched, record.seen) == (1, 300)


def test_what_a_sub_layer_costs_is_a_weighted_least_squares_fit() -> None:
    """-log(share of right guesses) is the sum of the losses, each known beforehand to a standard deviation."""
    search = OnlineSearch(LAYERS, START, StepCost(0.06, 0.06), FLAT.v)
    prior = np.repeat([0.03, 0.06], INNER)
    assert [search.acceptance(skip) for skip in SINGLES] == pytest.approx(np.exp(-prior).tolist())
    shown = {START: (12, 16), SkipSet((1, 2)): (15, 16), SkipSet((2,), (6,)): (4, 9), SkipSet((6,), (1, 2)): (16, 16)}
    rows, wanted = [np.eye(2 * INNER) / 0.06], [prior / 0.06]
    for skip, (matched, seen) in shown.items():
        search.tell(skip, matched, seen)
        left_out = [layer in skip.attention for layer in range(1, LAYERS - 1)]
        left_out += [layer in skip.mlp for layer in range(1, LAYERS - 1)]
        share = (matched + 0.5) / (seen + 0.5)
        weight = np.sqrt(seen * share / (1.05 - share))
        rows.append(weight * np.array([left_out], float))
        wanted.append(np.array([-weight * np.log(share)]))
    losses = np.linalg.lstsq(np.concatenate(rows), np.concatenate(wanted), rcond=None)[0]
    assert losses.min() < 0 < losses.max()  # a loss below nothing is none
    found = [search.acceptance(skip) for skip in SINGLES]
    assert found == pytest.approx(np.exp(-np.maximum(losses, 0)).tolist())


def test_the_fastest_set_is_that_of_all_sets() -> None:
    layers, inner = 5, 3
    search = OnlineSearch(layers, SkipSet((1,)), StepCost(0.05, 0.15), FLAT.v)
    bits = np.array([[number >> bit & 1 for bit in range(2 * inner)] for number in range(1, 1 << 2 * inner)], bool)
    every = [search._set(row) for row in bits]
    assert [search._bits(skip).tolist() for skip in every] == bits.tolist()
    for seed in range(20):
        loss = np.random.default_rng(seed).exponential(0.1, 2 * inner)
        speeds = {skip: search.speed(skip, float(np.exp(-loss @ row))) for skip, row in zip(every, bits, strict=True)}
        assert speeds[search._fastest(loss)] > 0.99 * max(speeds.values())
    search.records = {skip: Record(1, 2, 1) for skip in every}
    assert search._fastest(loss) == SkipSet()  # nothing new


class Watched(OnlineSearch):
    """Writes down where candidates come from."""

    def __init__(self) -> None:
        super().__init__(12, SkipSet((1, 2), (3,)), StepCost(0.03, 0.05), FLAT.v)
        self.sources: dict[int, str] = {}

    def _modelled(self) -> SkipSet:
        self.sources.setdefault(self.candidates, "model")
        return super()._modelled()

    def _uniform(self) -> SkipSet:
        self.sources.setdefault(self.candidates, "any")
        return super()._uniform()

    def _mutated(self) -> SkipSet:
        self.sources.setdefault(self.candidates, "like the best")
        return super()._mutated()


def test_where_candidates_come_from_and_when_the_best_is_scored_again() -> None:
    search = Watched()
    search.tell(search.ask(), 15, 16)
    between, last = list[int](), 0
    for _ in range(270):
        skip = search.ask()
        if skip == search.initial:
            between.append(search.candidates - last)
            last = search.candidates
        search.tell(skip, 15 if skip == search.initial else 1, 16)
    assert set(between) == {8}
    sources = [search.sources[number] for number in range(1, search.candidates + 1)]
    assert [source == "model" for source in sources] == [number % 3 == 0 for number in range(1, len(sources) + 1)]
    assert 0.2 < sources.count("any") / (len(sources) - sources.count("model")) < 0.4  # drawn anew: 3 of 10


def test_sizes_of_candidates() -> None:
    search = Watched()
    best = search._bits(search.best)
    assert {len(search._uniform()) for _ in range(600)} == set(range(1, 16))  # up to three quarters of 20 sub-layers
    assert {int((search._bits(search._mutated()) ^ best).sum()) for _ in range(60)} == {1, 2, 3}


@pytest.mark.parametrize("share, last", [(0.5, 100), (1.0, 24)])
def test_a_search_with_nothing_in_sight_ends_early_only_where_nearly_all_guesses_stand(share: float, last: int) -> None:
    search = OnlineSearch(3, SkipSet((1,)), StepCost(0.1, 0.1), FLAT.v)
    for skip in (SkipSet((), (1,)), SkipSet((1,), (1,))):
        search.tell(skip, 0, 16)
    while not search.stopped:
        skip = search.ask()
        search.tell(skip, round(16 * share) if skip == search.initial else 0, 16)
    assert search.best == search.initial
    assert search.stopped == f"no better set among the last {last} candidates"
    search.resume({})
    assert search.stopped == ""
    none = OnlineSearch(2, SkipSet(), StepCost(0.1, 0.1), FLAT.v)
    none.resume({})
    assert none.stopped
