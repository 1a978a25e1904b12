"""What stands between the loop and a drafter: nothing that a drafter does can break a request or change its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgespec.decoding.drafter import Drafter, RoundTime, Wrapper
from edgespec.decoding.monitor import PLAIN, Drop
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass, Resume, Target


class Guard(Wrapper):
    """A drafter that cannot break the request: it is dropped at its first failure, and the reason is kept.

    One that holds several (a chain, ``auto``) loses the one that failed, and goes on with the others.
    """

    def __init__(self, drafter: Drafter, stats: Stats, eos: frozenset[int], target: Target) -> None:
        super().__init__([drafter])
        self._stats = stats
        self._eos = eos
        self._vocab = target.vocab_size
        self._target = target
        self._trees = getattr(target, "trees", True)
        self._proposer = PLAIN  # of the last proposal

    @property
    def proposer(self) -> str:
        return self._proposer

    @property
    def wants_hidden(self) -> bool:
        try:
            return bool(self.inside) and self.inside[0].wants_hidden
        except Exception as error:
            self._drop("wants_hidden", error)
            return False

    @property
    def wants_taps(self) -> bool:
        try:
            return bool(self.inside) and self.inside[0].wants_taps
        except Exception as error:
            self._drop("wants_taps", error)
            return False

    def known(self, tokens: list[int]) -> int:
        try:
            return super().known(tokens)
        except Exception as error:
            self._drop("known", error)
            return len(tokens)

    def prefill(self, tokens: list[int], most: int) -> int:  # each round: without a closure
        try:
            return self.inside[0].prefill(tokens, most) if self.inside else 0
        except Exception as error:
            self._drop("prefill", error)
            return 0

    # Every Exception is caught, EdgespecError too: a draft model that yields NaN raises one, and if it was the target
    # that failed below a self-draft, its next pass will say so.
    def tell(self, where: str, call: Callable[[Drafter], None]) -> None:
        try:
            for drafter in self.inside:
                call(drafter)
        except Exception as error:
            self._drop(where, error)

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:  # each round: without a closure
        if self.inside:
            try:
                self.inside[0].observe(proposal, verdict, output)
            except Exception as error:
                self._drop("observe", error)

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        if self.inside:
            try:
                self.inside[0].timed(proposal, time)
            except Exception as error:
                self._drop("timed", error)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The drafter's proposal within ``budget`` and without guesses below an EOS; the empty one where it failed."""
        if not self.inside:
            return EMPTY
        try:
            proposal = self.inside[0].propose(tokens, budget)
            if not len(proposal) and proposal.resume is None:
                return EMPTY
            self._proposer = self.inside[0].proposer
            proposal.check(self._vocab)
            if proposal.parents is not None and not self._trees:
                raise ValueError("a tree of guesses, but this target takes chains")
            proposal = proposal.truncated(budget)
            if self._eos and len(proposal):
                ends = [i for i, token in enumerate(proposal.tokens.tolist()) if token in self._eos]
                proposal = proposal.pruned(ends) if ends else proposal
            if proposal.resume is not None:
                if not hasattr(self._target, "forward_resumed"):
                    raise ValueError("layers have run ahead, but the target cannot resume a pass")
                _check_resume(proposal, proposal.resume)
            return proposal
        except Exception as error:
            self._drop("propose", error)
            return EMPTY

    def _drop(self, where: str, error: Exception) -> None:
        drafter = self.inside[0]
        drop = Drop(drafter.name, where, f"{type(error).__name__}: {error}")
        self._stats.monitor.drops.append(drop)
        try:
            if drafter.lose(str(drop)):
                return
        except Exception as second:  # then the whole of it goes
            drop = replace(drop, error=f"{drop.error}; {type(second).__name__}: {second}")
        self.inside.clear()
        self._stats.dropped_reason = str(drop)


def _check_resume(proposal: Proposal, resume: Resume) -> None:
    """Rows that are to be run on must be the proposal's, and numbers: in the target's pass they would be its failure.

    Raises:
        ValueError: they are not.
    """
    if proposal.parents is not None or len(resume.hidden) != len(proposal) + 1:
        raise ValueError(f"expected {len(proposal) + 1} rows of a chain to resume, got {len(resume.hidden)}")
    if not np.isfinite(resume.hidden.sum()):
        raise ValueError("the hidden states to resume from must be finite")
