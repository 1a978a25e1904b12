"""A request's promises, ``exact`` and ``lossless``, match what the loop verified."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import DRAFT
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams, support
from edgespec.decoding.stats import Stats
from edgespec.decoding.verify import EXACT, Accept
from edgespec.plugins.lossy import All, TopK
from tests.support.toy import PLAIN, Scripted, chain, hash_target

VOCAB = 11
SAMPLED = SamplingParams(1.0, seed=3)


class Drawing(Drafter):
    """A method that no list names: it samples from a flat distribution, and reports it."""

    name = "drawing"

    def begin(self, request: DraftRequest) -> None:
        self.params, self.noise = request.params, request.noise

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        flat = np.zeros(VOCAB, np.float32)
        guess = support(flat, self.params, tokens).draw(self.noise, len(tokens), DRAFT + len(tokens))
        return Proposal(np.array([guess]), None, np.full((1, VOCAB), 1 / VOCAB))


def texts(
    drafter: Drafter, params: SamplingParams, accept: Accept = EXACT, exact_trees: bool = False
) -> tuple[list[int], list[int], Stats]:
    """Decode with ``drafter`` and without: return both texts and the drafter's statistics."""
    stats, options, target = Stats(), DecodeOptions(60, 4, sampling=params, accept=accept), hash_target(2)
    target.exact_trees = exact_trees
    found = [token for made in decode(target, drafter, [1], options, stats) for token in made.tokens]
    wanted = [token for made in decode(hash_target(2), PLAIN, [1], options) for token in made.tokens]
    return found, wanted, stats


def test_a_new_method_that_draws_is_not_exact() -> None:
    found, wanted, stats = texts(Drawing(), SAMPLED)
    assert stats.drafted > 0
    assert found != wanted
    assert (stats.exact, stats.lossless) == (False, True)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=3, acceptance="coupled")])
def test_the_same_method_is_exact_where_its_guesses_are_matched(params: SamplingParams) -> None:
    found, wanted, stats = texts(Drawing(), params)
    assert stats.drafted > 0
    assert found == wanted
    assert (stats.exact, stats.lossless) == (True, True)


def test_a_method_that_had_no_guess_to_verify_is_exact() -> None:
    found, wanted, stats = texts(Scripted(lambda tokens, budget: EMPTY), SAMPLED, All())
    assert found == wanted
    assert (stats.exact, stats.lossless) == (True, True)


@pytest.mark.parametrize("exact_trees", [False, True])
def test_a_tree_promises_the_text_where_its_rows_are_those_of_chains(exact_trees: bool) -> None:
    def promises(params: SamplingParams, probs: np.ndarray | None = None, accept: Accept = EXACT) -> tuple[bool, bool]:
        tree = Proposal(np.array([1, 2]), np.array([-1, -1]), probs)
        *_, stats = texts(Scripted(lambda tokens, budget: tree), params, accept, exact_trees)
        assert stats.drafted > 0
        return stats.exact, stats.lossless

    flat = np.full((2, VOCAB), 1 / VOCAB)
    assert promises(SamplingParams()) == (exact_trees, True)
    assert promises(SAMPLED) == (exact_trees, True)
    assert promises(SamplingParams(1.0, seed=3, acceptance="coupled"), flat) == (exact_trees, True)
    assert promises(SAMPLED, flat) == (False, True)  # rejection
    assert promises(SamplingParams(), None, All()) == (False, False)


@pytest.mark.parametrize("accept", [All(), TopK(k=2), Accept(min_block=1)])
def test_a_lossy_rule_promises_nothing_once_it_has_judged_a_guess(accept: Accept) -> None:
    found, wanted, stats = texts(Scripted(lambda tokens, budget: chain([4])), SamplingParams(), accept)
    assert found != wanted
    assert (stats.exact, stats.lossless) == (False, False)
