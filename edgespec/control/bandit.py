"""What method auto knows of its candidates: what each has given, when it may be tried again, and what that may cost.

Every candidate has a budget of plain steps.  It starts with a few, a small share of every round written is added, and
what a round of its guessing takes beyond the tokens that it brings is paid from it; what it saves is put back.  At most
half of it is staked on one round.  So a text on which nothing can be gained costs the budgets and that share and no
more, by construction, while a candidate that pays has a full budget and is not limited at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from edgespec.control.adaptive import Adaptive

SHARE = 0.012  # of all rounds: plain steps that looking may cost in the long run, all candidates together
CREDIT = 2.5  # plain steps that each candidate starts with
FULL = 5.0  # most of a budget: what a text that stops paying can cost at once
_LEAST = 0.5  # plain steps without which trying again is pointless
AGAIN, LONGEST_AGAIN = 64, 4096  # rounds before another try; doubled while tries fail
WINDOW = 64  # rounds that a gain is measured over
TRIED = 1.0  # predicted speed from which a method is tried: it was predicted from another text
PAYS = 1.01  # gain of late from which a method is kept


@dataclass(frozen=True)
class Candidate:
    """A method to choose from.

    Attributes:
        name: of the method.
        promise: predicted speed over plain decoding.
        make: builds its drafter, loading what that needs; called at its first turn.
        cheap: whether looking without guessing costs next to nothing.
        from_start: it must be shown a text from its beginning, so it is not taken up in the middle of a request.
    """

    name: str
    promise: float
    make: Callable[[], Adaptive]
    cheap: bool = False
    from_start: bool = False


@dataclass
class Arm:
    """What one candidate has shown on a session.

    Attributes:
        promise: predicted speed over plain decoding.
        gain: measured of late, when it was last judged; None = never.
        budget: plain steps that it may lose.
        until: round before which it is not tried again.
        wait: rounds to wait after the next failure.
        out: it failed in this request.
        late: this request began without it, and it cannot follow.
        note: why it was left last, in words.
    """

    promise: float
    gain: float | None = None
    budget: float = CREDIT
    until: int = 0
    wait: int = AGAIN
    out: bool = False
    late: bool = False
    note: str = ""

    @property
    def expected(self) -> float:
        """Speed to expect: what it gave if that paid, else what was predicted."""
        return self.gain if self.gain is not None and self.gain >= PAYS else self.promise

    @property
    def stake(self) -> float:
        """Plain steps that one round may lose."""
        return inf if self.budget >= FULL else max(self.budget / 2, 0.0)

    @property
    def exhausted(self) -> bool:
        """Whether its budget is too empty to guess anything."""
        return self.budget < _LEAST

    def ready(self, now: int) -> bool:
        """Whether it may be tried."""
        return not (self.out or self.late) and now >= self.until and not self.exhausted

    def past(self, now: int) -> str:
        """Why it is not ready, in words."""
        return self.note if self.out or now < self.until else "lost what looking may cost"

    def put_off(self, now: int, note: str) -> None:
        """It did not pay: try again later, and later still if that fails too."""
        self.note = note
        self.until = now + self.wait
        self.wait = min(2 * self.wait, LONGEST_AGAIN)

    def kept(self, gain: float) -> None:
        """It pays, so much: it is missed when it fails the next time."""
        self.gain, self.wait = gain, AGAIN

    def pay(self, lost: float) -> None:
        """A round took so many plain steps more than it wrote tokens; negative = it gained."""
        self.budget = max(min(self.budget - lost, FULL), -CREDIT)


@dataclass
class Bandit:
    """Those of all candidates, and of the one in use.

    Attributes:
        each: in the candidates' order.
        now: rounds so far, over all requests.
        active: which is in use; None = plain decoding.
        window: (tokens, plain steps taken, drafted and no probe) of the latest rounds of the one in use.
        rounds_in_use: its rounds.
    """

    each: list[Arm]
    now: int = 0
    active: int | None = None
    window: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rounds_in_use: int = 0

    @property
    def gain(self) -> float:
        """Tokens per plain step over the window: speed against plain decoding's."""
        steps = sum(took for _, took, _ in self.window)
        return sum(tokens for tokens, _, _ in self.window) / steps if steps else 1.0

    def drafted(self, latest: int) -> int:
        """Of the latest rounds of the window, those drafted because it was expected to pay."""
        return sum(drafted for _, _, drafted in list(self.window)[-latest:])

    def accrue(self) -> None:
        """A round was written: every budget has its share of it."""
        self.now += 1
        share = SHARE / len(self.each)
        for arm in self.each:
            arm.budget = min(arm.budget + share, FULL)

    def ready(self, which: int) -> bool:
        """Whether a candidate may be tried now."""
        return self.each[which].ready(self.now)

    def best(self, besides: int | None = None) -> int | None:
        """The candidate to expect most of, of those that may be tried and are not expected to lose."""
        ready = [at for at, arm in enumerate(self.each) if at != besides and self.ready(at) and arm.expected >= TRIED]
        return max(ready, key=lambda at: self.each[at].expected, default=None)

    def take(self, which: int | None) -> None:
        """Another one is in use from now on."""
        self.active, self.rounds_in_use = which, 0
        self.window.clear()
