"""What one bucket of a drafter's guesses has shown of its acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR = 0.5  # acceptance where nothing is known
WAIT, LONGEST_WAIT = 16, 128  # plain rounds before a probe; doubled while probes fail
_DECAY = 0.9


@dataclass
class Record:
    """What one bucket has shown.

    Attributes:
        rates: a_j for the positions seen so far; [0] starts as the prior.
        seen: observations of each.
        wait: rounds to sit out before the next probe.
        sat: rounds sat out since the last one.
        probing: a probe is being verified.
        streak: probes in a row.
        drafting: whether it was drafted when last decided on, because it pays.
    """

    rates: list[float]
    seen: list[int] = field(default_factory=lambda: [0])
    wait: int = WAIT
    sat: int = 0
    probing: bool = False
    streak: int = 0
    drafting: bool | None = None

    def rate(self, position: int) -> float:
        """a at ``position``; one never put to the test is taken to be like the one before."""
        return self.rates[min(position, len(self.rates) - 1)]

    def learn(self, position: int, accepted: bool) -> None:
        """One guess at ``position`` was put to the test."""
        if position == len(self.rates):
            self.rates.append(self.rates[-1])
            self.seen.append(0)
        # A running mean in which the prior counts as two guesses, until the decay is slower than that.
        step = max(1 - _DECAY, 1 / (self.seen[position] + 3))
        self.rates[position] += step * (accepted - self.rates[position])
        self.seen[position] += 1
