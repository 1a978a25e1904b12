"""Chi-square with its noncentral kin, tests of counts, and the smallest excess that they find."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.formulas.agreement import first_difference, is_near_tie, near_tie_limit, verdict_of, worst
from edgespec.formulas.statistics import (
    Fit,
    chi_square,
    chi_square_limit,
    chi_square_tail,
    distance,
    normal_limit,
    normal_tail,
    pearson,
    smallest_distance,
    two_samples,
)

RNG = np.random.default_rng(7)


@pytest.mark.parametrize(
    "degrees, x, p",
    [(1, 3.841459, 0.05), (1, 10.827566, 0.001), (10, 18.307038, 0.05), (10, 2.0, 0.99634), (100, 149.449253, 0.001),
     (3, 0.0, 1.0), (1000, 1143.917, 0.001)],
)  # fmt: skip
def test_tails_are_those_of_the_tables(degrees: int, x: float, p: float) -> None:
    assert chi_square_tail(x, degrees) == pytest.approx(p, rel=0.02)


@pytest.mark.parametrize("degrees, excess", [(1, 3.0), (8, 40.0), (60, 200.0)])
def test_noncentral_tails_are_those_of_samples(degrees: int, excess: float) -> None:
    sampled = RNG.noncentral_chisquare(degrees, excess, 40_000)
    for x in np.quantile(sampled, [0.05, 0.5, 0.95]):
        assert chi_square_tail(float(x), degrees, excess) == pytest.approx((sampled >= x).mean(), abs=0.01)


def test_limits_turn_tails_around() -> None:
    assert chi_square_limit(10, 0.05) == pytest.approx(18.307, abs=1e-3)
    assert chi_square_tail(chi_square_limit(20, 1e-8, 30.0), 20, 30.0) == pytest.approx(1e-8, rel=1e-3)
    assert normal_tail(normal_limit(1e-7)) == pytest.approx(1e-7, rel=1e-6)


def test_small_cells_are_put_together_and_none_is_lost() -> None:
    expected = {"a": 0.9, "b": 0.09, **{f"rare {at}": 0.01 / 20 for at in range(20)}}
    counts = Counter({"a": 90, "b": 9, "rare 3": 1})
    fit = pearson(counts, expected)
    assert fit.degrees == 1
    assert fit.statistic == pytest.approx(0.0)
    assert fit.draws == 100
    assert pearson(Counter({"a": 80, "rare 1": 20}), expected).p() < 1e-3


def test_what_cannot_be_sampled_is_wrong() -> None:
    assert chi_square(Counter({"a": 1, "c": 1}), {"a": 1.0, "b": 0.0}) == 0.0
    assert pearson(Counter({"c": 1}), {"a": 1.0}).p(0.5) == 0.0


@pytest.mark.parametrize("size", [200, 3000])
def test_exact_counts_are_seldom_called_wrong(size: int) -> None:
    p = RNG.dirichlet(np.ones(12))
    values = [pearson(dict(enumerate(RNG.multinomial(size, p))), dict(enumerate(p))).p() for _ in range(400)]
    assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09


def test_two_samples_of_one_distribution_agree_and_others_do_not() -> None:
    p, q = RNG.dirichlet(np.ones(9)), RNG.dirichlet(np.ones(9))

    def counts(size: int, chances: NDArray[np.float64]) -> dict[int, int]:
        return dict(enumerate(RNG.multinomial(size, chances).tolist()))

    same = [two_samples(counts(500, p), counts(500, p)).p() for _ in range(300)]
    assert 0.01 < np.mean(np.array(same) < 0.05) < 0.1
    assert two_samples(counts(900, p), counts(900, q)).p() < 1e-9
    assert two_samples({}, {1: 3}) == Fit()


def test_the_reported_excess_is_found_as_often_as_is_said() -> None:
    draws, alpha, cells = 2000, 1e-3, 10
    far = smallest_distance(draws, cells - 1, alpha, 0.95)
    p = np.full(cells, 1 / cells)
    q = p * (1 + far * np.where(np.arange(cells) % 2, 1, -1))
    assert distance(dict(enumerate(p)), dict(enumerate(q))) == pytest.approx(far)
    found = [pearson(dict(enumerate(RNG.multinomial(draws, q))), dict(enumerate(p))).p() < alpha for _ in range(400)]
    assert 0.9 < np.mean(found) < 0.99
    assert smallest_distance(0, 5, alpha, 0.95) == math.inf


def test_a_tolerated_distance_is_not_called_wrong() -> None:
    p = np.full(10, 0.1)
    q = p * (1 + 0.05 * np.where(np.arange(10) % 2, 1, -1))
    fits = [pearson(dict(enumerate(RNG.multinomial(20_000, q))), dict(enumerate(p))) for _ in range(200)]
    assert np.mean([fit.p() < 1e-3 for fit in fits]) > 0.9
    assert not any(fit.p(0.07) < 1e-3 for fit in fits)


def test_near_ties() -> None:
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference("ab", "abc") == 2
    assert first_difference([], []) is None
    assert near_tie_limit(0.01, 0.02) == 0.04
    assert near_tie_limit(0.001, 0.02) == 0.02
    assert near_tie_limit(9.0, 0.02, 1.0) == 1.0
    assert is_near_tie([-0.01, 0.02], 0.02)
    assert not is_near_tie([-0.03, 0.0], 0.02)
    assert not is_near_tie([0.0, 0.5], 0.02)
    assert not is_near_tie([], 1.0)


def test_an_unknown_margin_is_never_wrong() -> None:
    assert verdict_of([]) == "identical"
    assert verdict_of([True, None]) == "near-ties"
    assert verdict_of([None, False]) == "wrong"
    assert worst(["identical", "near-ties"]) == "near-ties"
    assert worst([]) == "identical"
