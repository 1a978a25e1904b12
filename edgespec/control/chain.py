"""Several drafters asked in turn: the first with something to offer has its proposal verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from edgespec.decoding.drafter import Drafter, RoundTime, Wrapper
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass


class Compose(Wrapper):
    """Asks its proposers in order; the first whose proposal has guesses, or layers already run, wins the round.

    Each proposer may be inside an ``Adaptive`` of its own, which offers only what is predicted to pay: a cheap one must
    then promise more than the costly ones after it, so that a vague guess from the text does not take the place of a
    good draft.  The winner observes the round as it was.  For the others it is a round without guesses whose pending
    token is the last one accepted: row 0 of their pass is that token's, so what they follow (hidden states, their own
    slot) stays right.  One that always runs layers (early exits) belongs at the end.

    A proposer that fails is left out for the rest of the request.

    Args:
        proposers: at least one.

    Attributes:
        won: rounds by proposer.
        failed: why proposers were left out, by name.
    """

    name = "chain"

    def __init__(self, proposers: Sequence[Drafter]) -> None:
        if not proposers:
            raise ValueError("expected at least one proposer, got none")
        super().__init__(proposers)
        self.proposers = list(proposers)
        self.won = [0] * len(self.proposers)
        self.failed: dict[str, str] = {}
        self._winner: Drafter | None = None  # of the round at hand
        self._took: dict[int, float] = {}  # milliseconds of each that was asked in it, by id

    @property
    def proposer(self) -> str:
        """Who made the last proposal."""
        return self.name if self._winner is None else self._winner.proposer

    def tell(self, where: str, call: Callable[[Drafter], None]) -> None:
        """Call a hook of every proposer; those that fail are left out."""
        for drafter in list(self.inside):
            try:
                call(drafter)
            except Exception as error:
                self._leave_out(drafter, f"{type(error).__name__}: {error}")

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """Pass on how this request samples; every proposer is in again."""
        self.inside, self.failed = list(self.proposers), {}
        super().bind(params, noise)

    def learned(self) -> list[object]:
        return [drafter.learned() for drafter in self.proposers]

    def go_on_from(self, learned: object) -> None:
        assert isinstance(learned, list)
        for drafter, one in zip(self.proposers, learned, strict=True):
            if one is not None:
                drafter.go_on_from(one)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The first proposal."""
        self._winner, self._took = None, {}
        for at, drafter in enumerate(list(self.inside)):
            start = perf_counter()
            try:
                drafter.require(max((other.promised(budget) for other in self.inside[at + 1 :]), default=1.0))
                proposal = drafter.propose(tokens, budget)
            except Exception as error:
                self._leave_out(drafter, f"{type(error).__name__}: {error}")
                continue
            self._took[id(drafter)] = 1000 * (perf_counter() - start)
            if len(proposal) or proposal.resume is not None:
                self._winner = drafter
                self.won[self.proposers.index(drafter)] += 1
                return proposal
        return EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """The winner learns from its proposal; the others learn where the text has gone."""
        elsewhere = Verdict((), verdict.next_token)
        row = _row(output, [0, *(node + 1 for node in verdict.path)])

        def observe(drafter: Drafter) -> None:
            if drafter is self._winner:
                drafter.observe(proposal, verdict, output)
            else:
                drafter.observe(EMPTY, elsewhere, row)

        self.tell("observe", observe)

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Everyone learns what the pass took; time spent on looking belongs to whoever looked.

        A pass that began while drafting says nothing to the others.
        """

        def timed(drafter: Drafter) -> None:
            own = time._replace(draft_ms=self._took.get(id(drafter), 0.0))
            if drafter is self._winner:
                drafter.timed(proposal, own)
            elif proposal.resume is None:
                drafter.timed(EMPTY, own)

        self.tell("timed", timed)

    def lose(self, why: str) -> bool:
        """The winner's proposal was none; whoever else is in goes on."""
        if self._winner is None:
            return False
        self._leave_out(self._winner, why)
        self._winner = None
        return bool(self.inside)

    @property
    def reason(self) -> str:
        """What became of every proposer, in words."""
        words = []
        for proposer, won in zip(self.proposers, self.won, strict=True):
            why = self.failed.get(proposer.name) or proposer.reason
            words.append(f"{proposer.name} won {won} rounds" + (f" ({why})" if why else ""))
        return "; ".join(words)

    def _leave_out(self, drafter: Drafter, why: str) -> None:
        self.inside = [other for other in self.inside if other is not drafter]
        self.failed[drafter.name] = f"left out: {why}"


def _row(output: Pass, kept: list[int]) -> Pass:
    """The pass as if it had been over the last of the kept rows alone; what was tapped, of all of them."""
    at = slice(kept[-1], kept[-1] + 1)
    best = None if output.best is None else (output.best[0][at], output.best[1][at])
    taps = None if output.taps is None else output.taps[kept]
    return Pass(output.logits[at], None if output.hidden is None else output.hidden[at], best, taps=taps)
