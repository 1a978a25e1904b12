"""The adjusted distribution, the noise, and the rows of a pass."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.noise import DRAFT, Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, _top, distribution, support
from edgespec.decoding.verify import RowSampler
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.formulas.statistics import chi_square
from tests.support.toy import naive_distribution

GRID = [
    SamplingParams(1.0),
    SamplingParams(0.7, top_k=3),
    SamplingParams(1.3, top_p=0.8),
    SamplingParams(1.0, min_p=0.15),
    SamplingParams(0.9, repetition_penalty=1.5, logit_bias={2: 1.5, 0: -math.inf}),
    SamplingParams(0.8, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=0.8),
    SamplingParams(0.0, repetition_penalty=1.7),
    SamplingParams(0.0),
]


@pytest.mark.parametrize("params", GRID)
@pytest.mark.parametrize("size", [1, 2, 8, 300, 40000])
def test_the_distribution_is_that_of_hugging_faces_processors(params: SamplingParams, size: int) -> None:
    rng = np.random.default_rng(size)
    for scale in (0.3, 3.0, 12.0):
        logits = (rng.normal(size=size) * scale).astype(np.float32)
        prefix = rng.integers(size, size=5).tolist()
        if any(token >= size for token in params.logit_bias) or (size == 1 and params.logit_bias):
            continue
        found = distribution(logits, params, prefix)
        assert found.dtype == np.float64
        assert found.sum() == pytest.approx(1)
        np.testing.assert_allclose(found, naive_distribution(logits.tolist(), params, prefix), atol=2e-5)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 50), st.floats(0.05, 1), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_ties_are_cut_like_a_stable_sort(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(1.0, top_k=top_k)
    logits = np.array(values, np.float32)
    np.testing.assert_allclose(distribution(logits, params, []), naive_distribution(values, params, []), atol=1e-6)
    # top-p of exact integers may cut between equal tokens: compare how many are kept, not a rounding of the edge
    kept = support(logits, SamplingParams(1.0, top_k, top_p, min_p), []).ids
    assert len(kept) >= 1
    assert logits[kept].max() == logits.max()
    assert kept.tolist() == sorted(kept.tolist())


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_selection_by_blocks_equals_a_full_selection(size: int, count: int, seed: int) -> None:
    count = min(count, size)
    values = np.random.default_rng(seed).integers(-20, 20, size).astype(np.float32)
    np.testing.assert_array_equal(_top(values, count), np.flatnonzero(values >= np.sort(values)[-count]))


def test_a_wide_nucleus_of_a_large_vocabulary_widens_until_it_holds_the_mass() -> None:
    logits = np.random.default_rng(0).normal(size=30000).astype(np.float32)
    for top_p in (0.001, 0.3, 0.97, 0.999999):
        found = distribution(logits, SamplingParams(1.0, top_p=top_p), [])
        kept = np.flatnonzero(found)
        weights = np.exp(np.sort(logits.astype(np.float64))[::-1])
        assert abs(len(kept) - (np.searchsorted(np.cumsum(weights) / weights.sum(), top_p) + 1)) <= 1
        assert logits[kept].min() >= np.delete(logits, kept).max()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {-1: 1.0}},
        {"acceptance": "typical"},
        {"verification": "chain"},
        {"seed": 1.5},
    ],
)
def test_parameters_out_of_range_are_refused_with_what_came(bad: dict[str, object]) -> None:
    (name, value) = next(iter(bad.items()))
    with pytest.raises(InvalidRequest, match="expected") as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, top_p=0.9)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_logits_are_an_error(params: SamplingParams, bad: float) -> None:
    logits = np.zeros((1, 5), np.float32)
    logits[0, 3] = bad
    with pytest.raises(EdgespecError, match="finite"):
        RowSampler(logits, [1], EMPTY, params, Noise(0)).choose(0)
    with pytest.raises(EdgespecError, match="finite"):
        RowSampler(np.full((1, 5), -np.inf, np.float32), [1], EMPTY, params, Noise(0)).choose(0)


def test_a_forbidden_token_is_not_damage() -> None:
    logits = np.array([[1, -np.inf, 0]], np.float32)
    rows = RowSampler(logits, [1], EMPTY, SamplingParams(1.0), Noise(0))
    assert rows.distribution(0)[1] == 0
    assert rows.logprob(0, 1) == -math.inf
    assert rows.logprob(0, 0) == pytest.approx(math.log(math.e / (math.e + 1)))


def test_noise_is_a_pure_function_and_its_uses_differ() -> None:
    tokens = np.arange(100)
    noise, same, other = Noise(5), Noise(5), Noise(6)
    np.testing.assert_array_equal(noise.gumbel(3, tokens), same.gumbel(3, tokens))
    np.testing.assert_array_equal(noise.gumbel(3, tokens)[7:9], same.gumbel(3, tokens[7:9]))
    assert noise.uniform(3, 1) == same.uniform(3, 1)
    for different in (noise.gumbel(4, tokens), other.gumbel(3, tokens), noise.gumbel(3, tokens, DRAFT + 3)):
        assert not np.any(noise.gumbel(3, tokens) == different)
    assert len({noise.uniform(p, s) for p in range(50) for s in range(50)}) == 2500
    assert Noise().seed != Noise().seed
    assert Noise(-1).uniform(0, 0) != Noise(1 << 63).uniform(0, 0)


def test_noise_is_uniform_and_uncorrelated() -> None:
    noise = Noise(11)
    u = np.array([[noise.uniform(p, s) for s in range(40)] for p in range(500)])
    assert u.min() >= 0
    assert u.max() < 1
    counts = Counter((int(x * 16),) for x in u.ravel())
    assert chi_square(counts, {(i,): 1 / 16 for i in range(16)}) > 1e-3
    pairs = Counter((int(a * 5), int(b * 5)) for row in u for a, b in pairwise(row))
    assert chi_square(pairs, {(a, b): 0.04 for a in range(5) for b in range(5)}) > 1e-3
    gumbel = np.concatenate([noise.gumbel(p, np.arange(1000)) for p in range(100)])
    assert gumbel.mean() == pytest.approx(0.5772, abs=0.02)
    assert gumbel.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    same_token = np.array([noise.gumbel(p, np.arange(5, 7)) for p in range(4000)])
    assert abs(np.corrcoef(same_token.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(same_token[1:, 0], same_token[:-1, 0])[0, 1]) < 0.05


@pytest.mark.parametrize("params", [p for p in GRID if not p.greedy])
def test_draws_have_the_adjusted_distribution(params: SamplingParams) -> None:
    logits = (np.random.default_rng(3).normal(size=8) * 2).astype(np.float32)
    found = support(logits, params, [1, 3])
    counts = Counter((found.draw(Noise(seed), 17),) for seed in range(20000))
    expected = {(t,): p for t, p in enumerate(naive_distribution(logits.tolist(), params, [1, 3]))}
    assert chi_square(counts, expected) > 1e-3


@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_the_shortcut_of_a_large_support_draws_the_same_token(scale: float) -> None:
    logits = (np.random.default_rng(1).normal(size=20000) * scale).astype(np.float32)
    found = support(logits, SamplingParams(1.0), [])
    for seed in range(100):
        noise = Noise(seed)
        assert found.draw(noise, 9) == int((found.logits + noise.gumbel(9, found.ids)).argmax())


def test_rows_know_their_prefix_and_position() -> None:
    tree = Proposal(np.array([4, 5, 6, 7]), np.array([-1, 0, -1, 2]))
    rows = RowSampler(np.zeros((5, 9), np.float32), [1, 2, 3], tree, SamplingParams(), Noise(0))
    assert [list(rows.prefix(row)) for row in range(5)] == [
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 6],
        [1, 2, 3, 6, 7],
    ]
    assert [rows.position(row) for row in range(5)] == [3, 4, 5, 4, 5]
    straight = RowSampler(np.zeros((3, 9), np.float32), [1], Proposal(np.array([4, 5])), SamplingParams(), Noise(0))
    assert [rows.position(row) - 2 for row in range(3)] == [straight.position(row) for row in range(3)] == [1, 2, 3]


def test_the_repetition_penalty_sees_the_guesses_on_the_path_and_no_others() -> None:
    params = SamplingParams(repetition_penalty=3.0)
    tree = Proposal(np.array([1, 2, 0]), np.array([-1, -1, 0]))
    logits = np.tile(np.array([1.0, 2.0, 1.5, 0.1], np.float32), (4, 1))
    rows = RowSampler(logits, [3], tree, params, Noise(0))
    assert [rows.choose(row) for row in range(4)] == [1, 2, 1, 2]


def test_greedy_takes_the_first_of_equals_and_leaves_the_row_alone() -> None:
    logits = np.array([[0, 2, 2, 1]], np.float32)
    before = logits.copy()
    for params in (SamplingParams(), SamplingParams(logit_bias={0: 2.0})):
        choice = RowSampler(logits, [3], EMPTY, params, Noise(0)).choose(0)
        assert choice == (1 if params.plain_greedy else 0)
        np.testing.assert_array_equal(logits, before)
