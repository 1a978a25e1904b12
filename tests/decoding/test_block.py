"""Block verification by hand: which beginning stands, and which rows are read."""

from __future__ import annotations

import numpy as np

from edgespec.decoding.drafter import Proposal, Verdict
from edgespec.decoding.noise import Noise
from edgespec.decoding.verify import verify
from tests.decoding.test_verify import FixedNoise, FixedRows


class ScriptedNoise(Noise):
    """Uniform numbers in the order of being asked."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def uniform(self, position: int, stream: int) -> float:
        return self.numbers.pop(0)


def test_the_last_beginning_that_passes_stands_even_after_one_that_did_not() -> None:
    p, q = [0.5, 0.5], np.array([[0.8, 0.2], [0.2, 0.8]])
    rows = FixedRows([p, p, [0, 1]], block=True)
    guesses = Proposal(np.array([0, 0]), None, q)
    held = 0.5 / 0.8  # after one guess; after two: min(1, held * .5 / .2) = 1
    first = max(held * 0.5 - 0.2, 0)
    passes = first / (first + 1 - held)
    assert verify(guesses, rows, ScriptedNoise(passes + 1e-9, 1 - 1e-9)) == Verdict(range(2), 1)
    one = Proposal(np.array([0, 1]), None, q)  # held falls to .625 * .5 / .8
    assert verify(one, rows, ScriptedNoise(passes - 1e-9, held * 0.5 / 0.8 + 1e-9, 0.0)) == Verdict(range(1), 0)
    assert verify(one, rows, ScriptedNoise(passes + 1e-9, held * 0.5 / 0.8 + 1e-9, 0.0)) == Verdict(range(0), 1)


def test_a_beginning_whose_residual_is_empty_stands_only_as_part_of_a_longer_one() -> None:
    p, q = [0.5, 0.5], np.array([[0.8, 0.2], [0.5, 0.5]])
    rows, guesses = FixedRows([p, p, [0, 1]], block=True), Proposal(np.array([0, 0]), None, q)
    held = 0.5 / 0.8  # after one guess and after two; held p - q <= 0 everywhere after the first
    assert verify(guesses, rows, ScriptedNoise(0.0, held + 1e-9, 0.0)) == Verdict(range(0), 1)
    assert verify(guesses, rows, ScriptedNoise(0.0, held - 1e-9, 0.0)) == Verdict(range(2), 1)


def test_a_block_reads_no_row_behind_a_guess_that_the_target_excludes() -> None:
    q = np.full((3, 2), 0.5)
    rows = FixedRows([[0.5, 0.5], [0, 1], [np.nan, np.nan], [np.nan, np.nan]], block=True)
    verdict = verify(Proposal(np.array([0, 0, 0]), None, q), rows, FixedNoise(0.0))
    assert (list(verdict.path), verdict.next_token, rows.read) == ([0], 1, {0, 1})


def test_a_block_ends_before_a_guess_that_q_cannot_have_drawn() -> None:
    q = np.array([[0.5, 0.5], [0.0, 1.0]])
    rows = FixedRows([[0.5, 0.5], [1, 0], [1, 0]], block=True)
    assert verify(Proposal(np.array([1, 0]), None, q), rows, FixedNoise(0.5)) == Verdict(range(1), 0)
    assert rows.read == {0, 1}


def test_a_block_survives_a_tiny_q_and_equal_distributions() -> None:
    tiny = Proposal(np.array([0]), None, np.array([[5e-324, 1.0]]))
    assert verify(tiny, FixedRows([[0.5, 0.5], [0, 1]], block=True), FixedNoise(1 - 2**-53)) == Verdict(range(1), 1)
    equal = Proposal(np.array([0, 1]), None, np.array([[0.3, 0.7]] * 2))
    assert verify(equal, FixedRows([[0.3, 0.7]] * 3, block=True), FixedNoise(1 - 2**-53)) == Verdict(range(2), 1)
    # out of range on purpose: nothing passes, and nothing is left of p - q
    assert verify(equal, FixedRows([[0.3, 0.7]] * 3, block=True), FixedNoise(1.0)) == Verdict(range(0), 1)


def test_trees_greedy_chains_and_drawn_matches_are_no_blocks() -> None:
    q = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    p = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    for parents, matching, probs in ((None, True, q), (None, False, None), (np.array([-1, 0]), False, q)):
        for block in (False, True):
            rows = FixedRows(p, matching, block)
            verdict = verify(Proposal(np.array([1, 2]), parents, probs), rows, FixedNoise(0.0))
            assert (list(verdict.path), verdict.next_token) == ([0, 1], 0)
