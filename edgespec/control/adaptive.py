"""Drafts as much as pays, and nothing while nothing pays: a drafter around a drafter.

Each round verifies the K guesses that maximise

    (1 + sum_{i <= K} prod_{j <= i} a_j) / (d(K) + v(rows(K)))          K = 0 is plain decoding: 1

with a_j = P(guess j accepted | all before it were), learned for each bucket of the inner drafter.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import inf

from edgespec.control.acceptance import LONGEST_WAIT, PRIOR, WAIT, Record
from edgespec.decoding.drafter import Drafter, RoundTime, Wrapper
from edgespec.decoding.monitor import Control
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass
from edgespec.formulas.cost import CostModel

_PROBE = 2  # guesses of a probe
MOST_BUCKETS = 64  # whose acceptance is kept: some drafters number what they draft with, without end
_STREAK = 6  # probes in a row, while all their guesses are accepted: one may not be enough to see that drafting pays


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

    Args:
        inner: the drafter.
        cost: d and v; learns from the clock.
        gamma_max: most guesses, whatever the budget.
        fallback: False = always draft at least one guess.
        prior: acceptance to start from, for example the one the bundle's manifest has measured.

    Attributes:
        plain: rounds without a guess, by decision or because the inner drafter had none.
        drafted: rounds with guesses.
        probes: those of them that were probes.
        stake: plain steps that a round may lose if all its guesses are wrong.
    """

    def __init__(
        self,
        inner: Drafter,
        cost: CostModel,
        gamma_max: int = 8,
        fallback: bool = True,
        prior: float = PRIOR,
    ) -> None:
        super().__init__([inner])
        self.inner, self.name = inner, inner.name
        self.cost = cost
        self.gamma_max = gamma_max
        self.fallback = fallback
        self.prior = prior
        self.plain = self.drafted = self.probes = 0
        self._floor = 1.0
        self.stake = inf
        self._at_once, self._cheap = inner.steps_at_once, inner.cheap
        self._records: dict[int, Record] = {}
        self._bucket = 0  # of the last proposal: where a costly drafter's next one is expected
        self._steady = False  # this request is decided without the clock
        self._costs = cost
        self._nodes_per_depth = 1.0  # of a costly drafter's trees
        self._control = Control()
        self._width = 1  # requests in a pass
        self._asked = 0  # guesses that a costly drafter was last asked for
        self._last: tuple[int, float, float] = (0, 0.0, prior)  # best length, its predicted speed-up, acceptance

    @property
    def proposer(self) -> str:
        return self.inner.proposer

    def set_width(self, width: int) -> None:
        self._width = width
        super().set_width(width)

    def watch(self, control: Control) -> None:
        self._control = control
        super().watch(control)

    def require(self, speed: float) -> None:
        """Offer only proposals that promise this speed: plain decoding's, 1, or what another drafter would offer."""
        self._floor = speed

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """Pass on how this request samples; forget and freeze where it asks for a reproducible text."""
        self._steady = params.seeded_rejection
        self._costs = self.cost.given() if self._steady else self.cost
        if params.seeded_rejection:
            self._records, self._bucket, self._nodes_per_depth = {}, 0, 1.0
        super().bind(params, noise)

    def learned(self) -> Learned:
        return deepcopy(Learned(self.cost, self._records, self._bucket, self._nodes_per_depth))

    def go_on_from(self, learned: object) -> None:
        assert isinstance(learned, Learned)
        self.cost = self._costs = learned.cost
        self._records, self._bucket, self._nodes_per_depth = learned.records, learned.bucket, learned.nodes_per_depth

    def prefill(self, tokens: list[int], most: int) -> int:
        """Let the inner drafter read what it needs where it will be asked next."""
        if not most and not self.inner.prefill(tokens, 0):  # most rounds
            return 0
        return self.inner.prefill(tokens, most) if self._will_ask() else 0

    def _will_ask(self) -> bool:
        """Whether the inner drafter would be asked for a proposal now."""
        if self._cheap:
            return True
        record, rows, before = self._record(self._expected_bucket), self._expected_rows(self.gamma_max), self._last
        best, self._last = self._best(record, rows), before
        return best > 0 or not self.fallback or self._to_probe(record, rows) > 0

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The inner drafter's proposal, as long as it pays to verify."""
        budget = min(budget, self.gamma_max)
        if self._cheap:
            proposal = self.inner.propose(tokens, budget)
            if len(proposal):
                proposal = proposal.truncated(self._decide(proposal.bucket, _rows(proposal, budget)))
        else:
            self._asked = self._decide(self._expected_bucket, self._expected_rows(budget))
            proposal = self.inner.propose(tokens, self._asked) if self._asked else EMPTY
        if len(proposal):
            self.drafted += 1
            self._bucket = proposal.bucket
            self._control.expected = self._expect(proposal)
        else:
            self.plain += 1
            self._control.expected = None
        return proposal

    def promised(self, budget: int) -> float:
        """Speed that a costly drafter's next proposal is predicted to give, at least 1; a cheap one's is not known."""
        if self._cheap:
            return 1.0
        before = self._last
        self._best(self._record(self._expected_bucket), self._expected_rows(min(budget, self.gamma_max)))
        found, self._last = max(self._last[1], 1.0) if self._last[0] else 1.0, before
        return found

    @property
    def _expected_bucket(self) -> int:
        """Of a costly drafter's next proposal: what it says, else that of the last one."""
        known = self.inner.next_bucket
        return self._bucket if known is None else known

    def _expected_rows(self, budget: int) -> list[int]:
        """[budget + 1]: rows of a pass over a costly drafter's guesses down to each depth."""
        return self.inner.rows(budget) or [round(1 + self._nodes_per_depth * depth) for depth in range(budget + 1)]

    def _decide(self, bucket: int, rows: list[int]) -> int:
        """How deep to draft; ``rows[k]`` = rows of a pass over the guesses down to depth k."""
        record = self._record(bucket)
        best = self._best(record, rows)
        if self.fallback and record.drafting is not None and record.drafting != bool(best):
            if best:
                self._control.recoveries += 1
            else:
                self._control.fallbacks += 1
        if best or record.drafting:
            record.drafting = bool(best)
        if best or not self.fallback:
            record.wait, record.sat, record.streak = WAIT, 0, 0
            return max(best, 1)
        if length := self._to_probe(record, rows):
            record.sat = 0
            record.probing = True
            record.streak += 1
            self.probes += 1
            self._control.probes += 1
            return length
        record.sat += 1
        return 0

    def _to_probe(self, record: Record, rows: list[int]) -> int:
        """Guesses of a probe where one is due: as many as its stake allows."""
        if record.sat < record.wait and record.seen[0]:  # of a new bucket nothing is known but the prior
            return 0
        longest = min(_PROBE, len(rows) - 1)
        return next((n for n in range(longest, 0, -1) if self._steps(n, rows[n]) - 1 <= self.stake), 0)

    def _best(self, record: Record, rows: list[int]) -> int:
        """The length of the highest predicted speed."""
        best, gain, tried = 0, self._floor, 0.0
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
        self._last = (best, gain if best else tried, record.rate(0))
        return best

    def _steps(self, depth: int, rows: int) -> float:
        """Plain steps that drafting so deep and verifying so many rows take.

        In a batch the others are taken to draft as this one does: a pass is over W times the rows, and W drafts are
        waited for.
        """
        costs, width = self._costs, self._width
        return (costs.d(1 if self._at_once else depth) * width + costs.v(width * rows)) / costs.v(width)

    def price(self, proposal: Proposal) -> float:
        """Plain steps that a round over this proposal is expected to take, whatever is accepted."""
        depth = proposal.deepest if proposal.resume is None else max(proposal.deepest, 1)
        return self._steps(depth, len(proposal) + 1) if depth else 1.0

    @property
    def steady(self) -> bool:
        """Whether this request is decided by counts and the given costs alone, never by the clock."""
        return self._steady

    def _expect(self, proposal: Proposal) -> tuple[float, float]:
        """Tokens, and time in plain steps, of a round over ``proposal``."""
        costs, record = self._costs, self._record(proposal.bucket)
        depth = proposal.deepest
        tokens = chance = 1.0
        for position in range(depth):
            chance *= record.rate(position)
            tokens += chance
        control, steps = self._control, 1 if self._at_once else depth
        control.steps, control.step_cost, control.plain_ms = steps, self.cost.d(steps) / steps, self.cost.plain_ms
        return tokens, costs.d(steps) + costs.v(len(proposal) + 1)

    def _record(self, bucket: int) -> Record:
        if bucket not in self._records:
            if len(self._records) == MOST_BUCKETS:
                del self._records[next(iter(self._records))]
            self._records[bucket] = Record([self.prior])
        return self._records[bucket]

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """Learn what was accepted; pass the round on.

        An exit that was asked and not sure counts like a guess that was wrong: it took the time of one.
        """
        if len(proposal) or proposal.resume is not None:
            record = self._record(proposal.bucket)
            right, tested = len(verdict.path), proposal.tested(verdict.path)
            if proposal.resume is not None and right == len(proposal) < self._asked:
                tested += 1
            for position in range(tested):
                record.learn(position, position < right)
            if proposal.parents is not None:
                self._nodes_per_depth = len(proposal) / proposal.deepest
            if record.probing:
                record.probing = False
                if tested == right and record.streak < _STREAK:
                    record.sat = record.wait
                else:
                    record.wait, record.streak = min(2 * record.wait, LONGEST_WAIT), 0
        self.inner.observe(proposal, verdict, output)

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Learn what the round cost, whoever had rows in its pass."""
        if not self._steady:
            steps = 1 if self._at_once else proposal.deepest
            if proposal.resume is None:
                self.cost.observe_verify(time.rows, time.verify_ms)
                if len(proposal) and self.inner.caught_up:
                    self.cost.observe_draft(steps, time.draft_ms)
            else:  # part of the pass over the first row ran while drafting, too
                self.cost.observe_round(time.rows, max(steps, 1), time.draft_ms + time.verify_ms)
        super().timed(proposal, time)

    @property
    def reason(self) -> str:
        """Why it drafts, or does not, in words, and what the inner drafter adds."""
        return "; ".join(filter(None, (self._decision, self.inner.reason)))

    @property
    def _decision(self) -> str:
        best, gain, acceptance = self._last
        if not self.plain + self.drafted:
            return "nothing was decoded yet"
        if best:
            guesses = f"{best} guess{'es' if best > 1 else ''}"
            return f"drafting is on: predicted {gain:.2f}x with {guesses} at acceptance {acceptance:.2f}"
        if gain == 0:
            return "the drafter found nothing to propose"
        if not self.fallback:
            return f"drafting does not pay, but was kept on: predicted {gain:.2f}x at acceptance {acceptance:.2f}"
        return (
            f"drafting did not pay: predicted {gain:.2f}x at acceptance {acceptance:.2f}; "
            f"{self.probes} probes in {self.plain + self.drafted} rounds"
        )


def _rows(proposal: Proposal, budget: int) -> list[int]:
    """[budget + 1]: rows of a pass over the guesses down to each depth."""
    if proposal.parents is None:
        return [1 + min(depth, len(proposal)) for depth in range(budget + 1)]
    depths = [proposal.depth(i) for i in range(len(proposal))]
    return [1 + sum(d <= depth for d in depths) for depth in range(budget + 1)]
