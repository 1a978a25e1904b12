"""Verification: matching equals plain decoding, rejection keeps the distribution; the tests can tell a lossy rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verify import EXACT, Accept, RowSampler, verify
from edgespec.errors import EdgespecError

VOCAB, DRAWS = 5, 5000


def verify_lossy_example(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Typical acceptance (Medusa, arXiv 2401.10774): accept any guess that p does not find unlikely.  NOT lossless."""
    path: list[int] = []
    while True:
        row = path[-1] + 1 if path else 0
        p = rows.distribution(row)
        below = [i for i in proposal.children(row - 1) if p[proposal.tokens[i]] > 0.15]
        if not below:
            return Verdict(path, rows.choose(row))
        path.append(below[0])


class FixedRows(RowSampler):
    """RowSampler with given p; choose = the most likely token."""

    def __init__(self, p: Sequence[Sequence[float]], matching: bool = False, block: bool = False) -> None:
        self.p, self.matching, self.block = np.array(p, np.float64), matching, block
        self.read: set[int] = set()

    def choose(self, row: int) -> int:
        self.read.add(row)
        return int(self.p[row].argmax())

    def distribution(self, row: int) -> NDArray[np.float64]:
        self.read.add(row)
        return np.asarray(self.p[row])

    def chances(self, row: int) -> NDArray[np.float64]:
        return self.distribution(row)

    def likeliest(self, row: int) -> int:
        return self.choose(row)

    def rank(self, row: int, token: int) -> int:
        self.read.add(row)
        return int((self.p[row] > self.p[row][token]).sum() + (self.p[row][:token] == self.p[row][token]).sum())

    def position(self, row: int) -> int:
        return row


class FixedNoise(Noise):
    """Noise whose every uniform number is ``u``."""

    def __init__(self, u: float) -> None:
        super().__init__(0)
        self.u = u

    def uniform(self, position: int, stream: int) -> float:
        return self.u


def test_a_guess_the_target_excludes_is_refused_even_at_u_zero() -> None:
    q = np.array([[0.5, 0.5, 0.0]])
    verdict = verify(Proposal(np.array([0]), None, q), FixedRows([[0, 0.2, 0.8], [1, 0, 0]]), FixedNoise(0.0))
    assert list(verdict.path) == []
    assert verdict.next_token == 2  # p - q is positive only there


def test_a_tiny_q_neither_overflows_nor_refuses() -> None:
    q = np.array([[5e-324, 1.0, 0.0]])
    verdict = verify(Proposal(np.array([0]), None, q), FixedRows([[0.5, 0, 0.5], [0, 0, 1]]), FixedNoise(1 - 2**-53))
    assert (list(verdict.path), verdict.next_token) == ([0], 2)


def test_equal_p_and_q_fall_back_to_p_if_rounding_refuses() -> None:
    p = [0.3, 0.7]
    rows = FixedRows([p, p])
    noise = FixedNoise(1.0)  # out of range on purpose: u q < p fails, and the residual is all zero
    verdict = verify(Proposal(np.array([0]), None, np.array([p])), rows, noise)
    assert list(verdict.path) == []
    assert verdict.next_token == 1


def test_a_guess_that_q_cannot_have_drawn_changes_nothing() -> None:
    q = np.array([[0.0, 1.0], [0.0, 1.0]])
    proposal = Proposal(np.array([0, 0]), np.array([-1, -1]), q, replacement=False)
    verdict = verify(proposal, FixedRows([[0.5, 0.5]] * 3), FixedNoise(0.9))
    assert (list(verdict.path), verdict.next_token) == ([], 1)


def test_a_sibling_of_which_nothing_is_left_changes_nothing_and_no_guess_of_a_tree_is_forced() -> None:
    drawn = Proposal(np.array([0, 1]), np.array([-1, -1]), np.array([[1.0, 0.0], [1.0, 0.0]]), replacement=False)
    rows = FixedRows([[0.0, 1.0]] * 3)  # without the first sibling q is zero everywhere
    for accept in (EXACT, Accept(min_block=2)):
        assert verify(drawn, rows, FixedNoise(0.0), accept) == Verdict([], 1)


def test_greedy_matching_ignores_q() -> None:
    q = np.full((2, 3), 1 / 3)
    rows = FixedRows([[0, 1, 0], [0, 0, 1], [1, 0, 0]], matching=True)
    assert verify(Proposal(np.array([1, 2]), None, q), rows, Noise(0)) == Verdict(range(2), 0)
    assert verify(Proposal(np.array([1, 1]), None, q), rows, Noise(0)) == Verdict(range(1), 2)


def test_equal_siblings_and_the_empty_proposal() -> None:
    rows = FixedRows([[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]], matching=True)
    tree = Proposal(np.array([1, 1, 2]), np.array([-1, -1, 1]))
    verdict = verify(tree, rows, Noise(0))
    assert (list(verdict.path), verdict.next_token) == ([0], 2)  # the first of equals, whose children count
    assert verify(EMPTY, rows, Noise(0)).next_token == 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)])
def test_nan_in_a_row_that_is_needed_is_an_error(params: SamplingParams) -> None:
    logits = np.zeros((2, 3), np.float32)
    logits[1] = np.nan
    proposal = Proposal(np.array([0]))
    # Sampled: with noise that accepts the draft token, so that its row is read.
    noise = next(n for n in map(Noise, range(50)) if RowSampler(logits, [1], proposal, params, n).choose(0) == 0)
    rows = RowSampler(logits, [1], proposal, params, noise)
    with pytest.raises(EdgespecError, match="finite"):
        verify(proposal, rows, noise)


def test_children_and_depths_tested() -> None:
    chain = Proposal(np.array([4, 5, 6]))
    assert [list(chain.children(node)) for node in range(-1, 3)] == [[0], [1], [2], []]
    assert [chain.tested(range(n)) for n in range(4)] == [1, 2, 3, 3]
    tree = Proposal(np.array([4, 5, 6]), np.array([-1, -1, 1]))
    assert [list(tree.children(node)) for node in range(-1, 3)] == [[0, 1], [], [2], []]
    assert [tree.tested(path) for path in ([], [0], [1], [1, 2])] == [1, 1, 2, 2]


# -- blocks, by hand: which prefix is accepted, and which rows are read
# -------------------------------------------------


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
