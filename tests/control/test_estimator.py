"""The estimator of control: posterior means, and the best length by them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from edgespec.control.estimator import (
    NOTHING,
    Evidence,
    Pace,
    best_length,
    learn,
    measured,
    pace_after,
    pace_with,
    posterior,
    scaled,
    tokens,
)
from edgespec.formulas.cost import expected_tokens

KEEP, WEIGHT = 0.97, 8.0
FLAT = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6]  # of a round over each number of guesses


def rounds(rate: float, count: int, length: int, evidence: Evidence = NOTHING, seed: int = 0) -> Evidence:
    """Add rounds over ``length`` guesses, each accepted with the same chance."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        wrong = rng.random(length) >= rate
        right = int(wrong.argmax()) if wrong.any() else length
        evidence = learn(evidence, right, min(right + 1, length), KEEP)
    return evidence


def test_nothing_seen_is_the_prior() -> None:
    assert posterior([0.8, 0.6], WEIGHT, NOTHING, 4) == pytest.approx([0.8, 0.6, 0.6, 0.6])


def test_counts_are_discounted_at_every_position() -> None:
    seen = learn(learn(NOTHING, 1, 2, 0.5), 0, 1, 0.5)
    assert seen == Evidence((1.5, 0.5), (0.5, 0.0))
    assert scaled(seen, 2.0) == Evidence((3.0, 1.0), (1.0, 0.0))


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.9])
def test_rates_are_found_whatever_the_prior(rate: float) -> None:
    for prior in (0.1, 0.95):
        found = posterior([prior], WEIGHT, rounds(rate, 400, 4), 4)
        assert found[0] == pytest.approx(rate, abs=0.2)
        assert found[3] == pytest.approx(rate, abs=0.3)


def test_a_position_that_was_judged_early_is_judged_again() -> None:
    """Once the second guess was wrong while the first was seldom right; then the first is nearly always right."""
    early = learn(rounds(0.2, 20, 1), 1, 2, KEEP)
    later = rounds(0.95, 60, 1, early)  # the second is never put to the test
    before, after = (posterior([0.7], WEIGHT, seen, 2) for seen in (early, later))
    assert before[1] < 0.6 < 0.8 < after[1]
    assert best_length(after, FLAT)[0] > 1


def test_a_lucky_or_unlucky_round_decides_nothing() -> None:
    """Two rounds do not overrule a measurement of many positions."""
    rates = [0.8, 0.8]
    for right, tested in ((0, 1), (2, 2)):
        seen = learn(learn(NOTHING, right, tested, KEEP), right, tested, KEEP)
        assert best_length(posterior(rates, 12.0, seen, 8), FLAT)[0] > 0


def test_what_an_export_measured_counts_by_its_positions() -> None:
    seen = measured([0.5, 0.5, 0.0], 8)
    assert seen == Evidence((8.0, 4.0, 2.0), (4.0, 2.0, 0.0))
    few, many = (posterior([0.7], 4.0, measured([0.4], count), 1)[0] for count in (2, 200))
    assert few > 0.55
    assert many == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_length_is_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.1, 0.99, 8).tolist()
    costs = [1.0, *(1 + np.cumsum(rng.uniform(0.02, 0.6, 8)))]
    speeds = [expected_tokens(rates, length) / costs[length] for length in range(9)]
    length, speed, highest = best_length(rates, costs)
    assert highest == pytest.approx(max(speeds[1:]))
    assert length == int(np.argmax(speeds))
    assert speed == pytest.approx(max(speeds))
    assert tokens(rates, 5) == pytest.approx(expected_tokens(rates, 5))
    limited, _, _ = best_length(rates, costs, round_loss_limit=0.5)
    assert costs[limited] <= 1.5
    assert best_length(rates, costs, required=99.0)[:2] == (0, 99.0)


def test_more_acceptance_never_shortens_the_draft() -> None:
    lengths = [best_length([rate] * 8, FLAT)[0] for rate in np.linspace(0.05, 0.99, 40)]
    assert all(one <= other for one, other in pairwise(lengths))
    assert (lengths[0], lengths[-1]) == (0, 8)


def test_paces_are_means_of_time() -> None:
    pace = pace_after(pace_after(Pace(), 3.0, 2.0, 0.5), 1.0, 1.0, 0.5)
    assert (pace.tokens, pace.steps) == (2.5, 2.0)
    assert pace.speed == 1.25
    assert Pace().speed == 1.0
    assert pace_with(Pace(2.0, 1.0), 2.0, pace).speed == pytest.approx((2.5 + 4.0) / 4.0)
