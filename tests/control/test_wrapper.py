"""A drafter around others hands everything on: nothing that the loop tells is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.control.adaptive import Adaptive
from edgespec.control.auto import Auto, Candidate
from edgespec.control.chain import Chain
from edgespec.decoding.drafter import Drafter, DraftRequest, Proposal, Verdict, Wrapper
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Pass
from edgespec.formulas.cost import CostModel
from tests.support.toy import Scripted, chain, hash_target

OUTPUT = Pass(np.zeros((2, 11), np.float32))
TIME = RoundTime(1.0, 2.0, 9, True)
REQUEST = DraftRequest([1, 2], stats=Stats(width=4))
HOOKS: dict[str, tuple[Any, ...]] = {
    "begin": (REQUEST,),
    "prefill": ([1, 2], 8),
    "absorb": (3, np.ones((2, 4), np.float32)),
    "observe": (chain([1]), Verdict((), 3), OUTPUT),
    "timed": (chain([1]), TIME),
}


class Told(Drafter):
    """Writes down what it is told."""

    name = "told"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        return chain([1])

    def begin(self, request: DraftRequest) -> int | None:
        self.calls.append(("begin", (request,)))
        return 1

    def prefill(self, tokens: list[int], most: int) -> int:
        self.calls.append(("prefill", (tokens, most)))
        return 0

    def absorb(self, first: int, aux_hidden: NDArray[np.float32]) -> None:
        self.calls.append(("absorb", (first, aux_hidden)))

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        self.calls.append(("observe", (proposal, verdict, output)))

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        self.calls.append(("timed", (proposal, time)))


def adaptive(inner: Drafter) -> Adaptive:
    return Adaptive(inner, CostModel({1: 1.0, 2: 1.01}, 0.0), fallback=False)


def auto(inner: Drafter) -> Auto:
    switch = Auto([Candidate("told", 2.0, lambda: adaptive(inner))])
    switch.begin(DraftRequest([1]))
    return switch


WRAPPERS: dict[str, Callable[[Drafter], Wrapper]] = {
    "wrapper": lambda inner: Wrapper([inner]),
    "adaptive": adaptive,
    "chain": lambda inner: Chain([inner]),
    "chain of adaptive": lambda inner: Chain([adaptive(inner)]),
    "auto": auto,
    "all of them": lambda inner: Chain([adaptive(Chain([inner]))]),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_every_hook_reaches_whoever_is_inside(name: str, hook: str) -> None:
    inner = Told()
    around = WRAPPERS[name](inner)
    if name != "wrapper":
        around.propose([1, 2], 2)  # the winner of the round is told about it
    inner.calls.clear()
    assert getattr(around, hook)(*HOOKS[hook]) == {"begin": 1, "prefill": 0}.get(hook)
    told = dict(inner.calls)[hook]
    if hook == "timed":
        assert isinstance(told[1], RoundTime)
        assert told[1][1:] == TIME[1:]
    else:
        assert told == HOOKS[hook]


def test_a_drafter_has_ten_hooks_and_every_call_of_the_loop_is_forwarded() -> None:
    """What control alone asks (``forecast``, ``dry_step``, ``reason``) goes to one drafter, and ``propose`` differs."""
    hooks = {name for name, member in vars(Drafter).items() if callable(member) or isinstance(member, property)}
    hooks = {name for name in hooks if not name.startswith("_")}
    assert len(hooks) <= 10
    assert hooks - {"forecast", "dry_step", "reason", "propose", "wants"} == set(HOOKS)


def test_a_chain_counts_the_probes_of_its_proposers() -> None:
    """Guesses that never pay are drafted only to look again, and the statistics say how often."""
    wrong = Scripted(lambda tokens, budget: chain([(tokens[-1] + 7) % 11] * budget))
    control = Adaptive(wrong, CostModel({1: 1.0, 2: 2.0}, 1.0))
    stats = Stats()
    list(decode(hash_target(3), Chain([control]), [1], DecodeOptions(200, 4), stats))
    assert control.probes > 2
    assert stats.probes == control.probes


def test_a_chain_in_a_batch_decides_for_the_batch() -> None:
    """Alone two guesses pay; where four requests share a pass, eight more rows do not."""
    curve = {1: 1.0, 3: 1.2, 4: 1.3, 12: 8.0}
    sure = Scripted(lambda tokens, budget: chain([1] * budget))
    control = Adaptive(sure, CostModel(curve, 0.0), prior=0.9)
    both = Chain([control])
    proposal = both.propose([1], 2)
    assert len(proposal) == 2
    both.observe(proposal, Verdict((0, 1), 3), Pass(np.zeros((3, 11), np.float32)))
    both.begin(DraftRequest([1], stats=Stats(width=4)))
    assert [len(both.propose([1], 2)) for _ in range(8)] == [0] * 8


def test_a_proposal_that_is_none_costs_a_chain_that_proposer_alone() -> None:
    bad = Scripted(lambda tokens, budget: chain([99]))  # no such token
    bad.name = "bad"
    good = Scripted(lambda tokens, budget: chain([1]))
    both, stats = Chain([bad, good]), Stats()
    list(decode(hash_target(3), both, [1], DecodeOptions(30, 4), stats))
    assert stats.dropped_reason is None
    assert [drop["method"] for drop in stats.drops] == ["chain"]
    assert "outside the vocabulary" in both.failed["bad"]
    assert both.won[1] > 20
