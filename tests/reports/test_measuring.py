"""Timing within a limit: turns, medians, lengths; the clock is a fake, no test asserts a time."""

from __future__ import annotations

from collections import Counter

import pytest

from edgespec.formulas.cost import spread
from edgespec.reports.calibrate import FEWEST_NEW, NEW, Counts, _length, _trials, pass_times
from edgespec.reports.measuring import LEAST, MOST, take_turns, time_turns


class Ticks:
    """A clock that goes on by ``step`` seconds whenever it is read."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("step", "seconds", "turns"), [(1.0, 0.0, LEAST), (0.001, 1e9, MOST), (1.0, 25.0, 6), (1.0, 1e9, MOST)]
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
    order.clear()
    take_turns(runs, 0.0, Ticks(1.0), least=1, warm=0)
    assert order == ["a", "b"]


def test_the_median_is_not_moved_by_one_slow_turn() -> None:
    now, slow = [0.0], iter([0, 0, 0, 50, 0, 0])
    times = take_turns({"a": lambda: now.__setitem__(0, now[0] + 1 + next(slow))}, 0, lambda: now[0], least=5)
    assert times == {"a": 1000.0}


def test_times_of_each_turn_and_how_they_differ() -> None:
    now, slow = [0.0], iter([0, 0, 1, 2, 3, 4])
    times = time_turns({"a": lambda: now.__setitem__(0, now[0] + 1 + next(slow))}, 0, lambda: now[0], least=5)
    assert times == {"a": [1000.0, 2000.0, 3000.0, 4000.0, 5000.0]}
    assert spread(times["a"]) == 2  # 4 s over 2 s
    assert spread([7.0]) == spread([7.0] * 9) == 1


def test_texts_are_as_long_as_time_allows() -> None:
    assert _length(8.0, 10.0, 5, 1000) == 40  # four texts, five runs each, 10 ms a token
    assert _length(7.5, 1.0, 5, 1000) == NEW
    assert _length(7.5, 500.0, 5, 1000) == FEWEST_NEW
    assert _length(7.5, 1.0, 5, 10) == 9
    assert _length(7.5, 1.0, 5, 1) == 1


def counted(times: dict[int, list[tuple[float, float]]], tokens: int, other: list[float]) -> Counts:
    counts = Counts(rounds=sum(map(len, times.values())), tokens=tokens)
    counts.times, counts.other_ms = times, other
    return counts


def test_a_mean_round_is_made_of_medians() -> None:
    counts = counted({1: [(0.0, 10.0), (0.0, 11.0), (0.0, 900.0)], 3: [(1.0, 20.0), (3.0, 30.0)]}, 10, [0.5, 0.7, 9.0])
    drafts, ms, rest = counts.means(pass_times([counts]))
    assert drafts == pytest.approx((3 * 0 + 2 * 2) / 5)
    assert ms == pytest.approx((3 * 11 + 2 * 25) / 5)
    assert rest == 0.7


def test_passes_over_the_same_graph_are_timed_together() -> None:
    plain = counted({1: [(0.0, 10.0)] * 3}, 3, [0.0])
    slow = counted({1: [(1.0, 12.0)] * 2}, 2, [0.0])  # in a slow moment
    drafting = counted({1: [(1.0, 11.0)] * 4, 2: [(2.0, 15.0)] * 4}, 12, [0.0])
    exits = counted({1: [(5.0, 6.0)] * 2}, 2, [0.0])
    counts = {"ar": plain, "ngram": slow, "speculative": drafting, "paradecode": exits}
    found = _trials(counts, apart=False)
    assert found["ar"].speedup == pytest.approx(1)
    assert found["ngram"].verify_ms == found["ar"].verify_ms == 11.0
    assert found["ngram"].speedup == pytest.approx(11 / 12)  # its drafter cost 1 ms, its passes what all do
    assert found["speculative"].speedup == pytest.approx(1.5 * 11 / (1.5 + 13))
    assert found["paradecode"].speedup == pytest.approx(11 / 11)  # layers had run before
    assert _trials(counts, apart=True)["ar"].verify_ms == 10.0  # a graph of its own
    assert _trials(counts, apart=True)["ngram"].verify_ms == 11.0
