"""How a request goes: acceptance of late, prediction against the clock, work per token, fall-backs, checks.

Work is a proxy of energy: rows run through the target, and draft steps weighted by their cost against such a row, for
each token written.  Plain decoding runs one row a token: 1.0.  Attention over the context, sampling and the prefill are
not in it; nor is what a pass over many rows saves by reading the weights once, which is time and not work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

ENOUGH = 8  # plain rounds that make a plain step's time a measurement
WINDOW = 64  # rounds that "of late" means
PLAIN = "plain"


@dataclass(frozen=True)
class Switched:
    """Method auto went from one method to another; ``PLAIN`` = to plain decoding, or from it.

    Attributes:
        round: rounds of the request before it.
        left: the method left.
        taken: the one taken up.
        why: in words.
    """

    round: int
    left: str
    taken: str
    why: str

    def __str__(self) -> str:
        return f"round {self.round}: {self.left} to {self.taken}, {self.why}"

    def as_dict(self) -> dict[str, object]:
        """For JSON; the keys are stable."""
        return {"round": self.round, "from": self.left, "to": self.taken, "why": self.why}


@dataclass
class Control:
    """What adaptive control and method auto decided and expect; they fill it (``Drafter.watch``).

    Attributes:
        expected: (tokens, time in plain steps) expected of the proposal at hand; None = nothing is expected.
        plain_ms: what a plain step takes here; None = not measured.
        steps: draft steps of the proposal at hand.
        step_cost: work of a draft step in rows of the target; None = not known.
        fallbacks: times a kind of proposal that was drafted ceased to pay.
        recoveries: times one that had ceased to pay is drafted again.
        probes: rounds that drafted only to look again.
        switches: what method auto changed, in order.
    """

    expected: tuple[float, float] | None = None
    plain_ms: float | None = None
    steps: int = 0
    step_cost: float | None = None
    fallbacks: int = 0
    recoveries: int = 0
    probes: int = 0
    switches: list[Switched] = field(default_factory=list)


@dataclass(frozen=True)
class Drop:
    """A drafter that was dropped for the rest of its request: its name, where it failed, and how."""

    method: str
    where: str
    error: str

    def __str__(self) -> str:
        return f"{self.method} failed in {self.where}: {self.error}"


@dataclass
class Shadow:
    """Written tokens compared with those that plain decoding writes after the same text.

    Attributes:
        every: one round in so many is compared; 0 = none.
        checked: tokens compared.
        agreeing: those of them that are plain decoding's.
        first: (index among the new tokens, plain decoding's token, the written one) of the first that is not.
    """

    every: int = 0
    checked: int = 0
    agreeing: int = 0
    first: tuple[int, int, int] | None = None

    def compare(self, at: int, pairs: Iterable[tuple[int, int]]) -> None:
        """Add a round whose first token has index ``at``; ``pairs``: plain decoding's token and the written one."""
        for index, (expected, got) in enumerate(pairs, at):
            self.checked += 1
            self.agreeing += expected == got
            if expected != got and self.first is None:
                self.first = index, expected, got

    @property
    def agreement(self) -> float:
        """Share of the compared tokens that are plain decoding's; 1 before the first."""
        return self.agreeing / self.checked if self.checked else 1.0

    def as_dict(self) -> dict[str, object]:
        """For JSON; the keys are stable."""
        first = None if self.first is None else dict(zip(("position", "expected", "got"), self.first, strict=True))
        return {
            "every": self.every,
            "checked": self.checked,
            "agreeing": self.agreeing,
            "agreement": self.agreement,
            "first_disagreement": first,
        }


class RoundRecord(NamedTuple):
    """One round.

    Attributes:
        method: who guessed; ``PLAIN`` = nobody.
        tokens: tokens written.
        drafted: guesses verified.
        accepted: guesses written.
        rows: rows run through all of the target's layers, or their equivalent.
        draft_ms: time of the drafter.
        verify_ms: time of the pass.
        alone: whether no other request's rows were in the pass.
    """

    method: str
    tokens: int
    drafted: int
    accepted: int
    rows: float
    draft_ms: float
    verify_ms: float
    alone: bool = True


@dataclass
class Monitor:
    """What is watched of one request, round by round.

    Attributes:
        control: decisions of adaptive control.
        shadow: comparison with plain decoding.
        drops: drafters that failed.
        recent: the last ``WINDOW`` rounds.
        plain_rounds: rounds without a guess; plain_ms: what those of them took in which no exit was asked.
        drafted_rounds: rounds with guesses.
        tokens: tokens written.
        work: rows of the target, and draft steps in such rows.
    """

    control: Control = field(default_factory=Control)
    shadow: Shadow = field(default_factory=Shadow)
    drops: list[Drop] = field(default_factory=list)
    recent: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=WINDOW), repr=False)
    plain_rounds: int = 0
    plain_ms: float = 0.0
    drafted_rounds: int = 0
    tokens: int = 0
    work: float = 0.0
    _plain_steps: int = 0  # rounds that ``plain_ms`` is of
    _expected: tuple[float, float] = (0.0, 0.0)  # tokens and plain steps of the rounds below, as predicted
    _measured: tuple[float, float] = (0.0, 0.0)  # the same by the clock

    def add(self, seen: RoundRecord) -> None:
        """Count a round."""
        self.recent.append(seen)
        self.tokens += seen.tokens
        self.work += seen.rows
        if not seen.drafted:
            self.plain_rounds += 1
            if seen.rows >= 1:  # else its pass is what an exit's layers have left
                self._plain_steps += 1
                self.plain_ms += seen.verify_ms
            return
        self.work += self._draft_work(seen)
        self.drafted_rounds += 1
        control = self.control
        # the clock of a pass that other requests share says nothing of this one
        if seen.alone and control.expected is not None and (plain_ms := self.step_ms or control.plain_ms):
            tokens, steps = control.expected
            self._expected = self._expected[0] + tokens, self._expected[1] + steps
            taken = (seen.draft_ms + seen.verify_ms) / plain_ms
            self._measured = self._measured[0] + seen.tokens, self._measured[1] + taken

    @property
    def step_ms(self) -> float | None:
        """What a plain step took in this request; None = it had too few to tell."""
        return self.plain_ms / self._plain_steps if self._plain_steps >= ENOUGH else None

    def _draft_work(self, seen: RoundRecord) -> float:
        if self.control.step_cost is not None:
            return self.control.steps * self.control.step_cost
        # without control nothing has measured a draft step: drafting is weighed by its time against that of a row
        return seen.draft_ms / (seen.verify_ms / seen.rows) if seen.verify_ms and seen.rows else 0.0

    @property
    def work_per_token(self) -> float:
        """Work of a token against plain decoding's, 1.0; 0 before the first."""
        return self.work / self.tokens if self.tokens else 0.0

    @property
    def predicted_speedup(self) -> float | None:
        """What control expected of the rounds that it drafted, over plain decoding; None = it expected nothing."""
        return self._expected[0] / self._expected[1] if self._expected[1] else None

    @property
    def measured_speedup(self) -> float | None:
        """The same rounds by the clock: tokens per ms of drafts and passes against the measured plain step."""
        return self._measured[0] / self._measured[1] if self._measured[1] else None

    def of_late(self) -> dict[str, dict[str, float]]:
        """By who guessed: rounds, acceptance rate and tokens per round of the last ``WINDOW`` rounds."""
        found: dict[str, dict[str, float]] = {}
        for method in sorted({seen.method for seen in self.recent}):
            rounds = [seen for seen in self.recent if seen.method == method]
            drafted = sum(seen.drafted for seen in rounds)
            found[method] = {
                "rounds": len(rounds),
                "acceptance_rate": sum(seen.accepted for seen in rounds) / drafted if drafted else 0.0,
                "tokens_per_round": sum(seen.tokens for seen in rounds) / len(rounds),
            }
        return found

    def as_dict(self) -> dict[str, object]:
        """For JSON; the keys are stable."""
        return {
            "recent": self.of_late(),
            "predicted_speedup": self.predicted_speedup,
            "measured_speedup": self.measured_speedup,
            "work_per_token": self.work_per_token,
            "plain_rounds": self.plain_rounds,
            "drafted_rounds": self.drafted_rounds,
            "probes": self.control.probes,
            "fallbacks": self.control.fallbacks,
            "recoveries": self.control.recoveries,
            "drops": [asdict(drop) for drop in self.drops],
            "switches": [switch.as_dict() for switch in self.control.switches],
            "shadow": self.shadow.as_dict(),
        }
