"""Choose who guesses in each round of a request, and how much.

A policy is asked once in a round and told once what came of it; it calls no drafter (``decoding.drafting`` does).
``Policy`` always asks: a fixed number of guesses.  ``control`` has those that estimate what is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.stats import Expected, RoundTime, Stats


@dataclass(slots=True)
class Ask:
    """A drafter that is to guess in this round."""

    drafter: Drafter
    most: int  # deepest guess
    # argument of ``Drafter.propose_until``; None = ``propose`` is called
    least_gain: Callable[[int], float] | None = None
    reviewed: bool = False  # whether ``Policy.review`` cuts the proposal
    looks: bool = False  # it is asked in any case, and its guesses are not verified: the policy learns from them


@dataclass(slots=True)
class Outcome:
    """The result of a round."""

    proposal: Proposal  # as it was verified
    verdict: Verdict
    time: RoundTime
    winner: Ask | None = None  # author of the proposal; None = none was made
    took: list[tuple[Ask, float]] = field(default_factory=list)  # who was asked, in order, and for how many ms

    def ms(self, drafter: Drafter) -> float:
        """Return the milliseconds that asking ``drafter`` took; 0 = it was not asked."""
        return sum(ms for ask, ms in self.took if ask.drafter is drafter)


class Policy:
    """Asks its drafters in order, each for as many guesses as a round may have, until one offers something.

    A drafter that fails is left out for the rest of the request.

    Attributes:
        name: the method, as results call it.
        drafters: those that observe every round, in the order in which they are asked; replaced, never changed.
        won: rounds that each drafter won in this request.
        width: requests whose rows share a pass now; set by the caller that drives the request.
        switches: whether it changes between methods.
    """

    switches = False

    def __init__(self, drafters: Sequence[Drafter], name: str | None = None) -> None:
        if not drafters and not self.switches:
            raise ValueError("expected at least one drafter, got none")
        self._own = list(drafters)
        self.name = name or self._own[0].name
        self.width = 1
        self._reset(Stats(), ())

    def _reset(self, stats: Stats, first: Sequence[Drafter]) -> None:
        self._stats, self._first = stats, list(first)
        self._budget, self._asks = 0, list[Ask]()  # of the last round
        self.drafters = [*first, *self._own]
        self.won: dict[Drafter, int] = {}
        self.lost: dict[Drafter, str] = {}  # why each failed

    def begin(self, request: DraftRequest, stats: Stats, first: Sequence[Drafter] = ()) -> None:
        """Begin a request; ``first``: drafters of this request only, which are asked before all others.

        Decisions are counted in ``stats``.
        """
        self._reset(stats, first)

    def choose(self, tokens: list[int], budget: int) -> Sequence[Ask]:
        """Say who guesses after ``tokens``, at most ``budget`` >= 1 deep; an empty answer is plain decoding.

        They are asked in order until one offers something.
        """
        if budget != self._budget:  # most rounds have the same
            self._budget, self._asks = budget, [Ask(drafter, budget) for drafter in self.drafters]
        return self._asks

    def review(self, ask: Ask, proposal: Proposal, tokens: list[int], ms: float) -> Proposal:
        """Cut a proposal that took ``ms`` to what is worth verifying; called for asks that are ``reviewed``."""
        return proposal

    def expected(self, winner: Ask, proposal: Proposal) -> Expected | None:
        """Predict the result of the round over ``proposal``; None = no prediction."""
        return None

    def told(self, outcome: Outcome) -> None:
        """Learn from a round."""
        if outcome.winner is not None:
            drafter = outcome.winner.drafter
            self.won[drafter] = self.won.get(drafter, 0) + 1

    def lose(self, drafter: Drafter | None, why: str) -> bool:
        """Leave out a drafter that failed; None = the policy itself failed -> whether others are left."""
        if drafter is None:
            return False
        self.lost[drafter] = f"left out: {why}"
        self.drafters = [one for one in self.drafters if one is not drafter]
        self._first = [one for one in self._first if one is not drafter]
        self._budget = 0
        return bool(self.drafters)

    # -- for results ---------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> str:
        """The method that drafts now."""
        return self.name

    @property
    def used(self) -> str:
        """The method that this request was decoded with."""
        return self.name

    @property
    def methods(self) -> list[str]:
        """Methods that were in use in this request."""
        return [one.name for one in self._own]

    @property
    def reason(self) -> str:
        """Describe the decisions in one line."""
        return self._own[0].reason if len(self._own) == 1 else self._wins()

    @property
    def details(self) -> list[str]:
        """Say the rest, a sentence each."""
        if len(self._own) == 1:
            return []
        said = ((one.name, self.lost.get(one) or one.reason) for one in self._own)
        return [f"{name}: {words}" for name, words in said if words]

    def _wins(self) -> str:
        return ", ".join(f"{one.name} won {self.won.get(one, 0)} rounds" for one in self._own)
