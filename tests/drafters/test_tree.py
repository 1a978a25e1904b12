"""Trees of a draft model's guesses: their shape, what they run, and that the text stays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.settings import MOST_NODES, DraftOptions, Settings
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.drafters.sampling_drafts import rows_of, widths_of
from edgespec.drafters.speculative import Speculative
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.formulas.cost import CostModel
from tests.drafters.test_chains import VOCAB, pair
from tests.support.reference import FunctionTarget, TableTarget
from tests.support.rounds import Rounds
from tests.support.toy import CutTarget, emitted, hash_logits, hash_target, plain, same_texts

BRANCHES = [(2,), (3,), (20,), (2, 1), (3, 2, 1), (1, 3), (2, 2, 2, 2)]
RULES = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4, logit_bias={1: 1.0}),
    SamplingParams(0.9, seed=3, acceptance="coupled"),
    SamplingParams(1.2, top_p=0.8, repetition_penalty=1.2, seed=4, acceptance="coupled"),
)


def drafter(branch: tuple[int, ...], seed: int = 1) -> Speculative:
    return Speculative(FunctionTarget(hash_logits(seed, VOCAB), VOCAB), VOCAB, branch=branch)


def levels(proposal: Proposal) -> list[list[int]]:
    """Tokens by depth."""
    depths = [proposal.depth(i) for i in range(len(proposal))]
    return [[int(proposal.tokens[i]) for i in range(len(proposal)) if depths[i] == d] for d in sorted(set(depths))]


@pytest.mark.parametrize("branch", BRANCHES)
def test_greedy_and_coupled_text_is_plain_text(branch: tuple[int, ...]) -> None:
    def make(seed: int) -> tuple[FunctionTarget, Speculative]:
        target, chain = pair("draft model", seed, seed + 1000)
        assert isinstance(chain, Speculative)
        return target, Speculative(chain.model, VOCAB, branch=branch)

    assert same_texts(make, 40) > 100


def test_a_tree_accepts_more_than_its_chain() -> None:
    accepted: dict[tuple[int, ...], float] = {}
    for branch in ((1,), (2,), (3, 2, 1)):
        stats = Stats()
        for seed in range(60):
            target, chain = pair("draft model", seed, seed + 1000)
            assert isinstance(chain, Speculative)
            tree = Speculative(chain.model, VOCAB, branch=branch)
            list(decode(target, tree, [1, 2], DecodeOptions(30, 3), stats))
        accepted[branch] = stats.tokens_per_round
    assert accepted[1,] < accepted[2,] < accepted[3, 2, 1]


def test_a_comb_hangs_on_the_chain_of_first_choices_and_runs_no_more_than_it() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    model = FunctionTarget(hash_logits(1, VOCAB), VOCAB)
    tree = Speculative(model, VOCAB, branch=(3,)).propose(tokens, 4)
    first = plain(hash_logits(1, VOCAB), VOCAB, tokens, 4)
    assert tree.parents is not None
    assert tree.parents.tolist() == [-1, -1, -1, 0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert [level[0] for level in levels(tree)] == first
    assert all(len(set(level)) == 3 for level in levels(tree))
    assert model.passes == [1, 1, 1, 1]
    assert model.tokens == [*tokens, *first[:3]]


def test_a_full_tree_runs_once_a_level_and_leaves_its_first_choices_in_the_slot() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    model = FunctionTarget(hash_logits(1, VOCAB), VOCAB)
    full = Speculative(model, VOCAB, branch=(3, 2, 1))
    tree = full.propose(tokens, 8)
    assert tree.parents is not None
    assert tree.parents.tolist() == [-1] * 3 + [0, 0, 1, 1, 2, 2] + [3, 4, 5, 6, 7, 8]
    first = plain(hash_logits(1, VOCAB), VOCAB, tokens, 3)
    assert [level[0] for level in levels(tree)] == first
    assert model.passes == [1, 4, 10]
    assert model.tokens == [*tokens, *first[:2]]
    model.passes.clear()
    full.propose([*tokens, *first, 9], 8)  # all first choices were accepted: the last of them and the bonus are new
    assert model.passes == [2, 4, 10]
    model.passes.clear()
    full.propose([*tokens, *first[:1], 9], 1)  # one level, which needs one pass
    assert model.passes == [1]
    assert model.tokens == [*tokens, *first[:1], 9]


@pytest.mark.parametrize("branch", BRANCHES)
def test_children_are_drawn_from_the_q_they_come_with(branch: tuple[int, ...]) -> None:
    function, params = hash_logits(4, VOCAB), SamplingParams(0.7, top_k=5, repetition_penalty=1.5, seed=2)
    tree = drafter(branch, 4)
    tree.begin(DraftRequest([], params, Noise(2)))
    proposal = tree.propose([3, 1, 4], 4)
    assert proposal.probs is not None
    assert proposal.parents is not None
    assert not proposal.replacement
    for node in range(len(proposal)):
        path, above = [3, 1, 4], []
        parent = proposal.parent(node)
        while parent >= 0:
            above.append(int(proposal.tokens[parent]))
            parent = proposal.parent(parent)
        prefix = [*path, *reversed(above)]
        wanted = distribution(function(tuple(prefix)), params, prefix)
        np.testing.assert_allclose(proposal.probs[node], wanted)
        assert wanted[proposal.tokens[node]] > 0
    for node in range(-1, len(proposal)):
        below = proposal.tokens[proposal.parents == node].tolist()
        assert len(set(below)) == len(below)  # fewer than requested if q has no more
    # the chain of first choices is the chain drafted without branching
    chain = drafter((1,), 4)
    chain.begin(DraftRequest([], params, Noise(2)))
    straight = chain.propose([3, 1, 4], len(levels(proposal))).tokens.tolist()
    assert [level[0] for level in levels(proposal)] == straight


def test_two_children_without_replacement_have_the_right_joint_distribution() -> None:
    logits = np.array([1.0, 0.3, -0.5, -1.2])
    q = np.exp(logits) / np.exp(logits).sum()
    seen = np.zeros((4, 4))
    tree = Speculative(TableTarget(np.tile(logits, (4, 1))), 4, branch=(2,))
    for seed in range(4000):
        tree.begin(DraftRequest([], SamplingParams(1.0, seed=seed), Noise(seed)))
        first, second = tree.propose([1], 1).tokens.tolist()
        seen[first, second] += 1
    expected = 4000 * q[:, None] * q[None, :] / (1 - q[:, None])
    np.fill_diagonal(expected, 0)
    off = ~np.eye(4, dtype=bool)
    assert seen.diagonal().sum() == 0
    assert ((seen - expected)[off] ** 2 / expected[off]).sum() < 31.3  # chi-square, 11 degrees, p = .001


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40))
def test_rows_are_those_of_the_tree(branch: list[int], length: int) -> None:
    try:
        shape = DraftOptions(branch=tuple(branch)).branch
    except InvalidRequest:
        return
    assert shape is not None
    widths, rows = widths_of(shape, length), rows_of(shape, length)
    assert len(rows) == length + 1
    assert rows[0] == 1
    assert rows[-1] <= 1 + MOST_NODES
    assert len(widths) <= length
    assert len({*rows}) == len(widths) + 1
    proposal = drafter(shape).propose([1, 2], length)
    if shape != (1,):
        depths = [proposal.depth(i) for i in range(len(proposal))]
        assert rows == [1 + sum(d <= depth for d in depths) for depth in range(length + 1)]


@pytest.mark.parametrize("branch", [(), (0,), (2, 0), (65,), (8, 8), [2], (1.5,), "2"])
def test_a_branch_that_is_no_tree_is_refused(branch: object) -> None:
    with pytest.raises(InvalidRequest, match="branch"):
        DraftOptions(branch=branch)  # type: ignore[arg-type]


def test_a_branch_may_be_given_as_people_write_it() -> None:
    assert Settings().changed(branch=2).drafts.branch == (2,)
    assert Settings().changed(branch=[3, 2]).drafts.branch == (3, 2)
    assert Settings().changed(branch=None).drafts.branch is None
    with pytest.raises(InvalidRequest, match="branch"):
        Settings().changed(branch=0)


def test_adaptive_control_knows_the_rows_of_a_tree() -> None:
    asked: list[int] = []

    class Cost(CostModel):
        def v(self, n: int) -> float:
            asked.append(n)
            return super().v(n)

    target, chain = pair("draft model", 3)
    assert isinstance(chain, Speculative)
    inner = Speculative(chain.model, VOCAB, branch=(3, 2, 1))
    control = Control(inner, Cost({1: 1, 20: 1.2}, 0.01), 5, fallback=False)
    text = emitted(target, Adaptive([control]), [1], DecodeOptions(20, 5))
    assert text == plain(hash_logits(3, VOCAB), VOCAB, [1], 20)
    assert set(asked) - {1} == {4, 10, 16}  # 1: what the monitor compares with
    driven = Rounds(control)
    tree = driven.propose([1, 2], 5)
    driven.learn(tree, (), RoundTime(3.0, 1.0, 1 + len(tree)))  # a step for each depth, not for each guess
    assert len(tree) > tree.deepest
    assert control.cost.timings.drafts[tree.deepest][-1] == 3.0


def test_the_drafts_own_context_ends_a_tree() -> None:
    model = FunctionTarget(hash_logits(1, VOCAB), VOCAB, context=10)
    for branch in (None, (2,), (2, 2, 2, 2)):
        tree = Speculative(model, VOCAB, branch=branch)
        assert [len(levels(tree.propose([1] * n, 4))) for n in (5, 6, 7, 9, 10, 30)] == [4, 4, 3, 1, 0, 0]
        target, stats = hash_target(2), Stats()
        text = [t for r in decode(target, tree, [1, 2], DecodeOptions(30, 4), stats) for t in r.tokens]
        assert text == plain(hash_logits(2, VOCAB), VOCAB, [1, 2], 30)
        assert stats.dropped_reason is None


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, acceptance="coupled")])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_draft_logits_are_an_error(params: SamplingParams, bad: float) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[4] = bad
    for branch in ((1,), (2,), (2, 2)):
        tree = Speculative(FunctionTarget(lambda prefix: row, VOCAB), VOCAB, branch=branch)
        tree.begin(DraftRequest([], params, Noise(1)))
        with pytest.raises(EdgespecError, match="finite"):
            tree.propose([1], 3)


# -- an LM head that was cut -------------------------------------------------------------------------------------------

KNOWN = [7, 0, 4, 2]


def cut(named: bool, branch: tuple[int, ...] | None = None) -> Speculative:
    table = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)) * 2
    return Speculative(CutTarget(table, KNOWN if named else [0, 1, 2, 3], named), VOCAB, branch=branch)


@pytest.mark.parametrize("branch", [None, (2,), (3, 2), (9,)])
@pytest.mark.parametrize("named", [False, True])
def test_a_cut_head_guesses_the_tokens_of_its_columns(named: bool, branch: tuple[int, ...] | None) -> None:
    known = KNOWN if named else [0, 1, 2, 3]
    draft = cut(named, branch)
    assert isinstance(draft.model, CutTarget)
    for params in (*RULES, SamplingParams(1.0, seed=1), SamplingParams(0.7, top_k=6, top_p=0.9, min_p=0.1, seed=1)):
        draft.begin(DraftRequest([], params, Noise(1)))
        proposal = draft.propose([9, 10, 5], 3)
        assert set(proposal.tokens.tolist()) <= set(known)
        row = np.full(VOCAB, -np.inf, np.float32)
        row[known] = draft.model.function((9, 10, 5))[known]
        if params.plain_greedy:
            assert proposal.tokens[0] == known[int(row[known].argmax())]
        if proposal.probs is not None:
            assert proposal.probs.shape == (len(proposal), VOCAB)
            np.testing.assert_allclose(proposal.probs[0], distribution(row, params, [9, 10, 5]))
            assert (np.delete(proposal.probs, known, 1) == 0).all()


@pytest.mark.parametrize("branch", [None, (2,), (3, 2)])
def test_a_cut_head_changes_no_text(branch: tuple[int, ...] | None) -> None:
    assert same_texts(lambda seed: (hash_target(seed), cut(True, branch)), 30, [9, 10]) > 50


def test_bias_and_penalty_of_a_cut_head_act_on_tokens() -> None:
    draft = cut(True)
    draft.begin(DraftRequest([], SamplingParams(logit_bias={4: 100.0}), Noise(0)))
    assert draft.propose([1], 2).tokens.tolist() == [4, 4]
    draft.begin(DraftRequest([], SamplingParams(logit_bias={4: 100.0, 5: 200.0}), Noise(0)))  # 5 has no column
    assert draft.propose([1], 2).tokens.tolist() == [4, 4]
    flat = Speculative(CutTarget(np.ones((VOCAB, VOCAB)), KNOWN), VOCAB)
    flat.begin(DraftRequest([], SamplingParams(repetition_penalty=2.0), Noise(0)))
    assert flat.propose([0, 2], 3).tokens.tolist() == [4, 7, 0]  # the seen ones last
