"""The drafters of a request: called as its policy says, so that no failure of one breaks the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.drafter import NOTHING, Drafter, DraftRequest
from edgespec.decoding.policy import Ask, Outcome, Policy
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.stats import PLAIN, Expected, RoundTime, Stats
from edgespec.decoding.target import Output, Pass, Target

_UNTIMED: list[tuple[Ask, float]] = []  # where no policy learns from times


class Drafting:
    """Calls the hooks of drafters between the rounds of the loop.

    A drafter is left out at its first failure, and the reason is kept; where no other is left, decoding
    continues plainly.  Failures and the drafters' time are counted in ``stats``.
    """

    def __init__(self, policy: Policy, target: Target, eos: frozenset[int], stats: Stats) -> None:
        self._policy: Policy | None = policy
        self._target = target
        self._eos, self._stats = eos, stats
        self._request = DraftRequest([])
        self._known = 0  # tokens at the beginning of the prompt of which no drafter needs auxiliary states
        self._drafters: list[Drafter] = []  # those that observe every round
        self._begun: set[Drafter] = set()  # those that have begun this request, and have missed nothing since
        # overridden hooks only: few drafters override all, and skipping the call matters in a fast round
        self._readers: dict[Drafter, Callable[[list[int], int], int]] = {}
        self._observers: list[tuple[Drafter, Callable[[Proposal, Verdict, Output], None]]] = []
        self._timers: list[tuple[Drafter, Callable[[Proposal, RoundTime], None]]] = []
        self._learns = type(policy).told is not Policy.told or len(policy.drafters) > 1
        self._asks: Sequence[Ask] = ()  # of this round
        self._took: list[tuple[Ask, float]] = []
        self._winner: Ask | None = None
        self.ahead: Drafter | None = None  # that has run layers of this round's pass
        self._start = 0.0  # when drafting of this round began
        self.hidden = self.aux_hidden = False  # states that passes of the target also give
        self.draft_ms = 0.0

    def begin(self, request: DraftRequest, first: Sequence[Drafter] = ()) -> int:
        """Begin a request; ``first``: drafters that are asked before those of the policy.

        Returns the tokens at the beginning of its prompt of which no auxiliary states are needed.
        """
        start, policy = perf_counter(), self._policy
        assert policy is not None
        self._request, self._known = request, len(request.tokens)
        self._learns |= bool(first)
        try:
            policy.begin(request, self._stats, first)
        except Exception as error:
            self._fail(None, "begin", error)
        self._take_in(request.tokens)
        self._stats.draft_ms += 1000 * (perf_counter() - start)
        return self._known if self.aux_hidden else len(request.tokens)

    def absorb(self, first: int, aux_hidden: NDArray[np.float32]) -> None:
        """Hand on auxiliary states of the prompt."""
        for drafter in self._drafters:
            try:
                drafter.absorb(first, aux_hidden)
            except Exception as error:
                self._fail(drafter, "absorb", error)

    def choose(self, tokens: list[int], budget: int) -> int:
        """Have the policy choose who guesses in this round -> tokens that they have to read before."""
        policy, self._start = self._policy, perf_counter()
        if budget < 1 or policy is None:
            self._asks = ()
            return 0
        try:
            self._asks = policy.choose(tokens, budget)
        except Exception as error:
            self._asks = ()
            self._fail(None, "choose", error)
        if policy.drafters is not self._drafters:
            self._take_in(tokens)
        return self._read(tokens, 0) if self._readers else 0

    def read(self, tokens: list[int], most: int) -> int:
        """Let those who guess in this round read ahead -> tokens that are left to be read."""
        left = self._read(tokens, most)
        self._start = perf_counter()
        return left

    def _read(self, tokens: list[int], most: int) -> int:
        left = 0
        for ask in self._asks:
            if (call := self._readers.get(ask.drafter)) is not None:
                try:
                    left += call(tokens, most)
                except Exception as error:
                    self._fail(ask.drafter, "prefill", error)
        return left

    def propose(self, tokens: list[int]) -> Proposal:
        """Return the first proposal that is not empty, cut after EOS; otherwise the empty one."""
        proposal, winner, before = EMPTY, None, self._start
        self.ahead = None
        took = self._took = [] if self._learns else _UNTIMED
        for ask in self._asks:
            if ask.looks:
                if ask.drafter not in self._begun and not self._begin(ask.drafter, tokens):
                    continue
                before = perf_counter()
            elif winner is not None:
                continue
            # Every Exception is caught, EdgespecError too: a draft model that yields NaN raises one, and if it was the
            # target that failed below a self-draft, its next pass will fail as well.
            try:
                if ask.least_gain is None:
                    found = ask.drafter.propose(tokens, ask.most)
                else:
                    found = ask.drafter.propose_until(tokens, ask.most, ask.least_gain)
                if found is not EMPTY:
                    found = self._checked(found, ask.most)
                if ask.reviewed and self._policy is not None:
                    found = self._policy.review(ask, found, tokens, 1000 * (perf_counter() - before))
                    found = found if len(found) else EMPTY
                if ask.drafter.runs_ahead:
                    self.ahead = ask.drafter
                if found is not EMPTY or ask.drafter.runs_ahead:
                    proposal, winner = found, ask
            except Exception as error:
                self._fail(ask.drafter, "propose", error)
            if took is not _UNTIMED:
                now = perf_counter()
                took.append((ask, 1000 * (now - before)))
                before = now
        self._winner = winner
        self.draft_ms = 1000 * (perf_counter() - self._start)
        self._stats.draft_ms += self.draft_ms
        return proposal

    def rest(self, whole: Pass) -> Pass:
        """Return what the drafter that is ``ahead`` has left of this round's pass."""
        assert self.ahead is not None
        try:
            return self.ahead.rest(whole)
        except Exception as error:
            self._fail(self.ahead, "rest", error)
            return whole

    @property
    def winner(self) -> str:
        """The name of who made this round's proposal."""
        return PLAIN if self._winner is None else self._winner.drafter.name

    def expected(self, proposal: Proposal) -> Expected | None:
        """Return what the policy expects of this round."""
        if self._policy is None or self._winner is None:
            return None
        return self._policy.expected(self._winner, proposal)

    def learn(self, proposal: Proposal, verdict: Verdict, output: Output, time: RoundTime) -> None:
        """Let drafters and policy learn from a round and its time."""
        if not (self._learns or self._observers or self._timers):
            return
        stats, start, winner = self._stats, perf_counter(), self._winner
        own = None if winner is None else winner.drafter
        others = len(self._drafters) > 1
        for drafter, observe in self._observers:
            try:
                if others and drafter is not own and not drafter.follows_others:
                    elsewhere = Verdict((), verdict.next_token)
                    kept = [0, *(node + 1 for node in verdict.path)]
                    observe(EMPTY, elsewhere, _last_row(output, kept))
                else:
                    observe(proposal, verdict, output)
            except Exception as error:
                self._fail(drafter, "observe", error)
        if self._learns and self._policy is not None:
            try:
                self._policy.told(Outcome(proposal, verdict, time, winner, self._took))
            except Exception as error:
                self._fail(None, "told", error)
        observed = perf_counter()
        for drafter, timed in self._timers:
            # a pass that began while drafting says nothing to those who did not win
            if others and drafter is not own and winner is not None and winner.drafter.runs_ahead:
                continue
            try:
                if others:
                    took = time._replace(draft_ms=sum(ms for ask, ms in self._took if ask.drafter is drafter))
                    timed(proposal if drafter is own else EMPTY, took)
                else:
                    timed(proposal, time)
            except Exception as error:
                self._fail(drafter, "timed", error)
        stats.draft_ms += 1000 * (observed - start)
        stats.other_ms += 1000 * (perf_counter() - observed)

    # -- one drafter ---------------------------------------------------------------------------------------------------

    def _checked(self, proposal: Proposal, budget: int) -> Proposal:
        """Refuse nonsense, and cut what cannot be written."""
        if not isinstance(proposal, Proposal):
            raise TypeError(f"expected a Proposal, got {type(proposal).__name__}")
        proposal.check(self._target.vocab_size)
        if proposal.parents is not None and not self._target.trees:
            raise ValueError("a tree of guesses, but this target takes chains")
        proposal = proposal.truncated(budget)
        if self._eos and len(proposal):
            ends = [i for i, token in enumerate(proposal.tokens.tolist()) if token in self._eos]
            proposal = proposal.pruned(ends) if ends else proposal
        return proposal if len(proposal) else EMPTY

    def _begin(self, drafter: Drafter, tokens: list[int]) -> bool:
        """Let a drafter begin the request at ``tokens`` -> whether it could."""
        request = self._request
        try:
            known = drafter.begin(request if tokens is request.tokens else replace(request, tokens=tokens))
            self._known = self._known if known is None else min(self._known, known)
            self._begun.add(drafter)
            return True
        except Exception as error:
            self._fail(drafter, "begin", error)
            return False

    def _take_in(self, tokens: list[int]) -> None:
        """Follow the policy's drafters: those that are new begin, those that left have to begin again.

        A cheap one reads what it missed when it proposes.
        """
        before, policy = self._drafters, self._policy
        if policy is not None:
            self._begun -= {one for one in before if one not in policy.drafters and not one.cheap}
            for drafter in list(policy.drafters):
                if drafter not in self._begun:
                    self._begin(drafter, tokens)
        self._hook()

    def _hook(self) -> None:
        """Collect the hooks that do something, and the states that are wanted of the target's passes."""
        drafters = self._drafters = [] if self._policy is None else self._policy.drafters
        self._readers = {one: one.prefill for one in drafters if _overrides(one, "prefill")}
        self._observers = [(one, one.observe) for one in drafters if _overrides(one, "observe")]
        self._timers = [(one, one.timed) for one in drafters if _overrides(one, "timed")]
        wants = NOTHING.union(*(one.wants for one in drafters)) & self._target.can
        self.hidden, self.aux_hidden = ("hidden" in wants, "aux_hidden" in wants)

    def _fail(self, drafter: Drafter | None, where: str, error: Exception) -> None:
        """Drop a failed drafter; None = the policy, or a drafter that it loads."""
        policy = self._policy
        if policy is None:
            return
        name = policy.in_use if drafter is None else drafter.name
        why = self._stats.drop(name, where, f"{type(error).__name__}: {error}")
        try:
            goes_on = policy.lose(drafter, why)
        except Exception as second:
            goes_on, why = False, f"{why}; {type(second).__name__}: {second}"
        if drafter is not None:
            self._begun.discard(drafter)
        if not goes_on:
            self._policy, self._learns, self._stats.dropped_reason = None, False, why
        self._asks = [ask for ask in self._asks if self._policy is not None and ask.drafter is not drafter]
        self._hook()


def _overrides(drafter: Drafter, hook: str) -> bool:
    return getattr(getattr(drafter, hook), "__func__", None) is not getattr(Drafter, hook)


def _last_row(output: Output, kept: list[int]) -> Output:
    """Cut the output to the last of the kept rows; auxiliary states are kept for all of them."""
    at = slice(kept[-1], kept[-1] + 1)
    best = None if output.best is None else (output.best[0][at], output.best[1][at])
    aux_hidden = None if output.aux_hidden is None else output.aux_hidden[kept]
    return Output(output.logits[at], None if output.hidden is None else output.hidden[at], best, aux_hidden=aux_hidden)
