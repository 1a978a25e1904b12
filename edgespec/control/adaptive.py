"""Drafts as much as is fastest, and nothing where plain decoding is: a drafter around a drafter.

Each round verifies the K guesses that maximise

    (1 + sum_{i <= K} prod_{j <= i} a_j) / (d(K) + v(rows(K)))          K = 0 is plain decoding: 1

with a_j = P(guess j accepted | all before it were), learned for each bucket of the inner drafter.

A drafter that stops by itself knows more of each guess than its position.  It is told the length at most, and what a
guess more must gain: the tokens that rounds like its last ones give in the time that the guess and its row take.
Rounds are worth most where every guess gains that much (Dinkelbach's method).  Whether it drafts at all is decided by
what those rounds gave.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf

from edgespec.decoding.drafter import EMPTY, Drafter, DraftRequest, Proposal, Verdict, Wrapper
from edgespec.decoding.stats import RoundTime, Stats
from edgespec.decoding.target import Pass
from edgespec.formulas.cost import CostModel, expected_tokens

PRIOR = 0.5  # acceptance where nothing is known
WAIT, LONGEST_WAIT = 16, 128  # plain rounds before a probe; doubled while probes fail
REST = 8  # rounds for which a costly drafter that is not worth asking is left alone: looking takes time, too
MOST_BUCKETS = 64  # whose acceptance is kept: some drafters number what they draft with, without end
_DECAY = 0.9
_ROUND_DECAY = 0.98  # of what rounds of a drafter that stops by itself gave and took
_PRIOR_ROUNDS = 2  # that what was predicted before the first counts as
_PROBE = 2  # guesses of a probe
_STREAK = 6  # probes in a row, while all their guesses are accepted: one may not be enough to see that drafting helps


@dataclass
class Record:
    """What one bucket of a drafter's guesses has shown of its acceptance."""

    rates: list[float]  # a_j for the positions seen so far; [0] starts as the prior
    seen: list[int] = field(default_factory=lambda: [0])  # observations of each
    wait: int = WAIT  # plain rounds before the next probe
    waited: int = 0  # plain rounds since the last one
    probing: bool = False  # a probe is being verified
    streak: int = 0  # probes in a row
    drafting: bool | None = None  # whether it was drafted when last decided on
    tokens: float = 0.0  # of the latest rounds, where the drafter stops by itself
    steps: float = 0.0  # time of these rounds in plain steps

    def rate(self, position: int) -> float:
        """Return a at ``position``; one never put to the test is taken to be like the one before."""
        return self.rates[min(position, len(self.rates) - 1)]

    def learn(self, position: int, accepted: bool) -> None:
        """Count a guess at ``position`` that was put to the test."""
        if position == len(self.rates):
            self.rates.append(self.rates[-1])
            self.seen.append(0)
        # A running mean in which the prior counts as two guesses, until the decay is slower than that.
        step = max(1 - _DECAY, 1 / (self.seen[position] + 3))
        self.rates[position] += step * (accepted - self.rates[position])
        self.seen[position] += 1


@dataclass
class Learned:
    """What an ``Adaptive`` keeps from request to request."""

    cost: CostModel
    records: dict[int, Record]
    bucket: int
    nodes_per_depth: float


class Adaptive(Wrapper):
    """Decides how much of ``inner``'s guessing is worth verifying.

    A cheap drafter proposes first, and its proposal is cut according to its bucket; a costly one is told its budget,
    which may be none.  What is learned is carried across requests, except for requests whose seeded text would then
    depend on earlier ones (rejection sampling: the number of guesses decides which random numbers are used).

    ``cost`` is d and v, and learns from the clock; ``gamma_max``: most guesses, whatever the budget; ``fallback``:
    False = always draft at least one guess; ``prior``: acceptance to start from.
    """

    def __init__(
        self, inner: Drafter, cost: CostModel, gamma_max: int = 8, fallback: bool = True, prior: float = PRIOR
    ) -> None:
        super().__init__([inner])
        self.inner, self.name = inner, inner.name
        self.cost = cost
        self.gamma_max = gamma_max
        self.fallback = fallback
        self.prior = prior
        self.plain = self.drafted = self.probes = 0  # rounds without a guess, with guesses, and those that were probes
        self.required = 1.0  # speed that a proposal must be predicted to reach; plain decoding's is 1
        self.stake = inf  # plain steps that a round may lose if all its guesses are wrong
        self._at_once, self._cheap = inner.steps_at_once, inner.cheap
        self._records: dict[int, Record] = {}
        self._bucket = 0  # of the last proposal: where a costly drafter's next one is expected
        self.reproducible = False  # whether this request is decided by counts and the given costs, never by the clock
        self._costs = cost
        self._nodes_per_depth = 1.0  # of a costly drafter's trees
        self._stats = Stats()  # of the request
        self._rest = 0  # rounds that are plain without looking
        self._asked = 0  # guesses that a costly drafter was last asked for
        self._last: tuple[int, float, float] = (0, 0.0, prior)  # best length, its predicted speed-up, acceptance

    def begin(self, request: DraftRequest) -> int | None:
        """Begin a request; forget and freeze where it asks for a reproducible text."""
        self._stats, self.reproducible = request.stats, request.params.seeded_rejection
        self._costs, self._rest = self.cost.given() if self.reproducible else self.cost, 0
        if self.reproducible:
            self._records, self._bucket, self._nodes_per_depth = {}, 0, 1.0
        return self.inner.begin(request)

    def learned(self) -> Learned:
        return deepcopy(Learned(self.cost, self._records, self._bucket, self._nodes_per_depth))

    def go_on_from(self, learned: object) -> None:
        assert isinstance(learned, Learned)
        self.cost = self._costs = learned.cost
        self._records, self._bucket, self._nodes_per_depth = learned.records, learned.bucket, learned.nodes_per_depth

    def prefill(self, tokens: list[int], most: int) -> int:
        """Let the inner drafter read what it needs where it will be asked next."""
        if not most and (self._rest or not self.inner.prefill(tokens, 0)):  # most rounds
            return 0
        if not self._cheap and self.fallback:
            bucket, rows = self._expected(self.gamma_max)
            record = self._record(bucket)
            if not self._best(record, rows)[0] and not self._to_probe(record, rows):
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
            proposal = self.inner.propose(tokens, budget)
            if len(proposal):
                proposal = proposal.truncated(self._decide(proposal.bucket, _rows(proposal, budget)))
        else:
            bucket, rows = self._expected(budget)
            self._asked = self._decide(bucket, rows)
            if self.inner.stops:
                self.inner.least_gain = self._least_gain(rows)
            most = budget if self.inner.chooses else self._asked
            proposal = self.inner.propose(tokens, most) if self._asked else EMPTY
        if len(proposal):
            self.drafted += 1
            self._bucket = proposal.bucket
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
        best, speed, _ = self._best(self._record(bucket), rows)
        return max(speed, 1.0) if best else 1.0

    def _expected(self, budget: int) -> tuple[int, list[int]]:
        """Bucket of a costly drafter's next proposal, and [budget + 1] rows of a pass over it down to each depth."""
        bucket, rows = self.inner.forecast(budget)
        if rows is None:
            rows = [round(1 + self._nodes_per_depth * depth) for depth in range(budget + 1)]
        return self._bucket if bucket is None else bucket, rows

    def _decide(self, bucket: int, rows: list[int]) -> int:
        """Decide how deep to draft; ``rows[k]`` = rows of a pass over the guesses down to depth k."""
        record, stats = self._record(bucket), self._stats
        self._last = self._best(record, rows)
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
        if length := self._to_probe(record, rows):
            record.waited = 0
            record.probing = True
            record.streak += 1 if self._could_gain(rows) else _STREAK
            self.probes += 1
            stats.probes += 1
            return length
        self._rest = 0 if self._cheap else max(min(REST, record.wait - record.waited) - 1, 0)
        record.waited += 1 + self._rest
        return 0

    def _to_probe(self, record: Record, rows: list[int]) -> int:
        """Count the guesses of a probe where one is due: as many as its stake allows."""
        if record.waited < record.wait and record.seen[0]:  # of a new bucket nothing is known but the prior
            return 0
        longest = min(_PROBE, len(rows) - 1)
        return next((n for n in range(longest, 0, -1) if self._steps(n, rows[n]) - 1 <= self.stake), 0)

    def _could_gain(self, rows: list[int]) -> bool:
        """Say whether guesses would be worth their time if all were accepted; else no probe need be repeated."""
        return any((n + 1) / self._steps(n, rows[n]) > self.required for n in range(1, len(rows)))

    def _best(self, record: Record, rows: list[int]) -> tuple[int, float, float]:
        """Find the length of the highest predicted speed -> it, the speed, acceptance of the first guess."""
        if self.inner.stops and len(rows) > 1:
            return self._longest(record, rows)
        best, gain, tried = 0, self.required, 0.0
        tokens = chance = 1.0
        for length in range(1, len(rows)):
            if rows[length] == rows[length - 1]:
                break  # the proposal ends here
            chance *= record.rate(length - 1)
            tokens += chance
            steps = self._steps(length, rows[length])
            predicted = tokens / steps
            tried = max(tried, predicted)
            if predicted > gain and steps - 1 <= self.stake:
                best, gain = length, predicted
        return best, gain if best else tried, record.rate(0)

    def _longest(self, record: Record, rows: list[int]) -> tuple[int, float, float]:
        """Do the same for a drafter that stops by itself: what may be risked, and the speed that its rounds had."""
        if not record.steps:
            steps = {length: self._steps(length, rows[length]) for length in range(1, len(rows))}
            tokens = {length: expected_tokens(record.rate(0), length) for length in steps}
            best = max(steps, key=lambda length: tokens[length] / steps[length])
            record.tokens, record.steps = _PRIOR_ROUNDS * tokens[best], _PRIOR_ROUNDS * steps[best]
        speed = record.tokens / record.steps
        most = (n for n in range(len(rows) - 1, 0, -1) if self._steps(n, rows[n]) - 1 <= self.stake)
        return next(most, 0) if speed > self.required else 0, speed, record.rate(0)

    def _least_gain(self, rows: list[int]) -> Callable[[int], float]:
        """Price a guess more after those down to a depth: what rounds give in its time, or plain decoding."""
        worth = max(self._last[1], self.required)
        return lambda depth: worth * (self._steps(depth + 1, rows[depth + 1]) - self._steps(depth, rows[depth]))

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
        costs, record, stats, depth = self._costs, self._record(proposal.bucket), self._stats, proposal.deepest
        steps = 1 if self._at_once else depth
        stats.draft_steps, stats.draft_step_cost = steps, self.cost.d(steps) / steps
        stats.control_plain_ms = self.cost.plain_ms
        tokens = expected_tokens([record.rate(position) for position in range(depth)], depth)
        return tokens, costs.d(steps) + costs.v(len(proposal) + 1)

    def _record(self, bucket: int) -> Record:
        if bucket not in self._records:
            if len(self._records) == MOST_BUCKETS:
                del self._records[next(iter(self._records))]
            self._records[bucket] = Record([self.prior])
        return self._records[bucket]

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Learn what was accepted; pass the round on.

        Where drafting ran layers of the pass, a step that found no guess counts as a wrong one: it took the time of
        one.
        """
        if not proposal.empty:
            record = self._record(proposal.bucket)
            right, tested = len(verdict.path), proposal.tested(verdict.path)
            if proposal.head_start is not None and right == len(proposal) < self._asked:
                tested += 1
            for position in range(tested):
                record.learn(position, position < right)
            if proposal.parents is not None:
                self._nodes_per_depth = len(proposal) / proposal.deepest
            if self.inner.stops:
                record.tokens = _ROUND_DECAY * record.tokens + right + 1
                record.steps = _ROUND_DECAY * record.steps + self.price(proposal)
            if record.probing:
                record.probing = False
                if tested == right and record.streak < _STREAK:
                    record.waited = record.wait
                else:
                    record.wait, record.streak = min(2 * record.wait, LONGEST_WAIT), 0
        self.inner.observe(proposal, verdict, output)

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
        """Why it drafts, or does not, in words, and what the inner drafter adds."""
        (best, gain, acceptance), rounds = self._last, self.plain + self.drafted
        predicted = f"predicted {gain:.2f}x at acceptance {acceptance:.2f}"
        if not rounds:
            why = "nothing was decoded yet"
        elif best:
            guesses = f"{best} guess{'es' if best > 1 else ''}"
            why = f"drafting is on: predicted {gain:.2f}x with {guesses} at acceptance {acceptance:.2f}"
        elif gain == 0:
            why = "the drafter found nothing to propose"
        elif not self.fallback:
            why = f"drafting does not pay, but was kept on: {predicted}"
        else:
            why = f"drafting did not pay: {predicted}; {self.probes} probes in {rounds} rounds"
        return "; ".join(filter(None, (why, self.inner.reason)))


def _rows(proposal: Proposal, budget: int) -> list[int]:
    """Count the rows of a pass over the guesses down to each depth -> [budget + 1]."""
    if proposal.parents is None:
        return [1 + min(depth, len(proposal)) for depth in range(budget + 1)]
    depths = [proposal.depth(i) for i in range(len(proposal))]
    return [1 + sum(d <= depth for d in depths) for depth in range(budget + 1)]
