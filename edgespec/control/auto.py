"""Method auto: the candidate of the best prediction drafts, is watched, and gives way to the next if it does not pay.

One candidate is in use at a time, inside adaptive control of its own; the others are neither asked nor told anything,
and are not even loaded before their turn.  What counts is measured: the tokens of the latest rounds over the plain
steps they took.  When nothing pays, the cheap candidate is left looking at the text if that costs next to nothing, else
decoding is plain, with tries that get rarer (``bandit``).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import inf

from edgespec.control.adaptive import Adaptive, Learned
from edgespec.control.bandit import PAYS, Arm, Bandit, Candidate
from edgespec.decoding.drafter import RoundTime, Wrapper
from edgespec.decoding.monitor import PLAIN, Control, Switched
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass
from edgespec.drafters.registry import AR

CHECK = 16  # rounds between two judgements
_SURE = 48  # rounds after which a measured gain is believed
_FEW = 4  # rounds drafted of ``CHECK`` that count as resting: then there is no gain to wait for
_RIVAL = 1.1  # how much more than the one in use another candidate must have given
_OFF = 2.0  # a round that takes so many times what it should was interrupted, or caught up: it is counted as that
_LOOK = 0.25  # plain steps that looking without a guess is counted as, at most


class Switch(Wrapper):
    """Drafts by the candidate that pays.

    What was learned stays from request to request, but for texts that depend on how much is guessed (rejection sampling
    with a seed): those start from the predictions, and are decided by counts and given costs, never by the clock.

    Args:
        candidates: in order of preference.
        fallback: False = the first candidate always drafts, and only a failure makes way for another.

    Attributes:
        name: the method in use, ``plain`` if none is.
        entered: candidates in use in this request, in order.
        rounds: rounds with guesses by candidate, in this request.
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
        self._control = Control()
        self._width = 1
        self._seen = 0  # rounds of this request
        self._tokens = 1  # of the last round
        self._probe = False  # whether its proposal was one
        self.entered: list[int] = []
        self.rounds: dict[int, int] = {}
        self.bind(SamplingParams(), Noise())

    def _fresh(self) -> Bandit:
        return Bandit([Arm(candidate.promise) for candidate in self.candidates])

    def learned(self) -> tuple[Bandit, dict[int, Learned]]:
        return deepcopy(self._learned), {which: made.learned() for which, made in self._made.items()}

    def go_on_from(self, learned: object) -> None:
        assert isinstance(learned, tuple)
        self._learned, self._inherited = learned

    # -- the loop ------------------------------------------------------------------------------------------------------

    def watch(self, control: Control) -> None:
        """Count and tell decisions there from now on."""
        self._control = control
        super().watch(control)

    def set_width(self, width: int) -> None:
        """Decide for passes over the rows of so many requests like this one."""
        self._width = width
        super().set_width(width)

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """How this request samples; every candidate is in again."""
        self._params, self._noise = params, noise
        self._bandit = self._fresh() if params.seeded_rejection else self._learned
        for arm in self._bandit.each:
            arm.out = arm.late = False
        self._use(None)
        self._seen = 0
        self.entered, self.rounds = [], {}

    def begin(self, tokens: list[int]) -> None:
        """Take up the candidate to expect most of; what earlier requests showed may have left none."""
        bandit = self._bandit
        which = self._again() if self.fallback else 0
        if which != 0:
            first = bandit.each[0]
            better = which is not None and bandit.ready(0)
            past = f"in earlier requests {self.candidates[0].name} {first.past(bandit.now)}"
            why = "which gave more in earlier requests" if better else past
            self._tell(self.candidates[0].name, which, why)
        self._take(which)
        if which is not None:
            self._enter(which, tokens)

    def prefill(self, tokens: list[int], most: int) -> int:
        """Let the candidate in use read, one taken up in the middle of the text, too."""
        self._take_up(tokens)
        return super().prefill(tokens, most)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """What the candidate in use proposes, as far as its budget goes."""
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
        """The candidate in use learns from the round."""
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
        """The candidate in use has failed: leave it out of this request; False = there is no other."""
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
        if not time.shared and plain_ms and not drafter.steady:
            if not len(proposal) and proposal.resume is None:
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
        """The candidate in use does not pay: the next one, or none."""
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
        """What to be at now: the best, else the cheap candidate, if it is affordable, else plain decoding."""
        bandit = self._bandit
        best = bandit.best()
        cheap = (at for at, one in enumerate(self.candidates) if one.cheap and bandit.ready(at))
        return next(cheap, None) if best is None else best

    def _change(self, which: int | None, why: str) -> None:
        """Another candidate is in use from the next proposal on."""
        self._tell(self.name, which, why)
        self._take(which)

    def _tell(self, left: str, which: int | None, why: str) -> None:
        self._control.switches.append(Switched(self._seen, left, self._name(which), why))

    def _enter(self, which: int, tokens: list[int]) -> None:
        """Load a candidate if it is its first turn, and tell it what it needs to know."""
        if which not in self._made:
            self._made[which] = self.candidates[which].make()
            if which in self._inherited:
                self._made[which].go_on_from(self._inherited.pop(which))
        drafter = self._made[which]
        drafter.watch(self._control)
        drafter.set_width(self._width)
        drafter.bind(self._params, self._noise)
        drafter.begin(tokens)
        self._use(drafter)
        if which not in self.entered:
            self.entered.append(which)

    def _take(self, which: int | None) -> None:
        """It is in use from now on; None = plain decoding.  Those that would have had to see its text are out."""
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
    def proposer(self) -> str:
        """Who made the last proposal."""
        return self.name if self._drafter is None else self._drafter.proposer

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
        changes = [f"from round {at.round} {at.taken}, {at.why}" for at in self._control.switches[-3:]]
        return "; ".join(filter(None, [*changes, "" if self._drafter is None else self._drafter.reason]))
