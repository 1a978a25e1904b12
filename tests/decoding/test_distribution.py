"""Sampling with every drafter, through the whole loop: three tokens have the distribution of plain sampling.

The expected numbers are an enumeration by an independent implementation of the sampling rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.noise import BLOCK, Noise
from edgespec.decoding.noise import DRAFT as DRAWING
from edgespec.decoding.policy import Ask, Policy
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import SkipSet
from edgespec.decoding.verify import EXACT, Accept
from edgespec.drafters.ngram import NGram
from edgespec.drafters.plain import Plain
from edgespec.drafters.proposer import UserDrafter
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.drafters.uno import Uno
from edgespec.formulas.cost import CostModel
from edgespec.formulas.statistics import chi_square
from edgespec.plugins.drawing.lantern import Lantern
from edgespec.plugins.lossy import All, Distance, TopK, Typical
from edgespec.plugins.swift.drafter import StepCost, Swift
from edgespec.plugins.swift.search import OnlineSearch
from tests.decoding.test_verify import verify_lossy_example
from tests.support.reference import TableTarget
from tests.support.toy import CutTarget, SampledTree, ShortTarget, exact, sample_texts

VOCAB, DRAWS, NEW = 4, 2500, 3  # enough to refuse every lossy rule with p < 1e-6
MANY = 10000  # what a block that reads used numbers needs to be refused
PROMPT = [1, 2, 1, 3, 1]
_rng = np.random.default_rng(5)
TABLE = _rng.normal(size=(VOCAB,) * 3) * 1.3
DRAFT = TABLE + _rng.normal(size=TABLE.shape) * 0.8
Q = _rng.dirichlet(np.ones(VOCAB), VOCAB)

DRAFTERS: dict[str, Callable[[TableTarget], Policy | Drafter]] = {
    "ar": lambda target: Plain(),
    "ngram": lambda target: NGram(),
    "draft model": lambda target: Speculative(TableTarget(DRAFT), VOCAB),
    "self-spec": lambda target: Stopping([SelfSpec(target, SkipSet((0,)))]),
    "swift chain": lambda target: Stopping([swift(target, (1,))]),
    "swift with siblings": lambda target: Stopping([swift(target, None)]),
    "chain of drafters": lambda target: Policy([NGram(), swift(target, (2,))]),
    "uno": lambda target: Uno(target, 1, np.array([0, 3])),
    "own proposer": lambda target: UserDrafter(SimpleNamespace(propose=lambda tokens, budget: [2, 1]), VOCAB),
    "comb": lambda target: Speculative(TableTarget(DRAFT), VOCAB, branch=(2,)),
    "full tree": lambda target: Speculative(TableTarget(DRAFT), VOCAB, branch=(3, 2)),
    "comb of a cut head": lambda target: Speculative(CutTarget(DRAFT, [3, 0, 1]), VOCAB, branch=(2,)),
    "adaptive comb": lambda target: Adaptive(
        [Control(Speculative(TableTarget(DRAFT), VOCAB, branch=(2,)), CostModel({1: 1, 2: 1.1}, 0.1), 2)]
    ),
    "tree without replacement": lambda target: SampledTree(Q, [3, 2], False),
}


def swift(target: TableTarget, branch: tuple[int, ...] | None) -> SelfSpec:
    """Build a SWIFT drafter over ``target`` whose drafts stop, and ``branch`` into siblings, where the text decides."""
    target.layers = 4
    step, costs = StepCost(0.1, 0.1), CostModel({1: 1.0, 2: 1.04, 3: 1.05, 4: 1.2}, 0.2)
    if branch:  # rows are free: siblings are worth it
        costs = CostModel({1: 1.0, 2: 1.0}, 0.2)
    search = OnlineSearch(4, SkipSet((1,)), step, costs.v)
    return Swift(target, search, step, costs, branch=branch or (3,))


class Stopping(Policy):
    """Lets drafts stop where the first guess is one that is right in less than .7 of all cases."""

    def choose(self, tokens: list[int], budget: int) -> list[Ask]:
        return [Ask(one, budget, self._gain(one)) for one in self.drafters]

    def _gain(self, drafter: Drafter) -> Callable[[int], float]:
        assert isinstance(drafter, SelfSpec)
        return lambda depth: 0.7 * drafter.confidence.mean


PLAIN_SAMPLING = SamplingParams(1.0)


def p_value(name: str, params: SamplingParams, draws: int = DRAWS, accept: Accept = EXACT, gamma: int = 2) -> float:
    """Compute the p-value for the texts of ``draws`` requests with different seeds."""
    target = TableTarget(TABLE, draft_table=DRAFT)
    drafter = DRAFTERS[name](target)
    counts = sample_texts(target, drafter, PROMPT, NEW, lambda i: replace(params, seed=i), draws, gamma, accept)
    return chi_square(counts, exact(target.function, VOCAB, PROMPT, NEW, params))


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "comb"])  # two others are also combs
def test_every_drafter_keeps_the_distribution(name: str) -> None:
    assert p_value(name, PLAIN_SAMPLING) > 1e-3


@pytest.mark.parametrize("name", ["draft model", "tree without replacement", "swift with siblings"])
def test_the_same_test_refuses_a_lossy_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.decoding.loop.verify", verify_lossy_example)
    assert p_value(name, PLAIN_SAMPLING, 2500) < 1e-6


@pytest.mark.parametrize("branch", [None, (2,), (3, 2)])
def test_a_short_head_keeps_the_distribution(branch: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.drafters.speculative._COMMON", 4)  # some texts have more of the others, some have not
    draft = ShortTarget(DRAFT)
    drafter = Speculative(draft, VOCAB, branch, 3)
    target = TableTarget(TABLE)
    counts = sample_texts(target, drafter, PROMPT, NEW, lambda i: replace(PLAIN_SAMPLING, seed=i), DRAWS, 2, EXACT)
    assert chi_square(counts, exact(target.function, VOCAB, PROMPT, NEW, PLAIN_SAMPLING)) > 1e-3
    assert set(draft.scored) == {3, VOCAB}


BLOCKS = SamplingParams(1.0, verification="block")


@pytest.mark.parametrize("name", ["draft model", "self-spec"])
def test_block_verification_keeps_the_distribution(name: str) -> None:
    assert p_value(name, BLOCKS, MANY if name == "draft model" else DRAWS) > 1e-3


def test_block_verification_keeps_the_distribution_under_all_rules() -> None:
    params = replace(BLOCKS, temperature=0.9, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.2)
    assert p_value("draft model", params) > 1e-3


def test_the_same_test_sees_a_block_that_reads_the_numbers_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is verified beyond the committed tokens, so its random numbers are correlated with the rejected ones."""
    right = Noise.uniform

    def uniform(self: Noise, position: int, stream: int) -> float:
        return right(self, position, BLOCK if BLOCK <= stream < DRAWING else stream)

    monkeypatch.setattr(Noise, "uniform", uniform)
    assert p_value("draft model", BLOCKS, MANY) < 1e-4


LANTERN = Lantern(k=1, delta=0.6, near=lambda token: np.array([(token + 1) % VOCAB]))
LOSSY = [
    LANTERN,
    Typical(),
    TopK(k=2),
    Distance(distance=1),
    All(),
    Accept(min_block=1),
]


@pytest.mark.parametrize("accept", LOSSY)
def test_the_same_test_refuses_every_rule_that_says_it_is_lossy(accept: Accept) -> None:
    assert not accept.lossless
    assert p_value("draft model", PLAIN_SAMPLING, 2500, accept) < 1e-6


@pytest.mark.parametrize("name", ["full tree", "comb of a cut head"])
def test_coupled_trees_keep_the_distribution(name: str) -> None:
    assert p_value(name, SamplingParams(0.9, top_p=0.9, acceptance="coupled")) > 1e-3
