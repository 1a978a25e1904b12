"""Timing within a limit: turns, medians, lengths; the clock is a fake, no test asserts a time."""

from __future__ import annotations

from collections import Counter

import pytest

from edgespec.planning.measuring import LEAST, MOST, take_turns
from edgespec.planning.trials import FEWEST_NEW, NEW, Counts, _length


class Ticks:
    """A clock that goes on by ``step`` seconds whenever it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("step", "seconds", "turns"),
    [(1.0, 0.0, LEAST), (0.001, 1e9, MOST), (1.0, 25.0, 6), (1.0, 1e9, MOST)],
)
def test_how_often_is_what_time_allows(step: float, seconds: float, turns: int) -> None:
    ran: Counter[str] = Counter()
    # a turn reads the clock once for the limit (from the fourth on) and twice for each of two timed runs
    runs = {name: lambda name=name: ran.update([name]) for name in ("a", "b")}
    times = take_turns(runs, seconds, Ticks(step))
    assert times == {"a": pytest.approx(1000 * step), "b": pytest.approx(1000 * step)}
    assert ran == {"a": 1 + turns, "b": 1 + turns}


def test_runs_take_turns_and_are_prepared() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    take_turns(runs, 0.0, Ticks(1.0), prepare=lambda name: order.append(f"for {name}"), least=2)
    assert order == ["for a", "a", "for b", "b"] * 3


def test_the_median_is_not_moved_by_one_slow_turn() -> None:
    now, slow = [0.0], iter([0, 0, 0, 50, 0, 0])
    times = take_turns({"a": lambda: now.__setitem__(0, now[0] + 1 + next(slow))}, 0, lambda: now[0], least=5)
    assert times == {"a": 1000.0}


def test_texts_are_as_long_as_time_allows() -> None:
    assert _length(8.0, 10.0, 5, 1000) == 40  # four texts, five runs each, 10 ms a token
    assert _length(7.5, 1.0, 5, 1000) == NEW
    assert _length(7.5, 500.0, 5, 1000) == FEWEST_NEW
    assert _length(7.5, 1.0, 5, 10) == 9
    assert _length(7.5, 1.0, 5, 1) == 1


def test_a_mean_round_is_made_of_medians() -> None:
    counts = Counts(rounds=5, tokens=10)
    counts.times = {1: [(0.0, 10.0), (0.0, 11.0), (0.0, 900.0)], 3: [(1.0, 20.0), (3.0, 30.0)]}
    counts.other_ms = [0.5, 0.7, 9.0]
    drafts, ms, rest = counts.means()
    assert drafts == pytest.approx((3 * 0 + 2 * 2) / 5)
    assert ms == pytest.approx((3 * 11 + 2 * 25) / 5)
    assert rest == 0.7
