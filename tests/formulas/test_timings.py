"""Timings of different moments stay comparable while the machine changes its pace."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from edgespec.control.adaptive import Control
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.stats import RoundTime
from edgespec.formulas.cost import CostModel, Timings
from tests.support.rounds import Rounds
from tests.support.toy import Scripted


def timed() -> Timings:
    """Record ten times passes of 1, 2 and 4 rows of 10, 11 and 14 ms, and a draft of 3 steps of 6 ms."""
    timings = Timings()
    for _ in range(10):
        for rows, ms in ((1, 10.0), (2, 11.0), (4, 14.0)):
            timings.add_pass(rows, ms)
        timings.add_draft(3, 6.0)
    return timings


@pytest.mark.parametrize("pace", [2.0, 0.5])
@pytest.mark.parametrize("sizes", [[2] * 5, [4, 2, 2, 1, 4]])
def test_what_was_timed_before_changes_with_what_is_timed_now(pace: float, sizes: list[int]) -> None:
    timings, usual = timed(), {1: 10.0, 2: 11.0, 4: 14.0}
    for rows in sizes:
        timings.add_pass(rows, usual[rows] * pace)
    for rows, ms in usual.items():
        assert list(timings.passes[rows]) == pytest.approx([ms * pace] * (10 + sizes.count(rows)))
    assert list(timings.drafts[3]) == pytest.approx([6.0 * pace] * 10)
    for _ in range(5):
        timings.add_pass(2, 11.0)  # and back
    assert timings.one() == pytest.approx(10.0)
    assert list(timings.drafts[3]) == pytest.approx([6.0] * 10)


def test_what_was_timed_since_stays() -> None:
    timings = timed()
    for at in range(4):
        timings.add_pass(2, 22.0)
        if at == 2:
            timings.add_pass(4, 29.0)
            timings.add_draft(3, 12.5)
    assert list(timings.passes[4]) == pytest.approx([28.0] * 10 + [29.0])
    assert list(timings.drafts[3]) == pytest.approx([12.0] * 10 + [12.5])


@pytest.mark.parametrize("times", [[22.0] * 4, [22.0, 22.0, 11.0, 22.0, 22.0, 22.0], [22.0, 5.0] * 4, [12.0] * 9])
def test_a_few_slow_passes_and_small_changes_are_noise(times: list[float]) -> None:
    timings = timed()
    for ms in times:
        timings.add_pass(2, ms)
    assert timings.one() == 10.0
    assert median(timings.passes[4]) == 14.0


def test_a_size_that_is_new_tells_nothing_of_the_pace() -> None:
    timings = timed()
    for _ in range(9):
        timings.add_pass(8, 99.0)
    assert timings.one() == 10.0


@pytest.mark.parametrize("times", [1, 3, 15])
def test_a_size_that_is_new_does_not_end_a_slow_time(times: int) -> None:
    """However often it is timed at once: its own timings are nothing to compare it with."""
    timings = timed()
    for _ in range(4):
        timings.add_pass(2, 22.0)
    timings.add_pass(8, 36.0, times)
    assert timings.one() == 10.0
    timings.add_pass(2, 22.0)
    assert timings.one() == pytest.approx(20.0)
    assert list(timings.passes[8]) == [36.0] * times  # it was timed since


def test_a_pass_is_compared_with_those_before_it() -> None:
    """Not with itself, where one measurement counts as many."""
    timings, sizes = Timings(), (1, 2, 4, 8, 16)
    for _ in range(10):
        for rows in sizes:
            timings.add_pass(rows, 10.0 + rows)
    for rows in sizes:
        timings.add_pass(rows, 2 * (10.0 + rows), 8)
    assert {rows: list(ms) for rows, ms in timings.passes.items()} == {
        rows: pytest.approx([2 * (10.0 + rows)] * 15) for rows in sizes
    }


def test_sizes_that_were_not_timed_for_long_are_forgotten() -> None:
    """Timings of one row and of the latest 31 other sizes stay; for each size the latest 15."""
    timings = Timings()
    for rows in range(1, 41):
        timings.add_pass(rows, 10.0)
        timings.add_draft(rows, 2.0)
        timings.add_pass(2, 11.0)
    assert list(timings.passes) == [1, *range(11, 41), 2]
    assert list(timings.drafts) == [1, *range(10, 41)]
    assert [len(timings.passes[rows]) for rows in (1, 2, 40)] == [1, 15, 1]


@pytest.mark.parametrize(("hard", "easy"), [(90, 130), (80, 110), (100, 140), (300, 300)])
def test_control_drafts_as_before_when_a_slow_time_is_over(hard: int, easy: int) -> None:
    """Four rows take 1.3 times one row, always; all passes take twice as long for a while.

    Text that is hard to guess while the pace changes makes proposals short, so that few sizes are timed.
    """
    curve = {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0}
    cost = CostModel({n: ms / 10 for n, ms in curve.items()}, 0.05)
    drafter = Scripted(lambda tokens, budget: Proposal(np.zeros(budget, np.int64)))
    driven = Rounds(Control(drafter, cost, gamma_max=3))
    rng = np.random.default_rng(0)
    lengths = []
    for at in range(400):
        slow, likely = 2.0 if 100 <= at < 140 else 1.0, 0.25 if hard <= at < easy else 0.8
        proposal = driven.propose([1], 3)
        lengths.append(len(proposal))
        right = 0
        while right < len(proposal) and rng.random() < likely:
            right += 1
        rows = 1 + len(proposal)
        time = RoundTime(0.5 * slow * len(proposal), curve[rows] * slow, rows, False)
        driven.learn(proposal, range(right), time)
    assert np.mean(lengths[300:]) > 2.8
