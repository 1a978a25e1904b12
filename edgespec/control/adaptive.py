"""Drafts as much as is fastest, and nothing where plain decoding is: a drafter around a drafter.

Each round verifies the K guesses that maximize

    (1 + sum_{i <= K} prod_{j <= i} a_j) / (d(K) + v(rows(K)))          K = 0 is plain decoding: 1

with a_j = P(guess j is accepted | all before it were), estimated by ``control.estimator`` for each bucket of the
drafter.  What one request shows counts for it at once, and becomes the prior of the engine's later requests.

A drafter that stops by itself knows more of each guess than its position.  It is told the length at most, and what a
guess more must gain: the tokens that rounds like its last ones give in the time that the guess and its row take.
Rounds are worth most where every guess gains that much (Dinkelbach's method).  Whether it drafts at all is decided by
what those rounds gave.

Guesses of a cheap drafter that are not worth a row are compared with the text that follows: they teach without a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from edgespec.control import estimator
from edgespec.control.estimator import NOTHING, Evidence, Pace, Rates
from edgespec.decoding.drafter import EMPTY, Drafter, DraftRequest, Proposal, Verdict, Wrapper
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Pass
from edgespec.formulas.cost import CostModel

PRIOR = 0.5  # acceptance where nothing is known
WAIT, LONGEST_WAIT = 16, 128  # plain rounds before a probe; doubled while probes fail
REST = 8  # rounds for which a costly drafter that is not worth asking is left alone: looking takes time, too
MOST_BUCKETS = 64  # whose acceptance is kept: some drafters number what they draft with, without end
KEEP, KEEP_ENGINE = 0.97, 0.998  # what a round leaves of the weight of older ones, within a request and beyond
WEIGHT, WEIGHT_ENGINE = 16.0, 16.0  # guesses that the engine's rates count as in a request, and the given ones there
ASSUMED = 3.0  # guesses that rates count as which nobody measured
HOPE, CLOSE = 0.75, 0.85  # standard deviations by which rates are raised where drafting is estimated so near to plain
_PACE = 48.0  # plain steps that the prior of a pace counts as
_PROBE = 2  # guesses of a probe
_STREAK = 6  # probes in a row, while all their guesses are accepted: one may not be enough to see that drafting helps
_PLAIN_PACE, _LOOKS = Pace(1.0, 1.0), 16.0  # the same of what looks of a cheap drafter are worth
_PENDING = 8  # proposals of a cheap drafter that wait for the text to judge them


@dataclass
class Bucket:
    """What a request has shown of one bucket of a drafter's guesses."""

    base: Rates  # rates that the request began with
    known: bool  # whether these were measured
    weight: float  # guesses that they count as
    evidence: Evidence = NOTHING
    rates: list[float] | None = None  # by both; None = to be estimated anew
    pace: Pace = field(default_factory=Pace)  # where the drafter stops by itself
    wait: int = WAIT  # plain rounds before the next probe
    waited: int = 0  # plain rounds since the last one
    probing: bool = False  # a probe is being verified
    streak: int = 0  # probes in a row
    drafting: bool | None = None  # whether it was drafted when last decided on


@dataclass
class Learned:
    """What an engine knows of a method: all its requests, in whichever session, begin with it and add to it."""

    cost: CostModel
    evidence: dict[int, Evidence] = field(default_factory=dict)  # by bucket
    pace: Pace = field(default_factory=Pace)
    bucket: int = 0  # of the last proposal: where a costly drafter's next one is expected
    nodes_per_depth: float = 1.0  # of a costly drafter's trees


@dataclass(slots=True)
class _Unverified:
    """Guesses that are compared with the text as it grows."""

    at: int  # tokens before them
    guesses: list[int]
    bucket: int
    length: int = 0  # as many as would have been verified
    steps: float = 1.0  # and what that round would have taken
    right: int = 0


class Adaptive(Wrapper):
    """Decides how much of ``inner``'s guessing is worth verifying.

    A cheap drafter proposes first, and its proposal is cut according to its bucket; a costly one is told its budget,
    which may be none.  Requests whose seeded text would depend on earlier ones (rejection sampling: the number of
    guesses decides which random numbers are used) begin with what was given, and leave nothing behind.

    ``learned`` is what the engine knows, its costs d and v included; ``gamma_max``: most guesses, whatever the budget;
    ``fallback``: False = always draft at least one guess; ``prior``: acceptance to start from, one for all positions
    or one for each.
    """

    def __init__(
        self,
        inner: Drafter,
        learned: Learned | CostModel,
        gamma_max: int = 8,
        fallback: bool = True,
        prior: float | Rates = PRIOR,
    ) -> None:
        super().__init__([inner])
        self.inner, self.name = inner, inner.name
        self.learned = Learned(learned) if isinstance(learned, CostModel) else learned
        self.gamma_max = gamma_max
        self.fallback = fallback
        self.prior: Rates = (prior,) if isinstance(prior, (int, float)) else tuple(prior)
        self._given = self.prior != (PRIOR,)  # whether the prior is more than an assumption
        self.plain = self.drafted = self.probes = 0  # rounds without a guess, with guesses, and those that were probes
        self.required = 1.0  # speed that a proposal must be predicted to reach; plain decoding's is 1
        self.eager = False  # whether the next request begins with a probe where it does not draft
        self.stake = inf  # plain steps that a round may lose if all its guesses are wrong
        self._at_once, self._cheap = inner.steps_at_once, inner.cheap
        self.reproducible = False  # whether this request is decided by counts and the given costs, never by the clock
        self._known = self.learned  # what this request adds to
        self._costs = self.cost
        self._buckets: dict[int, Bucket] = {}
        self._priced: tuple[object, list[float]] = None, []  # what prices were last asked for, and they
        self._stats = Stats()  # of the request
        self._rest = 0  # rounds that are plain without looking
        self._asked = 0  # guesses that a costly drafter was last asked for
        self._unverified: list[_Unverified] = []
        self._looks = Pace()  # what rounds of a cheap drafter were expected to give
        self._last: tuple[int, float, float] = (0, 0.0, self.prior[0])  # best length, its speed, acceptance

    @property
    def cost(self) -> CostModel:
        """Costs as this machine's clock taught them."""
        return self.learned.cost

    def begin(self, request: DraftRequest) -> int | None:
        """Begin a request; see ``start``."""
        self.start(request)
        return self.inner.begin(request)

    def start(self, request: DraftRequest) -> None:
        """Start from what the engine knows, or from what was given where the request's text must be reproducible."""
        self._stats, self.reproducible = request.stats, request.params.seeded_rejection
        self._known = Learned(self.cost.given()) if self.reproducible else self.learned
        self._costs, self._rest = self._known.cost, 0
        self._buckets, self._unverified, self._looks = {}, [], Pace()
        self._priced = None, []

    def prefill(self, tokens: list[int], most: int) -> int:
        """Let the inner drafter read what it needs where it will be asked next."""
        if not most and (self._rest or not self.inner.prefill(tokens, 0)):  # most rounds
            return 0
        if not self._cheap and self.fallback:
            bucket, rows = self._expected(self.gamma_max)
            record, costs = self._bucket(bucket), self._prices(rows)
            if not self._best(record, costs)[0] and not self._to_probe(record, costs):
                return 0  # it will not be asked
        return self.inner.prefill(tokens, most)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Return as much of the inner drafter's proposal as is fastest to verify."""
        if self._rest:
            self._rest -= 1
            self.plain += 1
            return EMPTY
        budget = min(budget, self.gamma_max)
        if self._cheap:
            if self._unverified:
                self._judge(tokens)
            proposal = self.inner.propose(tokens, budget)
            if len(proposal):
                whole = proposal
                proposal = proposal.truncated(self._decide(proposal.bucket, _rows(proposal, budget)))
                if not len(proposal):
                    self._put_aside(whole, len(tokens))
            if not len(proposal):
                self._count_look(1.0, 1.0)
        else:
            bucket, rows = self._expected(budget)
            self._asked = self._decide(bucket, rows)
            if self.inner.stops:
                self.inner.least_gain = self._least_gain(rows)
            most = budget if self.inner.chooses else self._asked
            proposal = self.inner.propose(tokens, most) if self._asked else EMPTY
        if len(proposal):
            self.drafted += 1
            self._known.bucket = proposal.bucket
            self._stats.expected = self._expect(proposal)
        else:
            self.plain += 1
            self._stats.expected = None
        return proposal

    def promised(self, budget: int) -> float:
        """Predict the speed of a costly drafter's next proposal, at least 1; a cheap one's is not known."""
        if self._cheap:
            return 1.0
        bucket, rows = self._expected(min(budget, self.gamma_max))
        best, speed, _ = self._best(self._bucket(bucket), self._prices(rows))
        return max(speed, 1.0) if best else 1.0

    def speed(self, budget: int) -> float:
        """Estimate tokens per plain step of its next rounds at the best length, which may be below plain decoding's 1.

        Of a cheap drafter these are the rounds without a guess, too.
        """
        if self._cheap:
            before = estimator.pace_with(_PLAIN_PACE, _LOOKS, self._known.pace)
            return estimator.pace_with(before, _LOOKS, self._looks).speed
        bucket, rows = self._expected(min(budget, self.gamma_max))
        record, costs = self._bucket(bucket), self._prices(rows)
        if self.inner.stops:
            return self._pace(record, costs).speed
        return estimator.best_length(self._rates(record), costs)[2]

    def least_stake(self) -> float:
        """Price a round over one guess that is wrong: plain steps beyond plain decoding's."""
        return self._steps(1, 2) - 1

    def look(self, tokens: list[int], budget: int) -> None:
        """Let a cheap drafter guess without a pass, to learn what its guesses would be worth."""
        budget = min(budget, self.gamma_max)
        self._judge(tokens)
        proposal = self.inner.propose(tokens, budget)
        best, steps = 0, 1.0
        if len(proposal):
            costs = self._prices(_rows(proposal, budget))
            best = self._best(self._bucket(proposal.bucket), costs)[0]
            steps = costs[best]
            self._put_aside(proposal, len(tokens), best, steps)
        if not best:
            self._count_look(1.0, 1.0)

    def _count_look(self, tokens: float, steps: float) -> None:
        """Add what a round of a cheap drafter gave, or would have given."""
        self._looks = estimator.pace_after(self._looks, tokens, steps, KEEP)
        self._known.pace = estimator.pace_after(self._known.pace, tokens, steps, KEEP_ENGINE)

    def _expected(self, budget: int) -> tuple[int, list[int]]:
        """Bucket of a costly drafter's next proposal, and [budget + 1] rows of a pass over it down to each depth."""
        bucket, rows = self.inner.forecast(budget)
        if rows is None:
            rows = [round(1 + self._known.nodes_per_depth * depth) for depth in range(budget + 1)]
        return self._known.bucket if bucket is None else bucket, rows

    def _decide(self, bucket: int, rows: list[int]) -> int:
        """Decide how deep to draft; ``rows[k]`` = rows of a pass over the guesses down to depth k."""
        record, stats, costs = self._bucket(bucket), self._stats, self._prices(rows)
        self._last = self._best(record, costs)
        best = self._last[0]
        if self.fallback and record.drafting is not None and record.drafting != bool(best):
            if best:
                stats.recoveries += 1
            else:
                stats.fallbacks += 1
        if best or record.drafting:
            record.drafting = bool(best)
        if best or not self.fallback:
            record.wait, record.waited, record.streak = WAIT, 0, 0
            return max(best, 1)
        if length := self._to_probe(record, costs):
            record.waited = 0
            record.probing = True
            record.streak += 1 if self._could_gain(costs) else _STREAK
            self.probes += 1
            stats.probes += 1
            return length
        self._rest = 0 if self._cheap else max(min(REST, record.wait - record.waited) - 1, 0)
        record.waited += 1 + self._rest
        return 0

    def _to_probe(self, record: Bucket, costs: list[float]) -> int:
        """Count the guesses of a probe where one is due: as many as its stake allows."""
        if record.waited < record.wait and (record.known or record.evidence is not NOTHING):
            return 0
        longest = min(_PROBE, len(costs) - 1)
        return next((n for n in range(longest, 0, -1) if costs[n] - 1 <= self.stake), 0)

    def _could_gain(self, costs: list[float]) -> bool:
        """Say whether guesses would be worth their time if all were accepted; else no probe need be repeated."""
        return any((n + 1) / costs[n] > self.required for n in range(1, len(costs)))

    def _best(self, record: Bucket, costs: list[float]) -> tuple[int, float, float]:
        """Find the length of the highest predicted speed -> it, the speed, acceptance of the first guess."""
        rates = self._rates(record)
        if not self.inner.stops or len(costs) == 1:
            best, speed, highest = estimator.best_length(rates, costs, self.required, self.stake)
            if not best and highest > CLOSE * self.required:  # near plain decoding: what is not known well is tried
                rates = estimator.hopeful(rates, record.weight, record.evidence, HOPE)
                best, speed, _ = estimator.best_length(rates, costs, self.required, self.stake)
            return best, speed if best else highest, rates[0]
        # what may be risked, and the speed that rounds had of a drafter that stops by itself
        speed = self._pace(record, costs).speed
        most = next((n for n in range(len(costs) - 1, 0, -1) if costs[n] - 1 <= self.stake), 0)
        return most if speed > self.required else 0, speed, rates[0]

    def _rates(self, record: Bucket) -> list[float]:
        """Estimate acceptance by position, once for every round that teaches."""
        if record.rates is None:
            record.rates = estimator.posterior(record.base, record.weight, record.evidence, max(self.gamma_max, 1))
        return record.rates

    def _pace(self, record: Bucket, costs: list[float]) -> Pace:
        """Predict tokens and steps from this request's rounds, the engine's, and those of the best fixed length."""
        _, _, highest = estimator.best_length(record.base, costs)
        before = estimator.pace_with(Pace(highest, 1.0), _PACE, self._known.pace)
        return estimator.pace_with(before, _PACE, record.pace)

    def _least_gain(self, rows: list[int]) -> Callable[[int], float]:
        """Price a guess more after those down to a depth: what rounds give in its time, or plain decoding."""
        worth = max(self._last[1], self.required)
        return lambda depth: worth * (self._steps(depth + 1, rows[depth + 1]) - self._steps(depth, rows[depth]))

    def _prices(self, rows: list[int]) -> list[float]:
        """Price each depth -> plain steps, up to the depth that the proposal ends at."""
        key = self._costs.version, self._stats.width, tuple(rows)
        if self._priced[0] != key:
            costs = [1.0]
            for depth in range(1, len(rows)):
                if rows[depth] == rows[depth - 1]:
                    break
                costs.append(self._steps(depth, rows[depth]))
            self._priced = key, costs
        return self._priced[1]

    def _steps(self, depth: int, rows: int) -> float:
        """Count the plain steps that drafting ``depth`` deep and verifying ``rows`` rows take.

        In a batch the others are taken to draft as this one does: a pass is over W times the rows, and W drafts are
        waited for.
        """
        costs, width = self._costs, self._stats.width
        draft = costs.d(1 if self._at_once else depth)
        return draft + costs.v(rows) if width == 1 else (draft * width + costs.v(width * rows)) / costs.v(width)

    def price(self, proposal: Proposal) -> float:
        """Predict the plain steps of a round over this proposal, whatever is accepted."""
        depth = proposal.deepest if proposal.head_start is None else max(proposal.deepest, 1)
        return self._steps(depth, len(proposal) + 1) if depth else 1.0

    def _expect(self, proposal: Proposal) -> tuple[float, float]:
        """Predict tokens, and time in plain steps, of a round over ``proposal``."""
        costs, record, stats, depth = self._costs, self._bucket(proposal.bucket), self._stats, proposal.deepest
        steps = 1 if self._at_once else depth
        stats.draft_steps, stats.draft_step_cost = steps, self.cost.d(steps) / steps
        stats.control_plain_ms = self.cost.plain_ms
        tokens = estimator.tokens(self._rates(record), depth)
        return tokens, costs.d(steps) + costs.v(len(proposal) + 1)

    def _bucket(self, number: int) -> Bucket:
        """Return what this request knows of a bucket; at first that is what the engine does."""
        if number not in self._buckets:
            if len(self._buckets) == MOST_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            seen = self._known.evidence.get(number, NOTHING)
            prior = self.inner.rates.get(number, self.prior)
            length = max(len(prior), len(seen.tested), 1)
            base = estimator.posterior(prior, WEIGHT_ENGINE if self._given else ASSUMED, seen, length)
            known = self._given or seen is not NOTHING
            self._buckets[number] = Bucket(base, known, WEIGHT if known else ASSUMED, waited=WAIT if self.eager else 0)
        return self._buckets[number]

    # -- learning ------------------------------------------------------------------------------------------------------

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Learn what was accepted; pass the round on.

        Where drafting ran layers of the pass, a step that found no guess counts as a wrong one: it took the time of
        one.
        """
        if not proposal.empty:
            record, known = self._bucket(proposal.bucket), self._known
            right, tested = len(verdict.path), proposal.tested(verdict.path)
            if proposal.head_start is not None and right == len(proposal) < self._asked:
                tested += 1
            self._learn(proposal.bucket, right, tested)
            if proposal.parents is not None:
                known.nodes_per_depth = len(proposal) / proposal.deepest
            if self._cheap:
                self._count_look(right + 1, self.price(proposal))
            if self.inner.stops:
                price = self.price(proposal)
                record.pace = estimator.pace_after(record.pace, right + 1, price, KEEP)
                known.pace = estimator.pace_after(known.pace, right + 1, price, KEEP_ENGINE)
            if record.probing:
                record.probing = False
                if tested == right and record.streak < _STREAK:
                    record.waited = record.wait
                else:
                    record.wait, record.streak = min(2 * record.wait, LONGEST_WAIT), 0
        self.inner.observe(proposal, verdict, output)

    def _learn(self, bucket: int, right: int, tested: int) -> None:
        """Add guesses that were put to the test, to the request's evidence and to the engine's."""
        record, known = self._bucket(bucket), self._known.evidence
        record.evidence, record.rates = estimator.learn(record.evidence, right, tested, KEEP), None
        known[bucket] = estimator.learn(known.get(bucket, NOTHING), right, tested, KEEP_ENGINE)
        if len(known) > MOST_BUCKETS:
            del known[next(iter(known))]

    def _put_aside(self, proposal: Proposal, at: int, length: int = 0, steps: float = 1.0) -> None:
        """Keep guesses that no pass verifies, to be compared with the text; of a tree the text tells less."""
        if proposal.parents is None and proposal.probs is None:
            self._unverified.append(_Unverified(at, proposal.tokens.tolist(), proposal.bucket, length, steps))
            del self._unverified[:-_PENDING]

    def _judge(self, tokens: list[int]) -> None:
        """Compare guesses that were not verified with the text that came."""
        left = []
        for one in self._unverified:
            guesses, known = one.guesses, len(tokens) - one.at
            while one.right < min(len(guesses), known) and tokens[one.at + one.right] == guesses[one.right]:
                one.right += 1
            if one.right == min(len(guesses), known) < len(guesses):
                left.append(one)
            else:
                self._learn(one.bucket, one.right, min(one.right + 1, len(guesses)))
                if one.length:
                    self._count_look(min(one.right, one.length) + 1.0, one.steps)
        self._unverified = left

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Learn what the round cost, whoever had rows in its pass."""
        if not self.reproducible and not self._rest:
            steps = 1 if self._at_once else proposal.deepest
            if proposal.head_start is None:
                self.cost.observe_verify(time.rows, time.verify_ms)
                if len(proposal) and self.inner.caught_up:
                    self.cost.observe_draft(steps, time.draft_ms)
            else:  # part of the pass over the first row ran while drafting, too
                self.cost.observe_round(time.rows, max(steps, 1), time.draft_ms + time.verify_ms)
        self.inner.timed(proposal, time)

    @property
    def reason(self) -> str:
        """Why it drafts, or does not, in one line."""
        best, gain, acceptance = self._last
        if not self.plain + self.drafted:
            return "nothing was decoded yet"
        if not best and gain == 0:
            return "the drafter found nothing to propose"
        predicted = f"predicted {gain:.2f}x at acceptance {acceptance:.2f}"
        if best:
            guesses = f"{best} guess{'es' if best > 1 else ''}"
            return f"drafting is on: predicted {gain:.2f}x with {guesses} at acceptance {acceptance:.2f}"
        return f"{'drafting did not pay' if self.fallback else 'drafting is kept on, and does not pay'}: {predicted}"

    @property
    def details(self) -> list[str]:
        """What was counted, and what the inner drafter adds; a sentence each."""
        counted = f"{self.name}: {self.drafted} rounds with guesses, {self.plain} without, {self.probes} probes"
        return [counted, *filter(None, [self.inner.reason])]


def _rows(proposal: Proposal, budget: int) -> list[int]:
    """Count the rows of a pass over the guesses down to each depth -> [budget + 1]."""
    if proposal.parents is None:
        return [1 + min(depth, len(proposal)) for depth in range(budget + 1)]
    depths = [proposal.depth(i) for i in range(len(proposal))]
    return [1 + sum(d <= depth for d in depths) for depth in range(budget + 1)]
