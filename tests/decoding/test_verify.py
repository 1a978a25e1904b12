"""Verification: matching equals plain decoding, rejection keeps the distribution; the tests can tell a lossy rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.drafter import EMPTY, Proposal, Verdict
from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.verify import EXACT, Accept, RowSampler, verify
from edgespec.errors import EdgespecError
from tests.support.toy import chi_square, naive_distribution

VOCAB, DRAWS = 5, 5000
SAMPLING = [
    SamplingParams(1.0),
    SamplingParams(0.6, top_k=3),
    SamplingParams(1.5, top_p=0.75),
    SamplingParams(1.0, min_p=0.2, repetition_penalty=1.6),
]
Rule = Callable[[Proposal, RowSampler, Noise], Verdict]


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


class Problem:
    """Two steps of a random target and draft; emits pairs of tokens by verifying one drafted proposal after another."""

    def __init__(self, seed: int, params: SamplingParams) -> None:
        rng = np.random.default_rng(seed)
        self.params = params
        self.logits = np.float32(rng.normal(size=(VOCAB + 1, VOCAB)) * 1.5)  # by first token; last = none
        self.q = rng.dirichlet(np.ones(VOCAB) * 0.8, VOCAB + 1)
        self.q[1, 2] = 0  # a token the draft never guesses
        self.q[1] /= self.q[1].sum()

    def expected(self) -> dict[tuple[int, ...], float]:
        first = naive_distribution(self.logits[VOCAB].tolist(), self.params, [1])
        return {
            (a, b): first[a] * naive_distribution(self.logits[a].tolist(), self.params, [1, a])[b]
            for a in range(VOCAB)
            for b in range(VOCAB)
        }

    def rows(self, tokens: Sequence[int], proposal: Proposal, noise: Noise) -> RowSampler:
        last = [VOCAB if len(tokens) == 1 else tokens[-1], *proposal.tokens.tolist()]
        return RowSampler(self.logits[last], tokens, proposal, self.params, noise)

    def run(
        self, draft: Callable[[Problem, int, np.random.Generator], Proposal], rule: Rule
    ) -> Counter[tuple[int, ...]]:
        counts: Counter[tuple[int, ...]] = Counter()
        rng = np.random.default_rng(0)
        for seed in range(DRAWS):
            noise, tokens = Noise(seed), [1]
            while len(tokens) < 3:
                proposal = draft(self, VOCAB if len(tokens) == 1 else tokens[-1], rng)
                verdict = rule(proposal, self.rows(tokens, proposal, noise), noise)
                tokens += [int(proposal.tokens[i]) for i in verdict.path] + [verdict.next_token]
            counts[tokens[1], tokens[2]] += 1
        return counts


def one_hot(problem: Problem, last: int, rng: np.random.Generator) -> Proposal:
    return Proposal(np.array([(last + 1) % VOCAB, last % VOCAB]))


def one_hot_tree(problem: Problem, last: int, rng: np.random.Generator) -> Proposal:
    return Proposal(np.array([0, 3, 3, 1, 2]), np.array([-1, -1, -1, 1, 0]))


def drawn(q: NDArray[np.float64], count: int, replacement: bool, rng: np.random.Generator) -> Sequence[int]:
    if replacement:
        return [int(t) for t in np.searchsorted(np.cumsum(q), rng.random(count) * q.sum(), side="right")]
    with np.errstate(divide="ignore"):  # Gumbel top-k draws without replacement, in order
        keys = np.log(q) + rng.gumbel(size=len(q))
    return [int(t) for t in np.argsort(-keys)[: min(count, int((q > 0).sum()))]]


def drawn_chain(problem: Problem, last: int, rng: np.random.Generator) -> Proposal:
    first = drawn(problem.q[last], 1, True, rng)[0]
    return Proposal(np.array([first, *drawn(problem.q[first], 1, True, rng)]), None, problem.q[[last, first]])


def drawn_tree(replacement: bool) -> Callable[[Problem, int, np.random.Generator], Proposal]:
    def draft(problem: Problem, last: int, rng: np.random.Generator) -> Proposal:
        top = drawn(problem.q[last], 3, replacement, rng)
        low = [(i, t) for i, token in enumerate(top[:2]) for t in drawn(problem.q[token], 2, replacement, rng)]
        tokens = np.array([*top, *(t for _, t in low)])
        parents = np.array([-1] * len(top) + [i for i, _ in low])
        probs = problem.q[[*([last] * len(top)), *(top[i] for i, _ in low)]]
        return Proposal(tokens, parents, probs, replacement)

    return draft


DRAFTS = {
    "none": lambda problem, last, rng: EMPTY,
    "one-hot chain": one_hot,
    "one-hot tree": one_hot_tree,
    "chain with q": drawn_chain,
    "siblings with replacement": drawn_tree(True),
    "siblings without replacement": drawn_tree(False),
}


# Matching never looks at p, so how it was adjusted matters little there; trees are slow.
CASES = [(name, params) for name in DRAFTS for i, params in enumerate(SAMPLING) if i == 0 or "q" in name or i == 3]
CASES += [("chain with q", SamplingParams(1.0, verification="block")),
          ("chain with q", SamplingParams(1.5, top_p=0.75, repetition_penalty=1.6, verification="block"))]  # fmt: skip


@pytest.mark.parametrize(("name", "params"), CASES)
def test_the_pairs_of_tokens_keep_their_distribution(name: str, params: SamplingParams) -> None:
    problem = Problem(1, params)
    assert chi_square(problem.run(DRAFTS[name], verify), problem.expected()) > 1e-3


@pytest.mark.parametrize("name", ["one-hot chain", "chain with q", "siblings without replacement"])
def test_the_same_test_refuses_a_lossy_rule(name: str) -> None:
    problem = Problem(1, SAMPLING[0])
    assert chi_square(problem.run(DRAFTS[name], verify_lossy_example), problem.expected()) < 1e-6


def test_a_drawn_guess_may_be_verified_as_a_deterministic_one() -> None:
    """Fewer are accepted, but it is lossless: what to do with a guess whose q is not known exactly."""

    def draft(problem: Problem, last: int, rng: np.random.Generator) -> Proposal:
        right = drawn_tree(False)(problem, last, rng)
        return Proposal(right.tokens, right.parents)

    problem = Problem(1, SAMPLING[0])
    assert chi_square(problem.run(draft, verify), problem.expected()) > 1e-3


@pytest.mark.parametrize("wrong", ["replacement", "q"])
def test_the_same_test_refuses_siblings_verified_as_what_they_are_not(wrong: str) -> None:
    """The classic mistakes: no renormalisation of q, and a q that is not the one the guesses were drawn from."""

    def draft(problem: Problem, last: int, rng: np.random.Generator) -> Proposal:
        right = drawn_tree(False)(problem, last, rng)
        assert right.probs is not None
        if wrong == "replacement":
            return Proposal(right.tokens, right.parents, right.probs, True)
        if wrong == "q":
            return Proposal(right.tokens, right.parents, np.full_like(right.probs, 1 / VOCAB), False)
        one = np.eye(VOCAB)[right.tokens]
        return Proposal(right.tokens, right.parents, one, True)

    problem = Problem(1, SAMPLING[0])
    assert chi_square(problem.run(draft, verify), problem.expected()) < 1e-3


def test_more_siblings_are_accepted_more_often_without_replacement() -> None:
    problem = Problem(2, SAMPLING[0])
    accepted = {}
    for replacement in (True, False):
        total = 0
        for seed in range(3000):
            noise = Noise(seed)
            proposal = drawn_tree(replacement)(problem, VOCAB, np.random.default_rng(seed))
            total += len(verify(proposal, problem.rows([1], proposal, noise), noise).path)
        accepted[replacement] = total
    assert accepted[False] > accepted[True]


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
    # Sampled: with a noise that accepts the guess, so that its row is looked at.
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
