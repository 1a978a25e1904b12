"""Several drafters asked in turn: the first with something to offer has its proposal verified."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import EMPTY, Drafter, DraftRequest, Proposal, Verdict, Wrapper
from edgespec.decoding.stats import RoundTime
from edgespec.decoding.target import Pass


class Chain(Wrapper):
    """Asks its proposers in order; the first whose proposal has guesses, or layers already run, wins the round.

    Each proposer may be inside an ``Adaptive`` of its own, which offers only what is predicted to be faster.  A cheap
    one must then promise more than the costly ones after it, so that a vague guess from the text does not take the
    place of a good draft.  The winner observes the round as it was.  For the others it is a round without guesses
    whose pending token is the last one accepted: row 0 of their pass is that token's, so what they follow (hidden
    states, their own slot) stays right.  One that always runs layers (early exits) belongs at the end.

    A proposer that fails is left out for the rest of the request.
    """

    name = "chain"

    def __init__(self, proposers: Sequence[Drafter]) -> None:
        if not proposers:
            raise ValueError("expected at least one proposer, got none")
        super().__init__(proposers)
        self.proposers = list(proposers)
        self.won = [0] * len(self.proposers)
        self.failed: dict[str, str] = {}
        self._winner: Drafter | None = None  # of the current round
        self._took: dict[int, float] = {}  # milliseconds of each that was asked in it, by id

    @property
    def proposer(self) -> str:
        winner = self._winner
        return winner.proposer if isinstance(winner, Wrapper) else self.name if winner is None else winner.name

    def tell(self, hook: str, *arguments: Any) -> list[Any]:
        """Call a hook of every proposer -> what they return; those that fail are left out."""
        return [found for drafter in list(self.inside) for found in self._tell(drafter, hook, *arguments)]

    def _tell(self, drafter: Drafter, hook: str, *arguments: Any) -> list[Any]:
        """Call a hook of one proposer -> [what it returns], or [] where it failed and was left out."""
        try:
            return [getattr(drafter, hook)(*arguments)]
        except Exception as error:
            self._leave_out(drafter, f"{type(error).__name__}: {error}")
            return []

    def begin(self, request: DraftRequest) -> int | None:
        """Begin a request; every proposer is in again."""
        self.inside, self.failed = list(self.proposers), {}
        return super().begin(request)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Return the first proposal that offers something."""
        self._winner, self._took = None, {}
        for at, drafter in enumerate(list(self.inside)):
            start = perf_counter()
            if isinstance(drafter, Adaptive):
                after = [other for other in self.inside[at + 1 :] if isinstance(other, Adaptive)]
                drafter.required = max((other.promised(budget) for other in after), default=1.0)
            for proposal in self._tell(drafter, "propose", tokens, budget):
                self._took[id(drafter)] = 1000 * (perf_counter() - start)
                if not proposal.empty:
                    self._winner = drafter
                    self.won[self.proposers.index(drafter)] += 1
                    return proposal
        return EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Let the winner learn from its proposal, and the others where the text has gone."""
        elsewhere = Verdict((), verdict.next_token)
        row = _row(output, [0, *(node + 1 for node in verdict.path)])
        for drafter in list(self.inside):
            won = drafter is self._winner
            self._tell(drafter, "observe", *((proposal, verdict, output) if won else (EMPTY, elsewhere, row)))

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Let all learn what the pass took, each with its own draft time.

        A pass that began while drafting says nothing to those who did not win.
        """
        for drafter in list(self.inside):
            own = time._replace(draft_ms=self._took.get(id(drafter), 0.0))
            if drafter is self._winner:
                self._tell(drafter, "timed", proposal, own)
            elif proposal.head_start is None:
                self._tell(drafter, "timed", EMPTY, own)

    def lose(self, why: str) -> bool:
        """Drop the proposer that won, which has failed; the others continue."""
        if self._winner is None:
            return False
        self._leave_out(self._winner, why)
        self._winner = None
        return bool(self.inside)

    @property
    def reason(self) -> str:
        """How many rounds every proposer won, in one line."""
        return ", ".join(f"{one.name} won {won} rounds" for one, won in zip(self.proposers, self.won, strict=True))

    @property
    def details(self) -> list[str]:
        """What became of every proposer, a sentence each."""
        said = []
        for one in self.proposers:
            more = one.details if isinstance(one, Wrapper) else []
            words = [self.failed.get(one.name) or one.reason, *more]
            said += [f"{one.name}: {word}" for word in words if word]
        return said

    def _leave_out(self, drafter: Drafter, why: str) -> None:
        self.inside = [other for other in self.inside if other is not drafter]
        self.failed[drafter.name] = f"left out: {why}"


def _row(output: Pass, kept: list[int]) -> Pass:
    """Cut the pass to the last of the kept rows alone; auxiliary states of all of them."""
    at = slice(kept[-1], kept[-1] + 1)
    best = None if output.best is None else (output.best[0][at], output.best[1][at])
    aux_hidden = None if output.aux_hidden is None else output.aux_hidden[kept]
    return Pass(output.logits[at], None if output.hidden is None else output.hidden[at], best, aux_hidden=aux_hidden)
