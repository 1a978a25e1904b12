"""Keep an engine's record of a method: all its requests begin with it and add to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from edgespec.control.estimator import Evidence, Pace
from edgespec.formulas.cost import CostModel

CREDIT = 2.5  # plain steps that each candidate of method auto starts with
FULL = 10.0  # most of a budget, which a text that stops gaining can cost at once; 5 ran out by chance at 1.3x
_LEAST = 0.5  # plain steps without which trying again is pointless
AGAIN, LONGEST_AGAIN = 96, 4096  # rounds before another try; doubled while tries fail


@dataclass
class Standing:
    """Results of a method as a candidate of method auto."""

    budget: float = CREDIT  # plain steps that it may lose
    now: int = 0  # rounds in which it was a candidate
    until: int = 0  # round before which it is not tried again
    wait: int = AGAIN  # rounds to wait after the next failure
    note: str = ""  # why it was left last
    gained: bool = False  # whether rounds were faster than plain decoding since it ran out of budget last

    @property
    def round_loss_limit(self) -> float:
        """Plain steps that one round may lose."""
        return inf if self.budget >= FULL else max(self.budget / 2, 0.0)

    @property
    def exhausted(self) -> bool:
        """Whether its budget is too empty to guess anything."""
        return self.budget < _LEAST

    @property
    def ready(self) -> bool:
        """Whether it may be tried."""
        return self.now >= self.until and not self.exhausted

    @property
    def past(self) -> str:
        """Explain why it is not ready."""
        return self.note if self.now < self.until else "lost what looking may cost"

    def accrue(self, share: float) -> None:
        """Count a round, of which ``share`` plain steps are added to the budget."""
        self.now += 1
        self.budget = min(self.budget + share, FULL)

    def back_off(self, note: str) -> None:
        """Record a failure: try again later, and later still if that fails too."""
        self.note = note
        self.until = self.now + self.wait
        self.wait = min(2 * self.wait, LONGEST_AGAIN)

    def charge(self, lost: float) -> None:
        """Reduce the budget by a round's time beyond its tokens, in plain steps; negative = it gained."""
        self.budget = max(min(self.budget - lost, FULL), -CREDIT)


@dataclass
class Learned:
    """Acceptance and costs of one method with its options."""

    cost: CostModel | None = None  # None = its drafter was never loaded
    evidence: dict[int, Evidence] = field(default_factory=dict)  # by bucket
    pace: Pace = field(default_factory=Pace)
    bucket: int = 0  # of the last proposal: where a costly drafter's next one is expected
    nodes_per_depth: float = 1.0  # of a costly drafter's trees
    standing: Standing = field(default_factory=Standing)

    @property
    def priced(self) -> CostModel:
        """The costs of a method whose drafter was loaded."""
        assert self.cost is not None
        return self.cost
