"""Rejection, proven rather than sampled: all drafts, all decisions, to the last digits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.proposal import Proposal
from edgespec.decoding.verify import Accept
from edgespec.plugins.lossy import All, TopK, Typical
from tests.support.enumeration import Model, chains, plain_texts, random_model, texts, trees

VOCAB = 3
EXACTLY = 1e-12


def off(target: Model, drafts: Iterable[tuple[float, Proposal]], length: int, block: bool = False) -> float:
    """Return the largest difference between the texts' probabilities with ``drafts`` and by plain decoding."""
    found, _ = texts(target, VOCAB, length, drafts, block)
    assert found.sum() == pytest.approx(1, abs=EXACTLY)
    return float(np.abs(found - plain_texts(target, VOCAB, length)).max())


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("holes", [False, True])
def test_a_chain_keeps_the_distribution(length: int, holes: bool, block: bool) -> None:
    for seed in range(6):
        target, draft = random_model(seed, VOCAB, holes=holes), random_model(seed + 50, VOCAB, 0.6, holes)
        assert off(target, chains(draft, VOCAB, length), length + 1, block) < EXACTLY
        # a draft that ends after some token, as it does after EOS
        assert off(target, chains(draft, VOCAB, length, stop=1), length + 1, block) < EXACTLY


@given(st.integers(0, 10**6), st.floats(0.05, 5), st.floats(0.05, 5), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_block_is_exact_and_accepts_at_least_as_much(seed: int, sharp: float, blunt: float, holes: bool) -> None:
    target, draft = random_model(seed, VOCAB, sharp, holes), random_model(seed + 1, VOCAB, blunt)
    drafts = list(chains(draft, VOCAB, 2))
    one_by_one, fewer = texts(target, VOCAB, 3, drafts, False)
    block, more = texts(target, VOCAB, 3, drafts, True)
    np.testing.assert_allclose(block, plain_texts(target, VOCAB, 3), rtol=0, atol=1e-11)
    np.testing.assert_allclose(one_by_one, block, rtol=0, atol=1e-11)
    assert more >= fewer - 1e-11


def test_a_block_accepts_more_where_draft_and_target_differ() -> None:
    target, draft = random_model(3, VOCAB), random_model(4, VOCAB)
    means = [texts(target, VOCAB, 4, chains(draft, VOCAB, 3), block)[1] for block in (False, True)]
    assert means[1] > 1.02 * means[0]


def test_an_equal_draft_stands_as_a_whole() -> None:
    target = random_model(5, VOCAB)
    for block in (False, True):
        found, mean = texts(target, VOCAB, 4, chains(target, VOCAB, 3), block)
        np.testing.assert_allclose(found, plain_texts(target, VOCAB, 4), rtol=0, atol=EXACTLY)
        assert mean == pytest.approx(3)


SHAPES = {
    "comb of 2": ([2, 2], True),
    "comb of 3": ([3, 3], True),
    "full 2,1": ([2, 1], False),
    "full 2,2": ([2, 2], False),
    "full 1,2": ([1, 2], False),
}


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tree_keeps_the_distribution(shape: str, replacement: bool) -> None:
    widths, comb = SHAPES[shape]
    target, draft = random_model(7, VOCAB), random_model(8, VOCAB)
    assert off(target, trees(draft, widths, comb, replacement), 3) < EXACTLY


def test_more_siblings_stand_without_replacement() -> None:
    target, draft = random_model(7, VOCAB), random_model(8, VOCAB)
    means = [texts(target, VOCAB, 3, trees(draft, [2, 2], True, again), False)[1] for again in (True, False)]
    chain = texts(target, VOCAB, 3, chains(draft, VOCAB, 2), False)[1]
    assert chain < means[0] < means[1]


def copied(drafts: Iterable[tuple[float, Proposal]], order: list[int]) -> Iterator[tuple[float, Proposal]]:
    """Siblings of one level in another order, or some of them twice."""
    for chance, draft in drafts:
        assert draft.probs is not None
        parents = np.full(len(order), -1)
        yield chance, Proposal(draft.tokens[order], parents, draft.probs[order], draft.replacement)


@pytest.mark.parametrize("order", [[0, 1, 0], [0, 0, 1], [0, 1, 1, 0]])
def test_a_sibling_that_comes_twice_changes_nothing(order: list[int]) -> None:
    """Without replacement q is 0 for the second occurrence, so it proves nothing."""
    target, draft = random_model(7, VOCAB), random_model(8, VOCAB)
    assert off(target, copied(trees(draft, [2], True, False), order), 2) < EXACTLY


@pytest.mark.parametrize("mistake", ["order", "replacement"])
def test_the_enumeration_sees_a_mistake(mistake: str) -> None:
    target, draft = random_model(7, VOCAB), random_model(8, VOCAB)
    drafts = list(trees(draft, [2], True, False))
    if mistake == "order":  # siblings are tried in the order of drawing or not at all
        wrong = copied(drafts, [1, 0])
    else:
        wrong = ((chance, Proposal(d.tokens, d.parents, d.probs, True)) for chance, d in drafts)
    assert off(target, wrong, 2) > 1e-3


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("accept", [Typical(), TopK(k=2), All(), Accept(min_block=1)])
def test_the_enumeration_sees_a_lossy_rule(accept: Accept, block: bool) -> None:
    target, draft = random_model(7, VOCAB), random_model(8, VOCAB)
    found, _ = texts(target, VOCAB, 3, chains(draft, VOCAB, 2), block, accept)
    assert found.sum() == pytest.approx(1, abs=EXACTLY)
    assert np.abs(found - plain_texts(target, VOCAB, 3)).max() > 1e-3


@pytest.mark.parametrize("block", [False, True])
def test_forced_guesses_are_followed_by_an_exact_rest(block: bool) -> None:
    """After a first draft token that is forced, the rest has the distribution of plain decoding after it."""
    target, draft = random_model(7, VOCAB), random_model(8, VOCAB)
    found, _ = texts(target, VOCAB, 3, chains(draft, VOCAB, 2), block, Accept(min_block=1))
    first = draft(())

    def mixed(prefix: tuple[int, ...]) -> np.ndarray:
        return target(prefix) if prefix else first

    np.testing.assert_allclose(found, plain_texts(mixed, VOCAB, 3), rtol=0, atol=EXACTLY)
