"""Drafters receive all events, under every policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.auto import Auto, Candidate
from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.policy import Ask, Policy
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Output
from edgespec.formulas.cost import CostModel
from tests.support.rounds import Rounds
from tests.support.toy import Scripted, chain, hash_logits, hash_target, plain


class Told(Drafter):
    """Records the events that it receives; its draft tokens are right."""

    name = "told"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.text: list[int] = []

    def begin(self, request: DraftRequest) -> int | None:
        self.calls.append("begin")
        self.text = list(request.tokens)
        return None

    def absorb(self, first: int, aux_hidden: NDArray[np.float32]) -> None:
        self.calls.append("absorb")

    def prefill(self, tokens: list[int], most: int) -> int:
        self.calls.append("prefill")
        return 0

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        assert tokens == self.text
        self.calls.append("propose")
        return chain(plain(hash_logits(3, 11), 11, tokens, budget))

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        self.calls.append("observe")
        self.text += [*proposal.tokens[list(verdict.path)].tolist(), verdict.next_token]

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        self.calls.append("timed")


def control(drafter: Drafter) -> Control:
    return Control(drafter, CostModel({1: 1.0, 2: 1.01}, 0.0), fallback=False)


POLICIES: dict[str, Callable[[Drafter], Policy]] = {
    "fixed": lambda drafter: Policy([drafter]),
    "adaptive": lambda drafter: Adaptive([control(drafter)]),
    "in turn": lambda drafter: Policy([Scripted(lambda *_: EMPTY), drafter]),
    "adaptive in turn": lambda drafter: Adaptive([control(Scripted(lambda *_: EMPTY)), control(drafter)]),
    "auto": lambda drafter: Auto([Candidate("told", 2.0, lambda: control(drafter))]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_drafter_sees_every_round(name: str) -> None:
    """The tokens in its events are those that it drafts after."""
    told, stats = Told(), Stats()
    rounds = list(decode(hash_target(3), POLICIES[name](told), [1, 2], DecodeOptions(21, 3), stats))
    assert stats.dropped_reason is None
    assert stats.accepted > 10
    assert told.calls.count("begin") == 1
    assert told.calls.count("observe") == told.calls.count("timed") == len(rounds)
    assert told.calls[:5] == ["begin", "prefill", "propose", "observe", "timed"]


@pytest.mark.parametrize("name", POLICIES)
def test_auxiliary_states_reach_it(name: str) -> None:
    driven = Rounds(POLICIES[name](told := Told()))
    driven.drafting.absorb(0, np.zeros((1, 4), np.float32))
    assert told.calls == ["begin", "absorb"]


def test_a_policy_that_fails_costs_the_drafting_and_not_the_text() -> None:
    for where in ("begin", "choose", "told"):
        policy = Adaptive([control(Told())])

        def broken(*_: object) -> list[Ask]:
            raise RuntimeError("broken")

        setattr(policy, where, broken)
        made = decode(hash_target(3), policy, [1, 2], DecodeOptions(21, 3), stats := Stats())
        assert [token for done in made for token in done.tokens] == plain(hash_logits(3, 11), 11, [1, 2], 21)
        assert [(drop["method"], drop["where"]) for drop in stats.drops] == [("told", where)]
        assert "broken" in str(stats.dropped_reason)
