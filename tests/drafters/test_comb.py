"""Combs of guesses, against their definition: level by level, over whole distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.noise import DRAFT, TARGET, Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, adjusted, distribution
from edgespec.drafters.sampling_drafts import MOST_SIBLING_NODES, Draw, SiblingPolicy, draw_siblings, paper_width
from edgespec.errors import EdgespecError

VOCAB, BUCKET = 12, 3
PREFIX = (5, 1, 4)
HALF = np.log(np.array([0.5, 0.5] + [1e-300] * 10)).astype(np.float32)  # two tokens that share everything
RULES = {
    "greedy": SamplingParams(),
    "greedy, adjusted": SamplingParams(repetition_penalty=1.7, logit_bias={2: 1.5}),
    "rejection": SamplingParams(0.8, repetition_penalty=1.3, seed=1),
    "cut": SamplingParams(1.1, top_k=3, seed=1),
    "coupled": SamplingParams(1.0, seed=1, acceptance="coupled"),
}


def row(seed: int, prefix: Sequence[int]) -> NDArray[np.float32]:  # [VOCAB]
    """Logits of a draft, which follow from all tokens."""
    random = np.random.default_rng([seed, *prefix])
    return np.asarray(random.normal(0, random.choice([1.0, 3.0, 6.0]), VOCAB), np.float32)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:  # [vocab] both
    values = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(values / values.sum())


class Comb:
    """A comb by its definition.  ``nodes``: token, depth and q of each, the chain first."""

    def __init__(self, seed: int, length: int, params: SamplingParams, stop: float, policy: SiblingPolicy) -> None:
        noise, stream = Noise(seed), DRAFT + len(PREFIX) if params.rejects else TARGET
        self.levels = list[tuple[list[int], NDArray[np.float64]]]()
        chain, reach, expected, offers = [*PREFIX], 1.0, 1.0, list[tuple[float, int]]()
        for depth in range(length):
            logits = row(seed, chain)
            p, q = softmax(logits), distribution(logits, params, chain)
            width = min(policy.most[min(depth, len(policy.most) - 1)], paper_width(float(p.max()), params.greedy))
            if policy.price is not None and reach * (1 - p.max()) <= policy.least:
                width = 1
            if params.greedy:
                ranked = np.argsort(-adjusted(logits, params, chain), kind="stable").tolist()
                shares = p[ranked]
            else:
                with np.errstate(divide="ignore"):
                    noisy = np.log(q) + noise.gumbel(len(chain), np.arange(VOCAB), stream)
                ranked = np.argsort(-noisy, kind="stable")[: np.count_nonzero(q)].tolist()
                shares = np.sort(q)[::-1]
            self.levels.append((ranked[:width], q))
            offers += [(reach * float(share), depth) for share in shares[1 : len(ranked[:width])]]
            chain.append(ranked[0])
            reach *= float(p[ranked[0]])
            expected += reach
            if p[ranked[0]] < stop:
                break
        taken = [0] * len(self.levels)
        rows = 1 + len(self.levels)
        for gain, depth in sorted(offers, reverse=True):
            if rows > MOST_SIBLING_NODES or (
                policy.price is not None and gain <= policy.price(len(taken), expected, rows)
            ):
                break
            taken[depth] += 1
            rows += 1
        self.nodes = [(found[0], depth, q) for depth, (found, q) in enumerate(self.levels)]
        for depth, (count, (found, q)) in enumerate(zip(taken, self.levels, strict=True)):
            self.nodes += [(token, depth, q) for token in found[1 : 1 + count]]


def draw(
    seed: int, length: int, params: SamplingParams, stop: float, policy: SiblingPolicy
) -> tuple[Proposal, list[int | None]]:
    """Draw siblings along a chain of ``length``; return the proposal and the tokens that the draft was stepped with."""
    steps = list[int | None]()

    def step(token: int | None) -> NDArray[np.float32]:  # [VOCAB + 2]: two rows of padding
        steps.append(token)
        chain = [*PREFIX, *(token for token in steps if token is not None)]
        return np.append(row(seed, chain), np.array([90, 91], np.float32))

    how = Draw(PREFIX, VOCAB, params, Noise(seed)), length, lambda chance: chance < stop
    return draw_siblings(step, *how, policy, BUCKET), steps


def price(depth: int, expected: float, rows: int) -> float:
    """Return the cost of a row, which rises with rows and with the length and chance of the chain."""
    return 0.01 * rows + 0.002 * depth * expected


@pytest.mark.parametrize(
    "policy",
    [SiblingPolicy((2,)), SiblingPolicy((4, 1, 3)), SiblingPolicy((9,), price), SiblingPolicy((9,), price, 0.3)],
    ids=["two", "by depth", "price", "least"],
)
@pytest.mark.parametrize("name", RULES)
def test_a_comb_is_what_its_definition_says(name: str, policy: SiblingPolicy) -> None:
    params, siblings = RULES[name], 0
    for seed in range(40):
        length, stop = 1 + seed % 5, (0.0, 0.4)[seed % 2]
        made, steps = draw(seed, length, params, stop, policy)
        expected = Comb(seed, length, params, stop, policy)
        depths = [depth for _, depth, _ in expected.nodes]
        assert made.tokens.tolist() == [token for token, _, _ in expected.nodes]
        assert steps == [None, *(found[0] for found, _ in expected.levels[:-1])]
        chain = len(made) == len(expected.levels)
        assert made.replacement == chain
        assert made.bucket == BUCKET
        if chain:
            assert made.parents is None
        else:  # a sibling hangs where the chain's own guess does, and has no children
            assert made.parents is not None
            assert made.parents.tolist() == [depth - 1 for depth in depths]
        if params.rejects:
            assert made.probs is not None
            np.testing.assert_allclose(made.probs, [q for _, _, q in expected.nodes], rtol=1e-6, atol=1e-12)
        else:
            assert made.probs is None
        siblings += len(made) - len(expected.levels)
    assert siblings > 20


def test_the_papers_widths() -> None:
    """SWIFT (arXiv 2410.06916): the surer the draft, the fewer guesses; a bound belongs to what is below it."""
    bounds = [1.0, 0.96, 0.95, 0.81, 0.8, 0.51, 0.5, 0.0]
    assert [paper_width(confidence, True) for confidence in bounds] == [3, 3, 5, 5, 8, 8, 10, 10]
    assert [paper_width(confidence, False) for confidence in bounds] == [1, 1, 3, 3, 5, 5, 10, 10]


def halves(length: int, stop: float, policy: SiblingPolicy, logits: NDArray[np.float32] = HALF) -> Proposal:
    how = Draw(PREFIX, len(logits), SamplingParams(), Noise(1)), length, lambda chance: chance < stop
    return draw_siblings(lambda token: logits, *how, policy)


def test_a_row_must_gain_more_than_it_costs() -> None:
    """The chances here are exact: a sibling of half the mass gains 1/2, one below it 1/4."""
    assert halves(1, 0.0, SiblingPolicy((2,), lambda *_: 0.5)).tokens.tolist() == [0]
    assert halves(1, 0.0, SiblingPolicy((2,), lambda *_: 0.499)).tokens.tolist() == [0, 1]
    assert halves(2, 0.0, SiblingPolicy((2,), lambda *_: 0.25)).tokens.tolist() == [0, 0, 1]
    assert halves(1, 0.0, SiblingPolicy((2,), lambda *_: 0.0, 0.5)).tokens.tolist() == [0]  # all that is left: 1/2
    assert halves(1, 0.0, SiblingPolicy((2,), lambda *_: 0.0, 0.499)).tokens.tolist() == [0, 1]
    assert halves(1, 0.0, SiblingPolicy((2,), None, 1.0)).tokens.tolist() == [0, 1]  # nothing has a price


def test_what_a_row_costs_is_asked_for_the_whole_chain() -> None:
    asked = list[tuple[int, float, int]]()

    def ask(depth: int, expected: float, rows: int) -> float:
        asked.append((depth, expected, rows))
        return 0.3

    assert halves(3, 0.0, SiblingPolicy((2,), ask)).tokens.tolist() == [0, 0, 0, 1]
    assert asked == [(3, 1.875, 4), (3, 1.875, 5)]


def test_a_comb_stops_where_it_is_unsure_and_has_an_end() -> None:
    assert len(halves(5, 0.5, SiblingPolicy((1,)))) == 5  # as sure as it must be
    assert len(halves(5, 0.501, SiblingPolicy((1,)))) == 1
    assert len(halves(8, 0.0, SiblingPolicy((10,)), np.zeros(40, np.float32))) == MOST_SIBLING_NODES == 32
    assert halves(0, 0.0, SiblingPolicy((2,))) is EMPTY


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(EdgespecError, match="finite"):
        halves(2, 0.0, SiblingPolicy((2,)), np.full(4, value, np.float32))
