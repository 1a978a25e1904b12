"""Run rounds of a policy without a target: the decoding loop without its passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.control.adaptive import Adaptive, Control
from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.drafting import Drafting
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Output
from tests.support.reference import FunctionTarget


class Rounds:
    """A request that is driven round by round."""

    def __init__(
        self, drafts: Policy | Control | Drafter, prompt: Sequence[int] = (1,), params: SamplingParams | None = None,
        width: int = 1, vocab: int = 10**6,
    ) -> None:  # fmt: skip
        policy = Adaptive([drafts]) if isinstance(drafts, Control) else drafts
        self.policy = policy if isinstance(policy, Policy) else Policy([policy])
        self.stats, self.policy.width = Stats(), width
        target = FunctionTarget(lambda prefix: np.zeros(1, np.float32), vocab)
        self.drafting = Drafting(self.policy, target, frozenset(), self.stats)
        self.drafting.begin(DraftRequest(list(prompt), params or SamplingParams()))

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Return what is to be verified."""
        self.drafting.choose(tokens, budget)
        return self.drafting.propose(tokens)

    def learn(self, proposal: Proposal, path: Sequence[int], time: RoundTime | None = None) -> None:
        """Report the accepted tokens and the times of the round; None = no time at all."""
        rows = len(proposal) + 1
        output = Output(np.zeros((rows, 1), np.float32))
        self.drafting.learn(proposal, Verdict(path, 0), output, time or RoundTime(0.0, 0.0, rows))
