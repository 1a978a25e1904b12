"""SWIFT: the search for a skip set, its budget, what is kept of it, and the combs that are drafted."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import HYPOTHESES, Output, Pass, SkipSet
from edgespec.drafters.plain import Plain
from edgespec.drafters.sampling_drafts import paper_width
from edgespec.errors import InvalidRequest
from edgespec.formulas.confidence import Confidence
from edgespec.formulas.cost import CostModel
from edgespec.plugins.swift.drafter import DEPTH, ROWS, StepCost, Swift, matches
from edgespec.plugins.swift.search import OnlineSearch
from tests.support.reference import FunctionTarget
from tests.support.toy import emitted, hash_logits, hash_target, same_texts

VOCAB, LAYERS = 11, 8
START = SkipSet((1, 3, 5), (1, 3, 5))
GOOD = SkipSet((2, 3, 4, 5, 6), (4,))
FLAT = CostModel({1: 1.0, 16: 1.5}, 0.5)
FREE = CostModel({1: 1.0, 2: 1.0}, 0.5)  # rows are free: siblings are always worth it
NOTHING = Output(np.zeros((1, VOCAB), np.float32))


def bad_parts(skip: SkipSet) -> int:
    """Sub-layers left out that the planted set does not leave out."""
    return len(set(skip.attention) - set(GOOD.attention)) + len(set(skip.mlp) - set(GOOD.mlp))


class PlantedTarget(FunctionTarget):
    """A target whose drafts are right, except one token in five for each sub-layer that must not be skipped."""

    can = FunctionTarget.can | {HYPOTHESES}

    layers = LAYERS

    def __init__(self, seed: int = 0) -> None:
        super().__init__(hash_logits(seed, VOCAB, 1000), VOCAB)
        self.scored: list[tuple[list[int], list[int], list[int], SkipSet]] = []

    def guess(self, prefix: tuple[int, ...], skip: SkipSet) -> NDArray[np.float32]:
        logits = self.function(prefix).copy()
        if (sum(prefix) + len(prefix)) % 5 < bad_parts(skip):
            logits[(int(logits.argmax()) + 1) % VOCAB] = 2000
        return logits

    def run(self, wanted: Pass) -> Output:
        skip = wanted.skip
        if wanted.visible is not None:
            assert wanted.tokens is not None
            assert wanted.parents is not None
            assert skip is not None
            return self.score(wanted.tokens, wanted.visible, wanted.parents, skip)
        output = super().run(wanted)
        if not wanted.draft:
            return output
        assert skip is not None
        return Output(self.guess((*self.tokens, *self._draft_rows), skip)[None])

    def score(
        self, tokens: NDArray[np.int64], visible: NDArray[np.int64], parents: NDArray[np.int64], skip: SkipSet
    ) -> Output:
        assert self._rows is None, "a pass between another one and keep"
        self.scored.append((tokens.tolist(), visible.tolist(), parents.tolist(), skip))
        prefixes: list[tuple[int, ...]] = []
        for token, seen, parent in zip(tokens.tolist(), visible.tolist(), parents.tolist(), strict=True):
            prefixes.append((*(prefixes[parent] if parent >= 0 else tuple(self.tokens[:seen])), token))
        return Output(np.stack([self.guess(prefix, skip) for prefix in prefixes]))


def make(
    target: FunctionTarget | None = None, share: float = 1.0, seed: int = 0, costs: CostModel = FLAT, **more: Any
) -> tuple[FunctionTarget, Swift]:
    target = target or PlantedTarget(seed)
    step = StepCost(0.06, 0.06)
    search = OnlineSearch(LAYERS, START, step, FLAT.v, seed)
    return target, Swift(target, search, step, costs, share, **more)


def write(target: FunctionTarget, drafter: Any, new: int, prompt: list[int] | None = None, **sampling: Any) -> Stats:
    stats = Stats()
    options = DecodeOptions(new, 4, sampling=SamplingParams(**sampling))
    list(decode(target, drafter, prompt or [1, 2], options, stats))
    assert stats.dropped_reason is None
    return stats


# -- scoring while decoding --------------------------------------------------------------------------------------------


def test_the_window_slides_over_the_tokens_just_written() -> None:
    target, drafter = make()
    assert isinstance(target, PlantedTarget)
    assert HYPOTHESES in target.can
    prompt = [3] * 20
    write(target, drafter, 120, prompt)
    text = target.tokens
    assert drafter.passes == len(target.scored) > 5
    assert target.scored[0][3] == START
    ends = []
    for tokens, visible, parents, _ in target.scored:
        assert len(tokens) == ROWS
        first = visible[0]
        assert first + 1 > len(prompt) - 1  # only what was written is a truth
        assert tokens == text[first : first + ROWS]
        assert visible == [first + at - at % DEPTH for at in range(ROWS)]
        assert parents == [at - 1 if at % DEPTH else -1 for at in range(ROWS)]
        ends.append(first + ROWS)
    assert ends == sorted(set(ends))
    assert ends[-1] > len(prompt) + 90


def test_matchness_is_what_a_draft_would_have_guessed() -> None:
    target = PlantedTarget()
    write(target, Plain(), 60)
    assert matches(target, GOOD) == ROWS
    assert matches(target, SkipSet()) == ROWS
    worst = matches(target, SkipSet((1,), (1, 2, 3, 5)))
    assert worst == 0


def test_it_finds_a_better_set_while_decoding_and_drafts_with_it() -> None:
    target, drafter = make(share=1.0)
    for at in range(6):
        write(target, drafter, 400, [at + 1])
    assert drafter.search.best != START
    assert drafter.skip == drafter.search.best
    assert bad_parts(drafter.skip) == 0
    assert drafter.forecast(3)[0] != 0
    assert len(drafter.skip) >= 3
    assert drafter.search.candidates > 20
    assert "sets tried" in drafter.reason


class Clock:
    """Every look at it is 3 milliseconds after the last."""

    def __init__(self) -> None:
        self.looks = count()

    def __call__(self) -> float:
        return 0.003 * next(self.looks)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_the_budget_is_kept(share: float) -> None:
    target, drafter = make(share=share, clock=Clock())
    target.prefill([1, 2, *range(11), *range(11), *range(11)])
    drafter.begin(DraftRequest([1]))
    most = 0.0
    for at in range(3000):
        target.tokens.append(at % VOCAB)
        drafter.timed(EMPTY, RoundTime(0.5, 1.0, 1))
        most = max(most, drafter.search_ms - share * drafter.decoded_ms)
    assert most <= 0
    assert (drafter.passes > 0) is (share > 0)
    if share:
        assert drafter.search_share > share / 3
        assert drafter.search_ms == pytest.approx(3 * drafter.passes)


def test_nothing_is_searched_where_nothing_can_be_scored() -> None:
    target = hash_target(1)
    target.layers = LAYERS
    _, drafter = make(target)
    write(target, drafter, 60)
    assert drafter.passes == 0
    assert "cannot score" in drafter.reason

    class Ring(PlantedTarget):
        def score(self, *arguments: Any, **more: Any) -> Output:
            raise InvalidRequest("too far back")

    target, drafter = make(Ring())
    stats = write(target, drafter, 60)
    assert drafter.passes == 0
    assert "too far back" in drafter.search.stopped
    assert stats.drafted > 0


def test_a_cache_does_not_grow_for_the_search() -> None:
    target, drafter = make()
    target.capacity = 30  # type: ignore[attr-defined]
    write(target, drafter, 100)
    assert drafter.passes == 0


def test_a_seeded_text_depends_on_no_search() -> None:
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    target, drafter = make()
    options = DecodeOptions(40, 4, sampling=SamplingParams(**seeded))
    fresh = emitted(target, drafter, [1], options)
    assert drafter.passes == 0
    for at in range(3):
        write(target, drafter, 300, [at + 1])
    assert drafter.skip != START
    assert emitted(target, drafter, [1], options) == fresh
    assert drafter.skip == START
    assert "seeded" in drafter.reason
    write(target, drafter, 5)
    assert drafter.skip == drafter.search.best != START


# -- drafting ----------------------------------------------------------------------------------------------------------


def unsure(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    """Two thirds for one token, most of the rest for another."""
    logits = np.full(VOCAB, -4, np.float32)
    logits[len(prefix) % VOCAB], logits[(len(prefix) + 5) % VOCAB] = 2.0, 1.3
    return logits


def comb(branch: tuple[int, ...] | None, budget: int = 3, costs: CostModel | None = None, **sampling: Any) -> Proposal:
    target = FunctionTarget(unsure, VOCAB)
    target.layers = LAYERS
    step, curve = StepCost(0.05, 0.05), costs or FREE
    search = OnlineSearch(LAYERS, START, step, curve.v)
    drafter = Swift(target, search, step, curve, branch=branch)
    drafter.begin(DraftRequest([], SamplingParams(**sampling), Noise(3)))
    target.prefill([1, 1])
    return drafter.propose([1, 1, 1], budget)


def test_a_comb_has_siblings_without_children() -> None:
    found = comb((2,))
    assert found.tokens.tolist() == [3, 4, 5, 8, 9, 10]
    assert found.parents is not None
    assert found.parents.tolist() == [-1, 0, 1, -1, 0, 1]
    assert comb((1,)).parents is None
    assert comb((2, 1)).tokens.tolist() == [3, 4, 5, 8]
    assert comb(None).parents is None
    assert comb((2,), 1).tokens.tolist() == [3, 8]
    assert len(comb((10,), 2)) == 2 * paper_width(0.6, True)


def test_siblings_are_offered_where_they_pay() -> None:
    dear, free = CostModel({1: 1.0, 2: 2.0, 3: 3.0}, 0.5), CostModel({1: 1.0, 16: 1.01}, 0.5)
    assert comb((3,), costs=dear).parents is None
    assert comb((3,), costs=free).parents is not None
    middle = comb((3,), costs=CostModel({1: 1.0, 2: 1.28, 3: 1.56}, 0.5))
    assert middle.tokens.tolist() == [3, 4, 5, 8]  # only where the chain is sure to be reached


def test_confidence_follows_the_chain_alone() -> None:
    _, drafter = make()
    tree = Proposal(np.arange(6), np.array([-1, 0, 1, -1, 0, 1]))
    seen = drafter.confidence.seen
    # a sibling does not count as a match of the chain
    for path, counts in (([0, 1, 2], [0, 0, 2, 1]), ([0, 4], [0, 0, 4, 1])):
        drafter._sure = [0.4, 0.4, 0.6]
        drafter.observe(tree, Verdict(path, 1), NOTHING)
        assert seen[:4] == counts
    assert drafter.confidence.rates[2] < Confidence().rates[2] + 4 / 12


@pytest.mark.parametrize("branch", [None, (1,), (2,), (10, 3)])
def test_greedy_and_coupled_text_is_plain_text(branch: tuple[int, ...] | None) -> None:
    def drawn(seed: int) -> tuple[FunctionTarget, Swift]:
        return make(seed=seed, branch=branch, costs=FREE if seed % 2 else FLAT)

    same_texts(drawn, 25, fresh=PlantedTarget)


def test_it_works_inside_adaptive_control() -> None:
    target, drafter = make()
    policy = Adaptive([Control(drafter, CostModel({1: 1.0, 16: 1.5}, 0.3), 6)])
    plain_text = emitted(PlantedTarget(), Plain(), [1], DecodeOptions(200, 4))
    assert emitted(target, policy, [1], DecodeOptions(200, 4)) == plain_text
    assert "leaves out" in policy.details[-1]
    drafter.benchmark_step()
