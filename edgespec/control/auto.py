"""Method auto: the candidate of the highest estimated speed drafts; another takes its place where it is clearly faster.

One candidate is in use at a time, inside adaptive control of its own; costly others are neither asked nor told
anything, and are not even loaded before their turn.  All are compared by one estimate, tokens per plain step
(``Adaptive.speed``): the export's acceptance and prices first, then what the engine's requests have shown.  What the
one in use gave by the clock corrects its own estimate.  A candidate that was left is not taken up again in the same
request while another one gains.  A cheap candidate goes on looking at the text, if that takes next to no time: what its
guesses would have been worth is known without a pass.

Every candidate has a budget of plain steps.  It starts with a few, a small share of every round written is added, and
what a round of its guessing takes beyond the tokens that it brings is paid from it; what it saves is put back.  At most
half of it is staked on one round.  So a text on which nothing can be gained costs the budgets and that share and no
more, by construction, while a candidate that gains has a full budget and is not limited at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter

from edgespec.control.adaptive import Adaptive
from edgespec.control.estimator import Pace, pace_after, pace_with
from edgespec.decoding.drafter import EMPTY, DraftRequest, Proposal, Verdict, Wrapper
from edgespec.decoding.stats import PLAIN, RoundTime
from edgespec.decoding.target import Pass
from edgespec.drafters.registry import AR

SHARE = 0.012  # of all rounds: plain steps that looking may cost in the long run, all candidates together
CREDIT = 2.5  # plain steps that each candidate starts with
FULL = 5.0  # most of a budget: what a text that stops gaining can cost at once
_LEAST = 0.5  # plain steps without which trying again is pointless
AGAIN, LONGEST_AGAIN = 96, 4096  # rounds before another try; doubled while tries fail
TRIED = 1.0  # estimated speed from which a method is tried: it may have been estimated from another text
PAYS = 1.01  # speed from which a method is kept
CHECK = 16  # rounds between two judgements
_RIVAL, _UNTRIED = 1.05, 1.0  # how much more than the one in use another must be estimated at, tried here or not
_RETURN = 1.3  # the same of one that was left in this request
_BELIEF = 32.0  # plain steps that the estimate counts as beside what rounds in use gave
_KEEP = 0.985  # what a round leaves of the weight of older ones
_OFF = 2.0  # clip a round's measured time to within this factor of the estimate: it was interrupted, or caught up
_LOOK = 0.25  # most plain steps that looking without a guess is counted as
_PASSING = 0.01  # of a plain step: a look that takes less is made while another candidate is in use


@dataclass(frozen=True)
class Candidate:
    """A method to choose from."""

    name: str  # of the method
    promise: float  # estimated speed over plain decoding before its drafter is made
    make: Callable[[], Adaptive]  # builds its drafter, loading what that needs; called at its first turn
    cheap: bool = False  # whether looking without guessing costs next to nothing
    # it must be shown a text from its beginning, so it is not taken up in the middle of a request
    from_start: bool = False


@dataclass
class Arm:
    """What an engine knows of a candidate beside its estimate."""

    budget: float = CREDIT  # plain steps that it may lose
    until: int = 0  # round before which it is not tried again
    wait: int = AGAIN  # rounds to wait after the next failure
    note: str = ""  # why it was left last, in words

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
        return now >= self.until and not self.exhausted

    def past(self, now: int) -> str:
        """Say why it is not ready."""
        return self.note if now < self.until else "lost what looking may cost"

    def put_off(self, now: int, note: str) -> None:
        """Record a failure: try again later, and later still if that fails too."""
        self.note = note
        self.until = now + self.wait
        self.wait = min(2 * self.wait, LONGEST_AGAIN)

    def pay(self, lost: float) -> None:
        """Take from the budget what a round took beyond its tokens, in plain steps; negative = it gained."""
        self.budget = max(min(self.budget - lost, FULL), -CREDIT)


@dataclass
class Arms:
    """All candidates of an engine's method auto; its sessions share them."""

    each: list[Arm]  # in the candidates' order
    now: int = 0  # rounds so far, over all requests

    def accrue(self) -> None:
        """Count a round: every budget has its share of it."""
        self.now += 1
        share = SHARE / len(self.each)
        for arm in self.each:
            arm.budget = min(arm.budget + share, FULL)


@dataclass
class InUse:
    """The candidate in use of a request, and what it gave."""

    which: int | None = None  # None = plain decoding
    rounds: int = 0
    pace: Pace = field(default_factory=Pace)


class Auto(Wrapper):
    """Drafts by the candidate that is fastest.

    What was learned stays from request to request, but for texts that depend on how much is guessed (rejection
    sampling with a seed): those start from the predictions, and are decided by counts and given costs, never by the
    clock. Without ``fallback`` the first candidate always drafts, and only a failure makes way for another.
    """

    def __init__(self, candidates: Sequence[Candidate], fallback: bool = True, arms: Arms | None = None) -> None:
        if not candidates:
            raise ValueError("expected at least one candidate, got none")
        super().__init__([])  # the candidate in use, once it has begun
        self.candidates = list(candidates)
        self.fallback = fallback
        self.arms = arms or self._fresh()
        self._arms = self.arms  # this request's
        self._made: dict[int, Adaptive] = {}
        self._begun: set[int] = set()  # of them, those that this request has begun
        self._in_use = InUse()
        self._drafter: Adaptive | None = None  # of the candidate in use
        self._request = DraftRequest([])
        self._seen = 0  # rounds of this request
        self._tokens = 1  # of the last round
        self._budget = 8  # guesses that the last round might have had
        self._out: set[int] = set()  # failed in this request, or cannot follow it any more
        self._left: set[int] = set()  # given up in this request for a faster one
        self._look_ms: dict[int, float] = {}  # of cheap candidates: what looking took lately
        self.entered: list[int] = []
        self.rounds: dict[int, int] = {}

    def _fresh(self) -> Arms:
        return Arms([Arm() for _ in self.candidates])

    # -- the loop ------------------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest) -> int | None:
        """Take up the candidate of the highest estimate; what earlier requests showed may have left none."""
        self._request = request
        self._arms = arms = self._fresh() if request.params.seeded_rejection else self.arms
        self._out, self._left, self._begun = set(), set(), set()
        self._seen, self.entered, self.rounds, self._look_ms = 0, [], {}, {}
        self._use(None)
        for made in self._made.values():
            made.start(request)
        which = self._next() if self.fallback else 0
        if which != 0:
            first = arms.each[0]
            name = self.candidates[0].name
            past = f"in earlier requests {name} {first.past(arms.now)}"
            why = "which gave more in earlier requests" if which is not None and first.ready(arms.now) else past
            self._tell(name, which, why)
        self._take(which)
        return None if which is None else self._enter(which, request.tokens)

    def prefill(self, tokens: list[int], most: int) -> int:
        """Let the candidate in use read, one taken up in the middle of the text, too."""
        self._take_up(tokens)
        return super().prefill(tokens, most)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Return what the candidate in use proposes, as far as its budget goes."""
        self._budget = budget
        self._take_up(tokens)
        drafter = self._drafter
        proposal = EMPTY if drafter is None else drafter.propose(tokens, budget)
        if self.fallback:
            self._look_on(tokens, budget)
        return proposal

    def _take_up(self, tokens: list[int]) -> None:
        """Have the candidate in use ready for the next round, if there is one; now and then look for one."""
        arms = self._arms
        if self._in_use.which is None and arms.now % CHECK == 0 and (which := self._next()) is not None:
            self._change(which, "another look")
        active = self._in_use.which
        if active is None:
            return
        if self._drafter is None:
            self._enter(active, tokens)
        assert self._drafter is not None
        self._drafter.stake = arms.each[active].stake if self.fallback else inf

    def _look_on(self, tokens: list[int], budget: int) -> None:
        """Let cheap candidates that are not in use look at the text, where that takes next to no time."""
        plain_ms = next((ms for made in self._made.values() if (ms := made.cost.plain_ms)), None)
        if plain_ms is None or budget < 1 or self._request.params.seeded_rejection:
            return
        for at, candidate in enumerate(self.candidates):
            if not candidate.cheap or at == self._in_use.which or at in self._out:
                continue
            limit = _PASSING * plain_ms
            if self._look_ms.get(at, 0.0) > limit:
                self._look_ms[at] = inf  # not again in this request
                continue
            start = perf_counter()
            try:
                watching = self._begin(at, tokens)  # once: it reads the prompt
                start = perf_counter()
                watching.look(tokens, budget)
            except Exception:  # if it is taken up, it fails there, and is counted
                self._out.add(at)
            took = min(1000 * (perf_counter() - start), 2 * limit)  # one that was interrupted decides nothing
            self._look_ms[at] = 0.9 * self._look_ms.get(at, 0.5 * limit) + 0.1 * took

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Let the candidate in use learn from the round."""
        self._tokens = len(verdict.path) + 1
        self._seen += 1
        active = self._in_use.which
        self._arms.accrue()
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
        active = self._in_use.which
        if active is None:
            return False
        self._out.add(active)
        self._arms.each[active].put_off(self._arms.now, why)
        left = [at for at in range(len(self.candidates)) if at not in self._out]
        if not left:
            self._take(None)
            return False
        self._change(self._next() if self.fallback else left[0], why)
        return True

    # -- what is decided -----------------------------------------------------------------------------------------------

    def estimate(self, which: int) -> float:
        """Estimate the speed of a candidate over plain decoding: the one figure that all are compared by."""
        made = self._made.get(which)
        # what earlier requests made must not matter where the text is reproducible
        unknown = made is None or (self._request.params.seeded_rejection and which not in self._begun)
        return self.candidates[which].promise if unknown or made is None else made.speed(self._budget)

    def _count(self, proposal: Proposal, time: RoundTime) -> None:
        """Add a round of the candidate in use.

        The time of a pass that others share is not this request's: expected costs are counted instead.
        """
        using, drafter = self._in_use, self._drafter
        assert drafter is not None
        assert using.which is not None
        mine = self._arms.each[using.which]
        took = expected = drafter.price(proposal)
        plain_ms = drafter.cost.plain_ms
        if not time.shared and plain_ms and not drafter.reproducible:
            if proposal.empty:
                took = 1 + min(time.draft_ms / plain_ms, _LOOK)
            else:
                measured = (time.draft_ms + time.verify_ms) / plain_ms
                took = min(max(measured, took / _OFF), took * _OFF)
        mine.pay(max(took, expected) - self._tokens)  # a clock that is off must not let it look for nothing
        using.pace = pace_after(using.pace, self._tokens, took, _KEEP)
        using.rounds += 1
        if self.fallback and using.rounds % CHECK == 0:
            self._judge()

    def gain(self) -> float:
        """Estimate the speed of the candidate in use, corrected by what its rounds gave."""
        which = self._in_use.which
        if which is None:
            return 1.0
        return pace_with(Pace(self.estimate(which), 1.0), _BELIEF, self._in_use.pace).speed

    def _judge(self) -> None:
        """Go on with the candidate in use, or change."""
        using, arms = self._in_use, self._arms
        assert using.which is not None
        mine, name, gain = arms.each[using.which], self.candidates[using.which].name, self.gain()
        spent = mine.exhausted or not self._drafter_affordable()
        if gain >= PAYS and not spent:
            if using.pace.speed >= PAYS:
                mine.wait, mine.note = AGAIN, ""
            rival = self._best(besides=using.which)
            if rival is not None:
                factor = _RETURN if rival in self._left else _RIVAL if rival in self._made else _UNTRIED
                other = self.estimate(rival)
                if other > factor * gain:
                    self._left.add(using.which)
                    self._change(rival, f"estimated at {other:.2f}x, {name} at {gain:.2f}x")
            return
        self._give_way(gain, spent)

    def _drafter_affordable(self) -> bool:
        """Tell whether the candidate in use may stake as much as one guess."""
        return self._drafter is None or self._drafter.least_stake() <= self._drafter.stake

    def _give_way(self, gain: float, spent: bool = False) -> None:
        """Change to the next candidate, or none, where the one in use is not faster, or has spent its budget."""
        using, arms = self._in_use, self._arms
        assert using.which is not None
        mine, candidate = arms.each[using.which], self.candidates[using.which]
        which = self._best(besides=using.which)
        looking = candidate.cheap and not spent  # it may stay where nothing else is to be had
        if which is None and looking:
            return
        note = f"did not pay: {gain:.2f}x over {using.rounds} rounds"
        if gain >= PAYS:
            note = f"lost what looking may cost in {using.rounds} rounds"
        if not looking:
            mine.put_off(arms.now, note)
        self._change(self._next() if which is None else which, f"as {candidate.name} {note}")

    def _hope(self, which: int) -> float:
        """Estimate a candidate's speed; one that did not pay before is owed another look once its time has come.

        One that looks on all the time is owed none: it is known what it would gain.
        """
        estimate = self.estimate(which)
        if self._looks_on(which):
            return estimate if estimate >= PAYS else 0.0
        return max(estimate, self.candidates[which].promise) if self._arms.each[which].note else estimate

    def _looks_on(self, which: int) -> bool:
        return which != self._in_use.which and self._look_ms.get(which, inf) < inf

    def _ready(self, which: int) -> bool:
        return which not in self._out and self._arms.each[which].ready(self._arms.now)

    def _best(self, besides: int | None = None) -> int | None:
        """Return the candidate of the highest estimate, of those that may be tried and are not expected to lose."""
        estimates = {
            at: found
            for at in range(len(self.candidates))
            if at != besides and self._ready(at) and (found := self._hope(at)) >= TRIED
        }
        return max(estimates, key=lambda at: estimates[at], default=None)

    def _next(self) -> int | None:
        """Choose what to use: the best, else the cheap candidate, if it is affordable, else plain decoding."""
        best = self._best()
        each = enumerate(self.candidates)
        cheap = (at for at, one in each if one.cheap and self._ready(at) and not self._looks_on(at))
        return next(cheap, None) if best is None else best

    def _change(self, which: int | None, why: str) -> None:
        """Use another candidate from the next proposal on."""
        self._tell(self.name, which, why)
        self._take(which)

    def _tell(self, left: str, which: int | None, why: str) -> None:
        switch = {"round": self._seen, "from": left, "to": self._name(which), "why": why}
        self._request.stats.switches.append(switch)

    def _begin(self, which: int, tokens: list[int]) -> Adaptive:
        """Load a candidate if it is its first turn, and let it begin if this request has not begun it."""
        if which not in self._made:
            self._made[which] = self.candidates[which].make()
        drafter = self._made[which]
        if which not in self._begun:
            self._begun.add(which)
            drafter.begin(replace(self._request, tokens=tokens))
        return drafter

    def _enter(self, which: int, tokens: list[int]) -> int | None:
        """Put a candidate to work -> what its ``begin`` returns."""
        if which not in self._made:
            self._made[which] = self.candidates[which].make()
        drafter, known = self._made[which], None
        drafter.eager = bool(self._arms.each[which].note)
        if which not in self._begun or not self.candidates[which].cheap:  # a cheap one may have looked on
            self._begun.add(which)
            known = drafter.begin(replace(self._request, tokens=tokens))
        self._use(drafter)
        if which not in self.entered:
            self.entered.append(which)
        return known

    def _take(self, which: int | None) -> None:
        """Put a candidate in use; None = plain decoding.  Those that would have had to see its text are out."""
        self._in_use = InUse(which)
        self._out |= {at for at, one in enumerate(self.candidates) if one.from_start and at != which}
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
        return AR if self._in_use.which is None else self.name

    @property
    def used_so_far(self) -> list[str]:
        """Methods that were in use in this request."""
        return [self.candidates[at].name for at in self.entered]

    @property
    def reason(self) -> str:
        """Say what the method in use decided, or why there is none, in one line."""
        if self._drafter is not None:
            return self._drafter.reason
        return self._request.stats.switches[-1]["why"] if self._request.stats.switches else ""

    @property
    def details(self) -> list[str]:
        """What was changed, estimates, and what the method in use adds; a sentence each."""
        switches = self._request.stats.switches
        changes = [f"from round {at['round']} {at['to']}, {at['why']}" for at in switches]
        figures = ", ".join(f"{one.name} {self.estimate(at):.2f}x" for at, one in enumerate(self.candidates))
        inner = [] if self._drafter is None else self._drafter.details
        return [*changes, f"estimated speeds: {figures}", *inner]
