"""Method auto: the candidate of the best prediction drafts, is watched, and gives way to the next if it is not faster.

One candidate is in use at a time, inside adaptive control of its own; the others are neither asked nor told anything,
and are not even loaded before their turn.  What counts is measured: the tokens of the latest rounds over the plain
steps they took.  When nothing is faster, the cheap candidate is left looking at the text if that costs next to nothing,
else decoding is plain, with tries that get rarer.

Every candidate has a budget of plain steps.  It starts with a few, a small share of every round written is added, and
what a round of its guessing takes beyond the tokens that it brings is paid from it; what it saves is put back.  At most
half of it is staked on one round.  So a text on which nothing can be gained costs the budgets and that share and no
more, by construction, while a candidate that gains has a full budget and is not limited at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf

from edgespec.control.adaptive import Adaptive, Learned
from edgespec.decoding.drafter import EMPTY, DraftRequest, Proposal, Verdict, Wrapper
from edgespec.decoding.stats import PLAIN, RoundTime
from edgespec.decoding.target import Pass
from edgespec.drafters.registry import AR

SHARE = 0.012  # of all rounds: plain steps that looking may cost in the long run, all candidates together
CREDIT = 2.5  # plain steps that each candidate starts with
FULL = 5.0  # most of a budget: what a text that stops gaining can cost at once
_LEAST = 0.5  # plain steps without which trying again is pointless
AGAIN, LONGEST_AGAIN = 64, 4096  # rounds before another try; doubled while tries fail
WINDOW = 64  # rounds that a gain is measured over
TRIED = 1.0  # predicted speed from which a method is tried: it was predicted from another text
PAYS = 1.01  # recent gain from which a method is kept
CHECK = 16  # rounds between two judgements
_SURE = 48  # rounds after which a measured gain is believed
_FEW = 4  # rounds drafted of ``CHECK`` that count as resting: then there is no gain to wait for
_RIVAL = 1.1  # how much more than the one in use another candidate must have given
_OFF = 2.0  # clip a round's measured time to within this factor of the estimate: it was interrupted, or caught up
_LOOK = 0.25  # most plain steps that looking without a guess is counted as


@dataclass(frozen=True)
class Candidate:
    """A method to choose from."""

    name: str  # of the method
    promise: float  # predicted speed over plain decoding
    make: Callable[[], Adaptive]  # builds its drafter, loading what that needs; called at its first turn
    cheap: bool = False  # whether looking without guessing costs next to nothing
    # it must be shown a text from its beginning, so it is not taken up in the middle of a request
    from_start: bool = False


@dataclass
class Arm:
    """What one candidate has shown on a session."""

    promise: float  # predicted speed over plain decoding
    gain: float | None = None  # measured when it was last judged; None = never
    budget: float = CREDIT  # plain steps that it may lose
    until: int = 0  # round before which it is not tried again
    wait: int = AGAIN  # rounds to wait after the next failure
    out: bool = False  # it failed in this request
    late: bool = False  # this request began without it, and it cannot follow
    note: str = ""  # why it was left last, in words

    @property
    def expected(self) -> float:
        """Speed to expect: the measured gain if it was one, else what was predicted."""
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
        """Say why it is not ready."""
        return self.note if self.out or now < self.until else "lost what looking may cost"

    def put_off(self, now: int, note: str) -> None:
        """Record a failure: try again later, and later still if that fails too."""
        self.note = note
        self.until = now + self.wait
        self.wait = min(2 * self.wait, LONGEST_AGAIN)

    def kept(self, gain: float) -> None:
        """Record the gain and reset the wait."""
        self.gain, self.wait = gain, AGAIN

    def pay(self, lost: float) -> None:
        """Take from the budget what a round took beyond its tokens, in plain steps; negative = it gained."""
        self.budget = max(min(self.budget - lost, FULL), -CREDIT)


@dataclass
class Bandit:
    """Budgets and measured gains of all candidates, and which one is in use."""

    each: list[Arm]  # in the candidates' order
    now: int = 0  # rounds so far, over all requests
    active: int | None = None  # which is in use; None = plain decoding
    # (tokens, plain steps taken, drafted and no probe) of the latest rounds of the one in use
    window: deque[tuple[int, float, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rounds_in_use: int = 0  # its rounds

    @property
    def gain(self) -> float:
        """Tokens per plain step over the window: speed against plain decoding's."""
        steps = sum(took for _, took, _ in self.window)
        return sum(tokens for tokens, _, _ in self.window) / steps if steps else 1.0

    def drafted(self, latest: int) -> int:
        """Count those of the ``latest`` rounds of the window that were drafted because it was expected to be faster."""
        return sum(drafted for _, _, drafted in list(self.window)[-latest:])

    def accrue(self) -> None:
        """Count a round: every budget has its share of it."""
        self.now += 1
        share = SHARE / len(self.each)
        for arm in self.each:
            arm.budget = min(arm.budget + share, FULL)

    def ready(self, which: int) -> bool:
        """Whether a candidate may be tried now."""
        return self.each[which].ready(self.now)

    def best(self, besides: int | None = None) -> int | None:
        """Return the candidate to expect most of, of those that may be tried and are not expected to lose."""
        ready = [at for at, arm in enumerate(self.each) if at != besides and self.ready(at) and arm.expected >= TRIED]
        return max(ready, key=lambda at: self.each[at].expected, default=None)

    def take(self, which: int | None) -> None:
        """Put another one in use."""
        self.active, self.rounds_in_use = which, 0
        self.window.clear()


class Auto(Wrapper):
    """Drafts by the candidate that is fastest.

    What was learned stays from request to request, but for texts that depend on how much is guessed (rejection
    sampling with a seed): those start from the predictions, and are decided by counts and given costs, never by the
    clock. Without ``fallback`` the first candidate always drafts, and only a failure makes way for another.
    """

    def __init__(self, candidates: Sequence[Candidate], fallback: bool = True) -> None:
        if not candidates:
            raise ValueError("expected at least one candidate, got none")
        super().__init__([])  # the candidate in use, once it has begun
        self.candidates = list(candidates)
        self.fallback = fallback
        self._made: dict[int, Adaptive] = {}
        self._inherited: dict[int, Learned] = {}  # for those that are not made yet
        self._learned = self._bandit = self._fresh()
        self._drafter: Adaptive | None = None  # the same
        self._request = DraftRequest([])
        self._seen = 0  # rounds of this request
        self._tokens = 1  # of the last round
        self._probe = False  # whether its proposal was one
        self.entered: list[int] = []
        self.rounds: dict[int, int] = {}

    def _fresh(self) -> Bandit:
        return Bandit([Arm(candidate.promise) for candidate in self.candidates])

    def learned(self) -> tuple[Bandit, dict[int, Learned]]:
        return deepcopy(self._learned), {which: made.learned() for which, made in self._made.items()}

    def go_on_from(self, learned: object) -> None:
        assert isinstance(learned, tuple)
        self._learned, self._inherited = learned

    # -- the loop ------------------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest) -> int | None:
        """Take up the candidate to expect most of; what earlier requests showed may have left none."""
        self._request = request
        self._bandit = bandit = self._fresh() if request.params.seeded_rejection else self._learned
        for arm in bandit.each:
            arm.out = arm.late = False
        self._use(None)
        self._seen, self.entered, self.rounds = 0, [], {}
        which = self._again() if self.fallback else 0
        if which != 0:
            first = bandit.each[0]
            better = which is not None and bandit.ready(0)
            past = f"in earlier requests {self.candidates[0].name} {first.past(bandit.now)}"
            why = "which gave more in earlier requests" if better else past
            self._tell(self.candidates[0].name, which, why)
        self._take(which)
        return None if which is None else self._enter(which, request.tokens)

    def prefill(self, tokens: list[int], most: int) -> int:
        """Let the candidate in use read, one taken up in the middle of the text, too."""
        self._take_up(tokens)
        return super().prefill(tokens, most)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Return what the candidate in use proposes, as far as its budget goes."""
        self._take_up(tokens)
        drafter = self._drafter
        if drafter is None:
            return EMPTY
        before = drafter.probes
        proposal = drafter.propose(tokens, budget)
        self._probe = drafter.probes > before
        return proposal

    def _take_up(self, tokens: list[int]) -> None:
        """Have the candidate in use ready for the next round, if there is one; now and then look for one."""
        bandit = self._bandit
        if bandit.active is None and bandit.now % CHECK == 0 and (which := self._again()) is not None:
            self._change(which, "another look")
        if bandit.active is None:
            return
        if self._drafter is None:
            self._enter(bandit.active, tokens)
        assert self._drafter is not None
        self._drafter.stake = bandit.each[bandit.active].stake if self.fallback else inf

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Let the candidate in use learn from the round."""
        self._tokens = len(verdict.path) + 1
        self._seen += 1
        active = self._bandit.active
        self._bandit.accrue()
        if self._drafter is not None and active is not None:
            if len(proposal):
                self.rounds[active] = self.rounds.get(active, 0) + 1
            self._drafter.observe(proposal, verdict, output)

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Count what the round took and brought, and judge now and then."""
        if self._drafter is not None:
            self._drafter.timed(proposal, time)
            self._count(proposal, time)

    def lose(self, why: str) -> bool:
        """Leave the candidate in use, which has failed, out of this request; False = there is no other."""
        bandit, active = self._bandit, self._bandit.active
        if active is None:
            return False
        bandit.each[active].out = True
        bandit.each[active].put_off(bandit.now, why)
        left = [at for at, arm in enumerate(bandit.each) if not (arm.out or arm.late)]
        if not left:
            self._take(None)
            return False
        self._change(self._again() if self.fallback else left[0], why)
        return True

    # -- what is decided -----------------------------------------------------------------------------------------------

    def _count(self, proposal: Proposal, time: RoundTime) -> None:
        """Add a round of the candidate in use.

        The time of a pass that others share is not this request's: expected costs are counted instead.
        """
        bandit, drafter = self._bandit, self._drafter
        assert drafter is not None
        assert bandit.active is not None
        mine = bandit.each[bandit.active]
        took = expected = drafter.price(proposal)
        plain_ms = drafter.cost.plain_ms
        if not time.shared and plain_ms and not drafter.reproducible:
            if proposal.empty:
                took = 1 + min(time.draft_ms / plain_ms, _LOOK)
            else:
                measured = (time.draft_ms + time.verify_ms) / plain_ms
                took = min(max(measured, took / _OFF), took * _OFF)
        mine.pay(max(took, expected) - self._tokens)  # a clock that is off must not let it look for nothing
        bandit.window.append((self._tokens, took, len(proposal) > 0 and not self._probe))
        bandit.rounds_in_use += 1
        if self.fallback and bandit.rounds_in_use % CHECK == 0:
            self._judge()

    def _judge(self) -> None:
        """Go on with the candidate in use, or change."""
        bandit = self._bandit
        assert bandit.active is not None
        mine, gain = bandit.each[bandit.active], bandit.gain
        name, sure = self.candidates[bandit.active].name, bandit.rounds_in_use >= _SURE
        if gain >= PAYS and not mine.exhausted:
            if not sure:
                return
            mine.kept(gain)
            rival = bandit.best(besides=bandit.active)
            # what was not tried deserves a look: it was predicted from another text
            other = None if rival is None else bandit.each[rival]
            if other is not None and other.expected > gain * (1 if other.gain is None else _RIVAL):
                self._change(rival, f"which promises {other.expected:.2f}x, {name} gave {gain:.2f}x")
            return
        if not sure and bandit.drafted(CHECK) > _FEW and not mine.exhausted:
            return  # too early to tell
        self._give_way(gain)

    def _give_way(self, gain: float) -> None:
        """Change to the next candidate, or none, where the one in use is not faster."""
        bandit, active = self._bandit, self._bandit.active
        assert active is not None
        mine, candidate = bandit.each[active], self.candidates[active]
        mine.gain = gain
        which = bandit.best(besides=active)
        looking = candidate.cheap and not mine.exhausted  # it may stay where nothing else is to be had
        if which is None and looking:
            return
        note = f"did not pay: {gain:.2f}x over {len(bandit.window)} rounds"
        if not looking:
            mine.put_off(bandit.now, note)
        self._change(self._again() if which is None else which, f"as {candidate.name} {note}")

    def _again(self) -> int | None:
        """Choose what to use: the best, else the cheap candidate, if it is affordable, else plain decoding."""
        bandit = self._bandit
        best = bandit.best()
        cheap = (at for at, one in enumerate(self.candidates) if one.cheap and bandit.ready(at))
        return next(cheap, None) if best is None else best

    def _change(self, which: int | None, why: str) -> None:
        """Use another candidate from the next proposal on."""
        self._tell(self.name, which, why)
        self._take(which)

    def _tell(self, left: str, which: int | None, why: str) -> None:
        switch = {"round": self._seen, "from": left, "to": self._name(which), "why": why}
        self._request.stats.switches.append(switch)

    def _enter(self, which: int, tokens: list[int]) -> int | None:
        """Load a candidate if it is its first turn, and let it begin -> what ``begin`` returns."""
        if which not in self._made:
            self._made[which] = self.candidates[which].make()
            if which in self._inherited:
                self._made[which].go_on_from(self._inherited.pop(which))
        drafter = self._made[which]
        known = drafter.begin(replace(self._request, tokens=tokens))
        self._use(drafter)
        if which not in self.entered:
            self.entered.append(which)
        return known

    def _take(self, which: int | None) -> None:
        """Put a candidate in use; None = plain decoding.  Those that would have had to see its text are out."""
        self._bandit.take(which)
        for at, (arm, candidate) in enumerate(zip(self._bandit.each, self.candidates, strict=True)):
            arm.late = candidate.from_start and at != which
        self.name = self._name(which)
        self._use(None)

    def _name(self, which: int | None) -> str:
        return PLAIN if which is None else self.candidates[which].name

    def _use(self, drafter: Adaptive | None) -> None:
        self._drafter, self.inside = drafter, [] if drafter is None else [drafter]

    # -- saying it -----------------------------------------------------------------------------------------------------

    @property
    def used(self) -> str:
        """The method of most rounds with guesses in this request; without any, the one in use, ``ar`` if none is."""
        if self.rounds:
            return self.candidates[max(self.rounds, key=lambda at: self.rounds[at])].name
        return AR if self._bandit.active is None else self.name

    @property
    def used_so_far(self) -> list[str]:
        """Methods that were in use in this request."""
        return [self.candidates[at].name for at in self.entered]

    @property
    def reason(self) -> str:
        """What was changed, and what the method in use says."""
        last = self._request.stats.switches[-3:]
        changes = [f"from round {at['round']} {at['to']}, {at['why']}" for at in last]
        return "; ".join(filter(None, [*changes, "" if self._drafter is None else self._drafter.reason]))
