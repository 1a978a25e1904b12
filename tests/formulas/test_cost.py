"""The formulas against the published tables, and the cost model against clocks that are made up."""

from __future__ import annotations

import math

import pytest

from edgespec.formulas.cost import ASSUMED_VERIFY, CostModel, expected_tokens, measure, speedup

RATES = [0.5, 0.6, 0.7, 0.8, 0.9]
# Expected tokens per round, computed by hand from the formula: gamma -> by acceptance.
EXPECTED = {
    1: [1.50, 1.60, 1.70, 1.80, 1.90],
    2: [1.75, 1.96, 2.19, 2.44, 2.71],
    3: [1.88, 2.18, 2.53, 2.95, 3.44],
    4: [1.94, 2.31, 2.77, 3.36, 4.10],
    5: [1.97, 2.38, 2.94, 3.69, 4.69],
    8: [2.00, 2.47, 3.20, 4.33, 6.13],
}
# Best speed-up and its gamma: c + s -> by acceptance.
BEST = {
    0.05: [(1.63, 3), (1.92, 4), (2.35, 6), (3.09, 8), (4.67, 13)],
    0.10: [(1.46, 2), (1.67, 3), (1.98, 4), (2.47, 6), (3.43, 10)],
    0.20: [(1.25, 2), (1.40, 2), (1.58, 3), (1.87, 4), (2.37, 7)],
    0.30: [(1.15, 1), (1.23, 1), (1.37, 2), (1.55, 3), (1.87, 5)],
    0.50: [(1.00, 0), (1.07, 1), (1.13, 1), (1.22, 2), (1.38, 3)],
}


@pytest.mark.parametrize("gamma", EXPECTED)
def test_expected_tokens_are_those_of_the_table(gamma: int) -> None:
    for rate, wanted in zip(RATES, EXPECTED[gamma], strict=True):
        assert expected_tokens(rate, gamma) == pytest.approx(wanted, abs=0.0051)
        assert expected_tokens(rate, gamma) == pytest.approx((1 - rate ** (gamma + 1)) / (1 - rate))


@pytest.mark.parametrize("cost", BEST)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_best_gamma_is_that_of_the_table_however_the_cost_is_split(cost: float, share: float) -> None:
    model = CostModel({1: 1.0, 2: 1.0 + cost * share}, cost * (1 - share))
    for rate, (wanted, gamma) in zip(RATES, BEST[cost], strict=True):
        speeds = [speedup(rate, length, model.c, model.v) for length in range(17)]
        gain = max(speeds)
        assert gain == pytest.approx(wanted, abs=0.0051)
        assert speeds.index(gain) == gamma or gain == pytest.approx(speedup(rate, gamma, model.c, model.v), abs=1e-9)


def test_positions_may_have_rates_of_their_own() -> None:
    assert expected_tokens([0.9, 0.5, 0.2], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    assert expected_tokens([0.9, 0.5], 4) == pytest.approx(1 + 0.9 + 0.45 + 0.225 + 0.1125)
    assert expected_tokens([], 3) == expected_tokens(0.0, 3) == 1
    speeds = [speedup([0.95, 0.9, 0.01], length, 0.1, lambda n: 1.0) for length in range(17)]
    assert speeds.index(max(speeds)) == 2


def test_gamma_zero_is_plain_decoding_and_a_free_verification_the_papers_formula() -> None:
    assert speedup(0.3, 0, 0.5, lambda n: 1.0) == max(speedup(0.3, k, 0.5, lambda n: 1.0) for k in range(17)) == 1
    assert speedup(0.8, 5, 0.1, lambda n: 1.0) == pytest.approx((1 - 0.8**6) / ((1 - 0.8) * (5 * 0.1 + 1)))


def test_the_curve_is_linear_between_points_and_goes_on_with_the_last_slope() -> None:
    model = CostModel({1: 2.0, 4: 5.0, 8: 6.0}, 0.1)
    assert [model.v(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([1, 1.5, 2.5, 2.75, 3, 3.5])
    assert CostModel({1: 3.0}).v(9) == 1
    assert CostModel().v(4) == ASSUMED_VERIFY[4]


@pytest.mark.parametrize("bad", [{}, {0: 1.0}, {1: 0.0}, {1: 1.0, 2: -1.0}])
def test_nonsense_points_are_refused(bad: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CostModel(bad)
    with pytest.raises(ValueError, match="draft"):
        CostModel(None, -0.1)
    with pytest.raises(ValueError, match="draft"):
        CostModel(None, 0.1, -0.1)


def test_observed_times_replace_the_curve_and_outliers_do_not() -> None:
    model = CostModel({1: 1.0, 4: 1.1, 8: 1.2}, 0.5)
    for i in range(15):
        model.observe_verify(1, 500.0 if i == 7 else 10.0)
        model.observe_verify(4, 900.0 if i == 3 else 20.0)
        model.observe_draft(2, 4.0)
    model.observe_verify(6, 10.0)  # once: does not count
    for _ in range(8):
        model.observe_draft(0, 99.0)  # nothing was drafted: does not count either
        model.observe_verify(1, 10.0)
    assert model.v(4) == pytest.approx(2.0)
    assert model.v(1) == 1
    assert model.c == pytest.approx(0.2)
    assert model.v(8) >= 2.0  # the given point below the measured one is lifted: more rows never cost less
    assert model.given().v(4) == pytest.approx(1.1)
    assert model.given().c == 0.5


@pytest.mark.parametrize("first", [None, 0.5])
def test_a_first_guess_may_cost_more_than_a_further_one(first: float | None) -> None:
    """Whether an export knew so or not, what is observed counts."""
    model = CostModel({1: 1.0, 4: 1.1}, 0.2, first)
    given = [0, 0.2, 0.4, 0.6] if first is None else [0, 0.5, 0.7, 0.9]
    assert [model.d(k) for k in range(4)] == pytest.approx(given)
    model.observe_verify(1, 10.0, 8)
    model.observe_draft(1, 3.3, 8)
    assert model.d(3) == pytest.approx(0.99)  # nothing else is known yet
    model.observe_draft(3, 5.3, 8)
    assert [model.d(k) for k in range(5)] == pytest.approx([0, 0.33, 0.43, 0.53, 0.63])
    assert model.c == pytest.approx(0.33)
    model.observe_draft(4, 4.0, 8)  # a dip is noise
    assert model.d(4) == pytest.approx(0.53)
    assert model.given().d(3) == pytest.approx(given[3])


def test_without_a_one_row_pass_the_given_curve_says_what_it_would_take() -> None:
    model = CostModel({1: 1.0, 2: 1.25, 4: 2.0}, 0.5)
    for _ in range(8):
        model.observe_verify(2, 10.0)
        model.observe_verify(4, 24.0)
    assert model.v(2) == pytest.approx(1.25)
    assert model.v(4) == pytest.approx(3.0)


def test_a_dip_in_noisy_times_is_not_believed() -> None:
    model = CostModel({1: 1.0, 2: 1.1}, 0.0)
    for _ in range(8):
        for n, ms in ((1, 10.0), (2, 15.0), (3, 12.0), (5, 20.0)):
            model.observe_verify(n, ms)
    curve = [model.v(n) for n in range(1, 10)]
    assert curve == sorted(curve)
    assert curve[1] == curve[2] == 1.5


def test_of_many_pass_sizes_those_timed_last_are_known() -> None:
    model = CostModel({1: 1.0, 2: 1.1}, 0.0)
    for n in [1, *range(2, 200)]:
        for _ in range(20):
            model.observe_verify(n, 10.0 * n)
    held = model.timings.passes
    assert (len(held), 1 in held, 199 in held, max(map(len, held.values()))) == (32, True, True, 15)
    assert model.v(199) == pytest.approx(199.0)


def test_measure_takes_turns_and_returns_a_time_for_each_size() -> None:
    calls: list[int] = []
    times = measure(calls.append, [1, 4, 8], 3)
    assert calls == [1, 4, 8] * 4
    assert list(times) == [1, 4, 8]
    assert all(ms >= 0 and math.isfinite(ms) for ms in times.values())


def streaming(share: float, ratio: float, rounds: int = 40) -> CostModel:
    """Observe passes of 1 row that wait for a disk for a share of 100 ms, and of 2 rows with ``ratio`` the bytes."""
    curve = {1: 8.0, 2: 15.0, 4: 26.5}
    model = CostModel(curve, 0.1, reads=curve)
    for turn in range(rounds):
        for rows, read in ((1, 1e6), (2, ratio * 1e6)):
            slow = 5.0 if turn % 3 == 0 else 0.5  # of a disk that others use; 2 on average
            model.observe_reads(rows, read, slow / 2 * 100 * share * read / 1e6)
            model.observe_verify(rows, (1 - share) * 100 * (1 if rows == 1 else 1.2))
    return model


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
def test_a_pass_that_reads_from_a_disk_costs_its_bytes_and_what_the_clock_shows_of_the_rest(
    share: float, ratio: float
) -> None:
    model = streaming(share, ratio)
    assert model.plain_ms == pytest.approx(100, rel=0.15)
    assert model.v(2) == pytest.approx((1 - share) * 1.2 + share * ratio, rel=0.1)
    assert model.least(2) == pytest.approx((1 - share) + share * ratio, rel=0.1)
    assert model.d(1) == pytest.approx(0.1 * (1 - share), rel=0.1, abs=0.01)


def test_before_anything_was_read_the_bytes_of_uniform_choices_are_the_price() -> None:
    curve = {1: 8.0, 2: 15.0}
    model = CostModel(curve, 0.1, reads=curve)
    assert model.v(2) == model.least(2) == pytest.approx(15 / 8)
    assert model.given().v(2) == model.given().least(2) == pytest.approx(15 / 8)
    assert CostModel({1: 8.0, 2: 15.0}).least(2) == 1
    model.observe_reads(1, 1e6, 10.0)  # too few passes
    model.observe_reads(2, 9e6, 10.0)
    assert model.v(2) == pytest.approx(15 / 8)


@pytest.mark.parametrize("own", [0.0, 0.5])
def test_rows_of_a_pass_share_the_layers_of_a_dense_model(own: float) -> None:
    """A draft step reads none of them, or a share where it runs them itself, until drafts are timed as a whole."""
    model = CostModel({1: 1.0, 2: 1.6}, 0.1, reads={1: 1.0, 2: 1.0}, draft_reads=own)
    for _ in range(20):
        for rows in (1, 2):
            model.observe_reads(rows, 5e8, 900.0)
            model.observe_verify(rows, 100.0 if rows == 1 else 160.0)
    assert model.v(2) == pytest.approx(1.06)
    assert model.d(2) == pytest.approx(0.02 + 0.9 * 2 * own)
    model.observe_draft(2, 800.0, 8)
    assert model.d(2) == pytest.approx(0.8)


def test_a_cache_that_holds_all_experts_leaves_the_clock_alone() -> None:
    curve = {1: 8.0, 2: 15.0}
    model = CostModel(curve, 0.1, reads=curve)
    for _ in range(20):
        for rows in (1, 2):
            model.observe_reads(rows, 0.0, 0.0)
            model.observe_verify(rows, 10.0 + rows)
    assert model.v(2) == pytest.approx(12 / 11)
    assert model.least(2) == 1
