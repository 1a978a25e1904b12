"""Method auto: draft with the candidate of the highest estimated speed; switch if another is clearly faster.

One candidate is in use at a time, under its own adaptive control.  Costly candidates get no calls before their turn,
and are not even loaded.  All are compared by one estimate, in tokens per plain step (``Control.speed``).  It starts
from the acceptance and costs that export measured, then follows the engine's requests.  The measured speed of the
candidate in use corrects its own estimate.  A candidate that was left is not used again in the same request while
another one gains.  A cheap candidate keeps proposing without verification, if that takes almost no time: the later
text shows the value of its proposals.

Every candidate has a budget of plain steps.  The budget starts with a few steps, and every generated round adds a small
share.  A round that takes longer than its tokens are worth reduces the budget; a round that saves time refills it.  One
round may risk at most half of the budget.  So a text without any gain costs at most the budgets and that share, by
construction.  A candidate that gains has a full budget and no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.estimator import Pace, pace_after, pace_with
from edgespec.control.learned import AGAIN, Standing
from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.policy import Ask, Outcome
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.stats import PLAIN, Stats
from edgespec.drafters.registry import AR, AUTO

SHARE = 0.012  # of all rounds: plain steps that looking may cost in the long run, all candidates together
TRIED = 1.0  # minimum estimated speed to try a method: the estimate may come from a different text
PAYS = 1.01  # minimum speed to keep a method
CHECK = 16  # rounds between two judgements
_RIVAL, _UNTRIED = 1.05, 1.0  # how much more than the one in use another must be estimated at, tried here or not
_RETURN = 1.3  # the same of one that was left in this request
_BELIEF = 32.0  # weight, in plain steps, of the estimate compared with measured rounds
_KEEP = 0.985  # what a round leaves of the weight of older ones
_OFF = 2.0  # clip a round's measured time to within this factor of the estimate: it was interrupted, or caught up
_LOOK = 0.25  # most plain steps that looking without a guess is counted as
_PASSING = 0.01  # of a plain step: a look that takes less is made while another candidate is in use


@dataclass
class Candidate:
    """A method to choose from."""

    name: str  # of the method
    promise: float  # estimated speed over plain decoding before its drafter is made
    make: Callable[[], Control]  # builds its drafter, loading what that needs; called at its first turn
    cheap: bool = False  # whether looking without guessing costs next to nothing
    # it needs a text from its beginning, so it never starts in the middle of a request
    from_start: bool = False
    standing: Standing = field(default_factory=Standing)  # in all sessions of an engine
    control: Control | None = None  # once it was made

    def made(self) -> Control:
        """Return its control, which is made at the first call."""
        if self.control is None:
            self.control = self.make()
        return self.control


@dataclass
class InUse:
    """The candidate in use of a request, and its results."""

    which: int | None = None  # None = plain decoding
    rounds: int = 0
    pace: Pace = field(default_factory=Pace)


class Auto(Adaptive):
    """Drafts with the fastest candidate.

    Results stay from request to request, with one exception: texts that depend on the number of draft tokens (rejection
    sampling with a seed).  These start from the predictions, and use counts and given costs, never the clock.  Without
    ``fallback`` the first candidate always drafts, and only a failure switches to another.
    """

    switches = True

    def __init__(self, candidates: Sequence[Candidate], fallback: bool = True) -> None:
        if not candidates:
            raise ValueError("expected at least one candidate, got none")
        self.candidates = list(candidates)
        self.fallback = fallback
        self._depth = 8  # guesses that the last round might have had, of an earlier request where it was the last
        super().__init__([], AUTO)

    def _reset(self, stats: Stats, first: Sequence[Drafter]) -> None:
        super()._reset(stats, first)
        self._seeded = False
        self._standings = [one.standing for one in self.candidates]  # this request's
        self._in_use = InUse()
        self._begun: set[int] = set()  # candidates whose control has begun this request
        self._seen = 0  # rounds of this request
        self._out: set[int] = set()  # failed in this request, or cannot follow it any more
        self._left: set[int] = set()  # given up in this request for a faster one
        self._look_ms: dict[int, float] = {}  # of cheap candidates: what looking took lately
        self.entered: list[int] = []
        self.rounds: dict[int, int] = {}

    # -- the loop ------------------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest, stats: Stats, first: Sequence[Drafter] = ()) -> None:
        """Start with the candidate of the highest estimate; earlier requests may have excluded all of them."""
        self._reset(stats, first)
        self._seeded = request.params.seeded_rejection
        if self._seeded:
            self._standings = [Standing() for _ in self.candidates]
        for candidate in self.candidates:
            if candidate.control is not None:
                candidate.control.begin(stats, self._seeded)
        which = self._next() if self.fallback else 0
        if which != 0:
            mine, name = self._standings[0], self.candidates[0].name
            past = f"in earlier requests {name} {mine.past}"
            why = "which gave more in earlier requests" if which is not None and mine.ready else past
            self._tell(name, which, why)
        self._take(which)
        if which is not None:
            self._enter(which)

    def choose(self, tokens: list[int], budget: int) -> Sequence[Ask]:
        """Ask the candidate in use, within its budget; let cheap others propose without verification."""
        self._depth = budget
        if self._in_use.which is None and self._standings[0].now % CHECK == 0 and (which := self._next()) is not None:
            self._change(which, "another look")
        if self._in_use.which is not None and not self.controls:
            self._enter(self._in_use.which)
        which = self._in_use.which
        self._limit = inf if which is None or not self.fallback else self._standings[which].round_loss_limit
        asks = super().choose(tokens, budget)
        return [*asks, *self._lookers(budget)] if self.fallback and not self._seeded else asks

    def _lookers(self, budget: int) -> list[Ask]:
        """Ask cheap candidates that are not in use for proposals, if that takes almost no time."""
        asks: list[Ask] = []
        plain_ms = self._plain_ms()
        if plain_ms is None:
            return asks
        for at, candidate in enumerate(self.candidates):
            if not candidate.cheap or at == self._in_use.which or at in self._out:
                continue
            if self._look_ms.get(at, 0.0) > _PASSING * plain_ms:
                self._look_ms[at] = inf  # not again in this request
                continue
            try:
                control = self._made(at)
            except Exception:  # the failure is counted when it becomes the candidate in use
                self._out.add(at)
                continue
            asks.append(Ask(control.drafter, min(budget, control.gamma_max), reviewed=True, looks=True))
        return asks

    def review(self, ask: Ask, proposal: Proposal, tokens: list[int], ms: float) -> Proposal:
        """Cut the proposal of a cheap candidate in use; learn from that of another one."""
        if not ask.looks:
            return super().review(ask, proposal, tokens, ms)
        for at, candidate in enumerate(self.candidates):
            if candidate.control is not None and candidate.control.drafter is ask.drafter:
                candidate.control.look(proposal, tokens, ask.most)
                limit = _PASSING * (self._plain_ms() or inf)
                took = min(ms, 2 * limit)  # one that was interrupted decides nothing
                self._look_ms[at] = 0.9 * self._look_ms.get(at, 0.5 * limit) + 0.1 * took
        return EMPTY

    def _plain_ms(self) -> float | None:
        known = (one.control.cost.plain_ms for one in self.candidates if one.control is not None)
        return next((ms for ms in known if ms), None)

    def told(self, outcome: Outcome) -> None:
        """Let the candidate in use learn, count the round's time and tokens, and judge from time to time."""
        self._seen += 1
        for standing in self._standings:
            standing.accrue(SHARE / len(self._standings))
        super().told(outcome)
        which = self._in_use.which
        if self.controls and which is not None:
            control = self.controls[0]
            own = outcome.winner is not None and outcome.winner.drafter is control.drafter
            if own and len(outcome.proposal):
                self.rounds[which] = self.rounds.get(which, 0) + 1
            self._count(control, outcome, outcome.proposal if own else None)

    def lose(self, drafter: Drafter | None, why: str) -> bool:
        """Exclude a failed candidate from this request, None = the one in use -> whether there is another."""
        made = (one.control for one in self.candidates)
        failed = [at for at, control in enumerate(made) if control is not None and control.drafter is drafter]
        if drafter is None and self._in_use.which is not None:
            failed = [self._in_use.which]
        if not failed:  # no candidate
            return super().lose(drafter, why) or (drafter is not None and len(self._out) < len(self.candidates))
        (which,) = failed
        self._out.add(which)
        self._standings[which].back_off(why)
        if which != self._in_use.which:
            return True
        left = [at for at in range(len(self.candidates)) if at not in self._out]
        if not left:
            self._take(None)
            return bool(self.drafters)
        self._change(self._next() if self.fallback else left[0], why)
        return True

    # -- what is decided -----------------------------------------------------------------------------------------------

    def estimate(self, which: int) -> float:
        """Estimate the speed of a candidate over plain decoding: the figure that compares all."""
        candidate = self.candidates[which]
        # what earlier requests made must not matter where the text is reproducible
        if candidate.control is None or (self._seeded and which not in self._begun):
            return candidate.promise
        return candidate.control.speed(self._depth)

    def _count(self, control: Control, outcome: Outcome, proposal: Proposal | None) -> None:
        """Add a round of the candidate in use, and its ``proposal`` in it; None = it made none.

        The time of a pass that others share is not this request's: expected costs are counted instead.
        """
        using, time = self._in_use, outcome.time
        assert using.which is not None
        tokens = 1 if proposal is None else len(outcome.verdict.path) + 1
        took = expected = control.price(proposal)
        plain_ms, draft_ms = control.cost.plain_ms, time.draft_ms
        if self._first:
            draft_ms = outcome.ms(control.drafter)
        if not time.shared and plain_ms and not control.reproducible:
            if proposal is None:
                took = 1 + min(draft_ms / (time.verify_ms or plain_ms), _LOOK)
            else:
                took = min(max(control.measured(time, draft_ms), took / _OFF), took * _OFF)
        # a wrong clock must not make a candidate free of charge
        self._standings[using.which].charge(max(took, expected) - tokens)
        using.pace = pace_after(using.pace, tokens, took, _KEEP)
        using.rounds += 1
        if self.fallback and using.rounds % CHECK == 0:
            self._judge(control)

    def gain(self) -> float:
        """Estimate the speed of the candidate in use, corrected by the results of its rounds."""
        which = self._in_use.which
        if which is None:
            return 1.0
        return pace_with(Pace(self.estimate(which), 1.0), _BELIEF, self._in_use.pace).speed

    def _judge(self, control: Control) -> None:
        """Keep the candidate in use, or switch."""
        using = self._in_use
        assert using.which is not None
        mine, name, gain = self._standings[using.which], self.candidates[using.which].name, self.gain()
        spent = mine.exhausted or not control.affordable
        if gain >= PAYS and not spent:
            if using.pace.speed >= PAYS:
                mine.wait, mine.note, mine.gained = AGAIN, "", True
            rival = self._best_candidate(besides=using.which)
            if rival is not None:
                made = self.candidates[rival].control is not None
                factor = _RETURN if rival in self._left else _RIVAL if made else _UNTRIED
                other = self.estimate(rival)
                if other > factor * gain:
                    self._left.add(using.which)
                    self._change(rival, f"estimated at {other:.2f}x, {name} at {gain:.2f}x")
            return
        self._switch_candidate(gain, spent)

    def _switch_candidate(self, gain: float, spent: bool = False) -> None:
        """Change to the next candidate, or none, where the one in use is not faster, or has spent its budget."""
        using = self._in_use
        assert using.which is not None
        candidate = self.candidates[using.which]
        which = self._best_candidate(besides=using.which)
        looking = candidate.cheap and not spent  # it may stay where nothing else is to be had
        if which is None and looking:
            return
        note = f"did not pay: {gain:.2f}x over {using.rounds} rounds"
        if gain >= PAYS:
            note = f"lost what looking may cost in {using.rounds} rounds"
        mine = self._standings[using.which]
        if gain >= PAYS and mine.gained:
            mine.gained = False  # bad luck, or a busy machine: it waits for its budget alone
        elif not looking:
            mine.back_off(note)
        self._change(self._next() if which is None else which, f"as {candidate.name} {note}")

    def _hope(self, which: int) -> float:
        """Estimate a candidate's speed; one that was too slow before gets another try after its waiting time.

        One that keeps proposing without verification gets none: its gain is known.
        """
        estimate = self.estimate(which)
        if self._looks_on(which):
            return estimate if estimate >= PAYS else 0.0
        return max(estimate, self.candidates[which].promise) if self._standings[which].note else estimate

    def _looks_on(self, which: int) -> bool:
        return which != self._in_use.which and self._look_ms.get(which, inf) < inf

    def _ready(self, which: int) -> bool:
        return which not in self._out and self._standings[which].ready

    def _best_candidate(self, besides: int | None = None) -> int | None:
        """Return the allowed candidate of the highest estimate that is not expected to lose."""
        estimates = {
            at: found
            for at in range(len(self.candidates))
            if at != besides and self._ready(at) and (found := self._hope(at)) >= TRIED
        }
        return max(estimates, key=lambda at: estimates[at], default=None)

    def _next(self) -> int | None:
        """Choose what to use: the best, else the cheap candidate, if it is affordable, else plain decoding."""
        best = self._best_candidate()
        each = enumerate(self.candidates)
        cheap = (at for at, one in each if one.cheap and self._ready(at) and not self._looks_on(at))
        return next(cheap, None) if best is None else best

    def _change(self, which: int | None, why: str) -> None:
        """Use another candidate from the next proposal on."""
        self._tell(self._name(self._in_use.which), which, why)
        self._take(which)

    def _tell(self, left: str, which: int | None, why: str) -> None:
        switch = {"round": self._seen, "from": left, "to": self._name(which), "why": why}
        self._stats.switches.append(switch)

    def _made(self, which: int) -> Control:
        """Load a candidate if it is its first turn, and let its control begin if it has not begun this request."""
        fresh = self.candidates[which].control is None
        control = self.candidates[which].made()
        if fresh:
            control.begin(self._stats, self._seeded)
        self._begun.add(which)
        return control

    def _enter(self, which: int) -> None:
        """Make a candidate the active one, and let its control begin again if it returns."""
        returns = which in self._begun and not self.candidates[which].cheap
        control = self._made(which)
        if returns:
            control.begin(self._stats, self._seeded)
        control.eager = bool(self._standings[which].note)
        self.controls, self.drafters = [control], [*self._first, control.drafter]
        if which not in self.entered:
            self.entered.append(which)

    def _take(self, which: int | None) -> None:
        """Put a candidate in use; None = plain decoding.  Candidates that needed to read its text are excluded."""
        self._in_use = InUse(which)
        self._out |= {at for at, one in enumerate(self.candidates) if one.from_start and at != which}
        self.controls, self.drafters = [], [*self._first]

    def _name(self, which: int | None) -> str:
        return PLAIN if which is None else self.candidates[which].name

    # -- saying it -----------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> str:
        """The method in use; ``PLAIN`` = none is."""
        return self._name(self._in_use.which)

    @property
    def used(self) -> str:
        """The method of most rounds with guesses in this request; without any, the one in use, ``ar`` if none is."""
        if self.rounds:
            return self.candidates[max(self.rounds, key=lambda at: self.rounds[at])].name
        return AR if self._in_use.which is None else self.in_use

    @property
    def methods(self) -> list[str]:
        """Methods that were in use in this request."""
        return [self.candidates[at].name for at in self.entered]

    @property
    def reason(self) -> str:
        """Explain in one line the decision of the method in use, or why none is in use."""
        if self.controls:
            return self.controls[0].reason
        return self._stats.switches[-1]["why"] if self._stats.switches else ""

    @property
    def details(self) -> list[str]:
        """Return the switches, the estimates, and details of the method in use; a sentence each."""
        changes = [f"from round {at['round']} {at['to']}, {at['why']}" for at in self._stats.switches]
        figures = ", ".join(f"{one.name} {self.estimate(at):.2f}x" for at, one in enumerate(self.candidates))
        inner = self.controls[0].details if self.controls else []
        return [*changes, f"estimated speeds: {figures}", *inner]
