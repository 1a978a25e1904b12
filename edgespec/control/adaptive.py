"""Draft as many tokens as is fastest, and none where plain decoding is faster.

Each round verifies the K draft tokens that maximize

    (1 + sum_{i <= K} prod_{j <= i} a_j) / (d(K) + v(rows(K)))          K = 0 is plain decoding: 1

with a_j = P(token j is accepted | all tokens before it were).  ``control.estimator`` estimates a_j for each bucket of
the drafter.  Results of a request count for it immediately, and become the prior of the engine's later requests.

Some drafters decide themselves when to stop, because they know more about a token than its position.  Such a drafter
receives the maximum length and the gain that one more token must bring: the tokens that similar rounds give in the
time of that token and its row.  A round is best if every token gains that much (Dinkelbach's method).  The speed of
those rounds decides whether the drafter is used.

Draft tokens of a cheap drafter that are not worth a row are compared with the generated text afterwards: they are
evidence that costs no pass.

``Control`` decides this for one drafter.  ``Adaptive`` is the policy over one control or several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from edgespec.control import estimator
from edgespec.control.estimator import NOTHING, Evidence, Pace, Rates
from edgespec.control.learned import Learned
from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.policy import Ask, Outcome, Policy
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.stats import Expected, RoundTime, Stats
from edgespec.formulas.cost import CostModel

PRIOR = 0.5  # acceptance where nothing is known
WAIT, LONGEST_WAIT = 16, 128  # plain rounds before a probe; doubled while probes fail
REST = 8  # rounds that skip a costly drafter that is not worth asking: asking takes time as well
MOST_BUCKETS = 64  # maximum number of buckets with recorded acceptance: some drafters number theirs without end
KEEP, KEEP_ENGINE = 0.97, 0.998  # what a round leaves of the weight of older ones, within a request and beyond
WEIGHT, WEIGHT_ENGINE = 16.0, 16.0  # guesses that the engine's rates count as in a request, and the given ones there
ASSUMED = 3.0  # weight, in draft tokens, of assumed rates that were never measured
HOPE, CLOSE = 0.75, 0.85  # standard deviations added to the rates if drafting is estimated this close to plain decoding
_PACE = 48.0  # plain steps that the prior of a pace counts as
_PROBE = 2  # guesses of a probe
_STREAK = 6  # probes in a row, while all their guesses are accepted: one may not be enough to see that drafting helps
_PLAIN_PACE, _LOOKS = Pace(1.0, 1.0), 16.0  # the same of what looks of a cheap drafter are worth
_PENDING = 8  # proposals of a cheap drafter that wait for the text to judge them


@dataclass
class Bucket:
    """Results of one request for one bucket of a drafter."""

    base: Rates  # rates that the request began with
    known: bool  # whether these were measured
    weight: float  # guesses that they count as
    evidence: Evidence = NOTHING
    rates: list[float] | None = None  # from both; None = estimate again
    pace: Pace = field(default_factory=Pace)  # for a drafter that decides when to stop
    wait: int = WAIT  # plain rounds before the next probe
    waited: int = 0  # plain rounds since the last one
    probing: bool = False  # a probe is being verified
    streak: int = 0  # probes in a row
    drafting: bool | None = None  # whether it was drafted when last decided on


@dataclass(slots=True)
class _Unverified:
    """Draft tokens to compare with the text as it grows."""

    at: int  # tokens before them
    guesses: list[int]
    bucket: int
    length: int = 0  # as many as would have been verified
    steps: float = 1.0  # and what that round would have taken
    right: int = 0


@dataclass(slots=True)  # made in every round
class Decision:
    """How many draft tokens of a round are worth verifying."""

    length: int = 0  # guesses; 0 = plain decoding
    bucket: int = 0
    best: int = 0  # the length of the highest predicted speed; 0 = plain decoding's is
    speed: float = 0.0  # predicted at it; 0 = nothing was predicted
    acceptance: float = PRIOR  # of the first guess
    probing: bool = False  # it is drafted only to look again
    promising: bool = False  # whether guesses would be worth their time if all were accepted


_RESTING = Decision()  # it is not even looked


class Control:
    """Decides how many tokens of one drafter are worth verifying.

    A cheap drafter proposes first, and its proposal is cut according to its bucket.  A costly one receives its budget
    in advance, which may be 0.  Some seeded requests depend on the number of draft tokens, which decides the random
    numbers used (rejection sampling).  They start from the given values, and leave no trace in later requests.

    ``learned`` is the engine's record, or the costs d and v if it has none yet.  ``gamma_max`` limits the draft tokens
    of a round for every budget.  With ``fallback`` False, each round drafts at least one token.  ``prior`` is the
    acceptance to start from: one for all positions, or one for each.
    """

    def __init__(
        self,
        drafter: Drafter,
        learned: Learned | CostModel,
        gamma_max: int = 8,
        fallback: bool = True,
        prior: float | Rates = PRIOR,
    ) -> None:
        self.drafter = drafter
        self.learned = Learned(learned) if isinstance(learned, CostModel) else learned
        self.cost = self.learned.priced  # as this machine's clock taught it
        self.gamma_max = gamma_max
        self.fallback = fallback
        self.prior: Rates = (prior,) if isinstance(prior, (int, float)) else tuple(prior)
        self._given = self.prior != (PRIOR,)  # whether the prior is more than an assumption
        self._at_once, self._cheap, self._ahead = drafter.steps_at_once, drafter.cheap, drafter.runs_ahead
        self.begin(Stats(), False)

    def begin(self, stats: Stats, reproducible: bool) -> None:
        """Start from the engine's record, or from the given values if the request's text must be ``reproducible``.

        A reproducible request uses counts and the given costs, never the clock.
        """
        self.reproducible = reproducible
        self.eager = False  # whether to begin with a probe where it does not draft
        self.plain = self.drafted = self.probes = 0  # rounds without a guess, with guesses, and those that were probes
        self._stats = stats
        self._known = Learned(self.cost.given()) if reproducible else self.learned  # what this request adds to
        self._costs = self._known.priced
        self._buckets: dict[int, Bucket] = {}
        self._prices_of: tuple[object, list[float]] = None, []  # what prices were last asked for, and they
        self._rest = 0  # rounds that are plain without looking
        self._width, self._required, self._limit = 1, 1.0, inf  # of the current round
        self._decision: Decision | None = None  # the same
        self._last = Decision(acceptance=self.prior[0])  # the last one
        self._unverified: list[_Unverified] = []
        self._looks = Pace()  # what rounds of a cheap drafter were expected to give

    # -- asked ---------------------------------------------------------------------------------------------------------

    def choose(self, budget: int, width: int = 1, required: float = 1.0, limit: float = inf) -> Ask | None:
        """Choose the budget of the drafter's next proposal; None = it is not worth asking.

        ``width``: requests whose rows share a pass; ``required``: speed that a proposal must be predicted to exceed, in
        tokens per plain step; ``limit``: plain steps that a round may lose if all its tokens are rejected.
        """
        self._width, self._required, self._limit = width, required, limit
        if self._rest:
            self._decision = _RESTING
            return None
        budget = min(budget, self.gamma_max)
        if self._cheap:
            return Ask(self.drafter, budget, reviewed=True)
        bucket, rows = self._expected(budget)
        self._decision = found = self._decide(bucket, rows)
        if not found.length:
            return None
        gain = self._least_gain(rows, found) if self.drafter.stops else None
        return Ask(self.drafter, budget if self.drafter.chooses else found.length, gain)

    def cut(self, proposal: Proposal, tokens: list[int], budget: int) -> Proposal:
        """Cut a cheap drafter's proposal, made with a ``budget``, to the tokens that are worth verifying."""
        if self._unverified:
            self._judge(tokens)
        if len(proposal):
            whole = proposal
            self._decision = self._decide(proposal.bucket, _rows(proposal, budget))
            proposal = proposal.truncated(self._decision.length)
            if not len(proposal):
                self._put_aside(whole, len(tokens))
        if not len(proposal):
            self._count_look(1.0, 1.0)
        return proposal

    def look(self, proposal: Proposal, tokens: list[int], budget: int) -> None:
        """Learn the value of a cheap drafter's proposals, without a pass."""
        self._judge(tokens)
        best, steps = 0, 1.0
        if len(proposal):
            costs = self._prices(_rows(proposal, budget))
            best = self._best(self._bucket(proposal.bucket), costs)[0]
            steps = costs[best]
            self._put_aside(proposal, len(tokens), best, steps)
        if not best:
            self._count_look(1.0, 1.0)

    # -- estimated -----------------------------------------------------------------------------------------------------

    def promised(self, budget: int) -> float:
        """Predict the speed of a costly drafter's next proposal, at least 1; a cheap one's is unknown."""
        if self._cheap:
            return 1.0
        bucket, rows = self._expected(min(budget, self.gamma_max))
        best, speed, _ = self._best(self._bucket(bucket), self._prices(rows))
        return max(speed, 1.0) if best else 1.0

    def speed(self, budget: int) -> float:
        """Estimate tokens per plain step of its next rounds at the best length, which may be below plain decoding's 1.

        For a cheap drafter, this includes the rounds without draft tokens.
        """
        if self._cheap:
            before = estimator.pace_with(_PLAIN_PACE, _LOOKS, self._known.pace)
            return estimator.pace_with(before, _LOOKS, self._looks).speed
        bucket, rows = self._expected(min(budget, self.gamma_max))
        record, costs = self._bucket(bucket), self._prices(rows)
        if self.drafter.stops:
            return self._pace(record, costs).speed
        return estimator.best_length(self._rates(record), costs)[2]

    def price(self, proposal: Proposal | None) -> float:
        """Predict the time of a round with its proposal, in plain steps; None = it made no proposal."""
        if proposal is None:
            return 1.0
        depth = max(proposal.deepest, 1) if self._ahead else proposal.deepest
        return self._steps(depth, len(proposal) + 1) if depth else 1.0

    def measured(self, time: RoundTime, draft_ms: float) -> float:
        """Return the time of a round with guesses, in plain steps.

        Drafting is compared with the pass of the same round, not with a plain step of some time ago: other work on the
        machine slows both down.
        """
        if self._ahead or not time.verify_ms:  # part of the pass ran while drafting
            return (draft_ms + time.verify_ms) / (self.cost.plain_ms or time.verify_ms or 1.0)
        return self.cost.v(time.rows) * (1 + draft_ms / time.verify_ms)

    @property
    def affordable(self) -> bool:
        """Whether a round over one rejected token would have been within the limit of the last round."""
        return self._steps(1, 2) - 1 <= self._limit

    def expected(self, proposal: Proposal) -> Expected:
        """Predict the result of a round over ``proposal``."""
        costs, depth = self._costs, proposal.deepest
        steps = 1 if self._at_once else depth
        tokens, work = estimator.tokens(self._rates(self._bucket(proposal.bucket)), depth), self.cost.d(steps)
        draft = work if costs is self.cost else costs.d(steps)
        return Expected(tokens, draft + costs.v(len(proposal) + 1), self.cost.plain_ms, work)

    def _count_look(self, tokens: float, steps: float) -> None:
        """Add the real or hypothetical result of a cheap drafter's round."""
        self._looks = estimator.pace_after(self._looks, tokens, steps, KEEP)
        self._known.pace = estimator.pace_after(self._known.pace, tokens, steps, KEEP_ENGINE)

    def _expected(self, budget: int) -> tuple[int, list[int]]:
        """Return the bucket of a costly drafter's next proposal, and rows of a pass to each depth, [budget + 1]."""
        bucket, rows = self.drafter.forecast(budget)
        if rows is None:
            rows = [round(1 + self._known.nodes_per_depth * depth) for depth in range(budget + 1)]
        return self._known.bucket if bucket is None else bucket, rows

    def _decide(self, bucket: int, rows: list[int]) -> Decision:
        """Decide how deep to draft; ``rows[k]`` = rows of a pass over the draft tokens down to depth k."""
        record, costs = self._bucket(bucket), self._prices(rows)
        best, speed, acceptance = self._best(record, costs)
        if best or not self.fallback:
            return Decision(max(best, 1), bucket, best, speed, acceptance)
        length = self._to_probe(record, costs, rows)
        return Decision(length, bucket, best, speed, acceptance, length > 0, length > 0 and self._could_gain(costs))

    def _to_probe(self, record: Bucket, costs: list[float], rows: list[int]) -> int:
        """Return the length of a probe if one is due: as many tokens as the round may lose."""
        if record.waited < record.wait and (record.known or record.evidence is not NOTHING):
            return 0
        if not self._could_win(record, rows[: len(costs)]):
            return 0
        longest = min(_PROBE, len(costs) - 1)
        return next((n for n in range(longest, 0, -1) if costs[n] - 1 <= self._limit), 0)

    def _could_win(self, record: Bucket, rows: list[int]) -> bool:
        """Return whether guesses would gain if a pass cost the least that it can: a probe can show no less.

        The acceptance of a cheap drafter is known without a probe, from the text; of another it may be 1.
        """
        if self._costs.reads is None:
            return True
        least = [1.0, *(self._costs.least(n) for n in rows[1:])]
        rates = self._rates(record)
        if self._cheap:
            rates = estimator.hopeful(rates, record.weight, record.evidence, HOPE)
        else:
            rates = [1.0]
        return estimator.best_length(rates, least, self._required)[0] > 0

    def _could_gain(self, costs: list[float]) -> bool:
        """Return whether drafting would be faster if all tokens were accepted; otherwise probes are pointless."""
        return any((n + 1) / costs[n] > self._required for n in range(1, len(costs)))

    def _best(self, record: Bucket, costs: list[float]) -> tuple[int, float, float]:
        """Find the length of the highest predicted speed -> it, the speed, acceptance of the first token."""
        rates, required, limit = self._rates(record), self._required, self._limit
        if not self.drafter.stops or len(costs) == 1:
            best, speed, highest = estimator.best_length(rates, costs, required, limit)
            if not best and highest > CLOSE * required:  # near plain decoding: what is not known well is tried
                rates = estimator.hopeful(rates, record.weight, record.evidence, HOPE)
                best, speed, _ = estimator.best_length(rates, costs, required, limit)
            return best, speed if best else highest, rates[0]
        # the time to risk, and the measured speed of rounds, for a drafter that decides when to stop
        speed = self._pace(record, costs).speed
        most = next((n for n in range(len(costs) - 1, 0, -1) if costs[n] - 1 <= limit), 0)
        return most if speed > required else 0, speed, rates[0]

    def _rates(self, record: Bucket) -> list[float]:
        """Estimate acceptance by position, once for every round that adds evidence."""
        if record.rates is None:
            record.rates = estimator.posterior(record.base, record.weight, record.evidence, max(self.gamma_max, 1))
        return record.rates

    def _pace(self, record: Bucket, costs: list[float]) -> Pace:
        """Predict tokens and steps from this request's rounds, the engine's, and those of the best fixed length."""
        _, _, highest = estimator.best_length(record.base, costs)
        before = estimator.pace_with(Pace(highest, 1.0), _PACE, self._known.pace)
        return estimator.pace_with(before, _PACE, record.pace)

    def _least_gain(self, rows: list[int], found: Decision) -> Callable[[int], float]:
        """Return the minimum gain of one more token by depth: tokens of rounds, or plain decoding, in the same time."""
        worth = max(found.speed, self._required)
        return lambda depth: worth * (self._steps(depth + 1, rows[depth + 1]) - self._steps(depth, rows[depth]))

    def _prices(self, rows: list[int]) -> list[float]:
        """Return the cost of each depth in plain steps, up to the depth of the proposal's end."""
        key = self._costs.version, self._width, tuple(rows)
        if self._prices_of[0] != key:
            costs = [1.0]
            for depth in range(1, len(rows)):
                if rows[depth] == rows[depth - 1]:
                    break
                costs.append(self._steps(depth, rows[depth]))
            self._prices_of = key, costs
        return self._prices_of[1]

    def _steps(self, depth: int, rows: int) -> float:
        """Count the plain steps that drafting ``depth`` deep and verifying ``rows`` rows take.

        In a batch, the other requests are assumed to draft as this one does: a pass has W times the rows, and W
        drafts run before it.
        """
        costs, width = self._costs, self._width
        draft = costs.d(1 if self._at_once else depth)
        return draft + costs.v(rows) if width == 1 else (draft * width + costs.v(width * rows)) / costs.v(width)

    def _bucket(self, number: int) -> Bucket:
        """Return this request's record of a bucket; it starts as a copy of the engine's."""
        if number not in self._buckets:
            if len(self._buckets) == MOST_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            seen = self._known.evidence.get(number, NOTHING)
            prior = self.drafter.rates.get(number, self.prior)
            length = max(len(prior), len(seen.tested), 1)
            base = estimator.posterior(prior, WEIGHT_ENGINE if self._given else ASSUMED, seen, length)
            known = self._given or seen is not NOTHING
            self._buckets[number] = Bucket(base, known, WEIGHT if known else ASSUMED, waited=WAIT if self.eager else 0)
        return self._buckets[number]

    # -- learning ------------------------------------------------------------------------------------------------------

    def told(
        self, proposal: Proposal | None, right: int, tested: int, time: RoundTime, came: bool, timed: bool = True
    ) -> None:
        """Learn from a round.

        Args:
            proposal: the drafter's, as it was verified; None if it made none, or another drafter's was used.
            right: its tokens that were accepted.
            tested: its depths that were verified.
            time: of the round; of drafting, this drafter's share of it.
            came: whether its turn came, so that the choice counts.
            timed: whether the times apply to this drafter.
        """
        decision, self._decision = self._decision, None
        if came:
            self._count(decision, proposal)
        if proposal is not None:
            self._count_guesses(decision, proposal, right, tested)
        if timed and not self.reproducible and not self._rest:
            self._count_time(proposal, time)

    def _count(self, decision: Decision | None, proposal: Proposal | None) -> None:
        """Count the decision; None = a cheap drafter had no draft token."""
        if proposal is not None and len(proposal):
            self.drafted += 1
            self._known.bucket = proposal.bucket
        else:
            self.plain += 1
        if decision is _RESTING:
            self._rest -= 1
            return
        if decision is None:
            return
        record, stats, best = self._bucket(decision.bucket), self._stats, decision.best
        self._last = decision
        if self.fallback and record.drafting is not None and record.drafting != bool(best):
            if best:
                stats.recoveries += 1
            else:
                stats.fallbacks += 1
        if best or record.drafting:
            record.drafting = bool(best)
        if best or not self.fallback:
            record.wait, record.waited, record.streak = WAIT, 0, 0
        elif decision.probing:
            record.waited = 0
            record.streak += 1 if decision.promising else _STREAK
            self.probes += 1
            stats.probes += 1
        else:
            self._rest = 0 if self._cheap else max(min(REST, record.wait - record.waited) - 1, 0)
            record.waited += 1 + self._rest

    def _count_guesses(self, decision: Decision | None, proposal: Proposal, right: int, tested: int) -> None:
        """Add the result of a round.

        A drafter that runs ahead took the time of one draft token even in a step without one: it counts as rejected.
        """
        record, known = self._bucket(proposal.bucket), self._known
        if self._ahead and decision is not None and right == len(proposal) < decision.length:
            tested += 1
        self._learn(proposal.bucket, right, tested)
        if proposal.parents is not None:
            known.nodes_per_depth = len(proposal) / proposal.deepest
        if self._cheap:
            self._count_look(right + 1, self.price(proposal))
        if self.drafter.stops:
            price = self.price(proposal)
            record.pace = estimator.pace_after(record.pace, right + 1, price, KEEP)
            known.pace = estimator.pace_after(known.pace, right + 1, price, KEEP_ENGINE)
        if decision is not None and decision.probing:
            if tested == right and record.streak < _STREAK:
                record.waited = record.wait
            else:
                record.wait, record.streak = min(2 * record.wait, LONGEST_WAIT), 0

    def _count_time(self, proposal: Proposal | None, time: RoundTime) -> None:
        """Add the times of the pass and of drafting."""
        self.cost.observe_reads(time.rows, time.read, time.waited_ms)
        if proposal is None:
            self.cost.observe_verify(time.rows, time.computed_ms)
            return
        steps = 1 if self._at_once else proposal.deepest
        if self._ahead:  # part of the pass over the first row also ran while drafting
            self.cost.observe_round(time.rows, max(steps, 1), time.draft_ms + time.computed_ms)
            return
        self.cost.observe_verify(time.rows, time.computed_ms)
        if self.drafter.caught_up:
            self.cost.observe_draft(steps, time.draft_ms)

    def _learn(self, bucket: int, right: int, tested: int) -> None:
        """Add verified tokens to the request's evidence and to the engine's."""
        record, known = self._bucket(bucket), self._known.evidence
        record.evidence, record.rates = estimator.learn(record.evidence, right, tested, KEEP), None
        known[bucket] = estimator.learn(known.get(bucket, NOTHING), right, tested, KEEP_ENGINE)
        if len(known) > MOST_BUCKETS:
            del known[next(iter(known))]

    def _put_aside(self, proposal: Proposal, at: int, length: int = 0, steps: float = 1.0) -> None:
        """Store tokens that no pass verifies, to compare them with the text; for a tree the text is weaker evidence."""
        if proposal.parents is None and proposal.probs is None:
            self._unverified.append(_Unverified(at, proposal.tokens.tolist(), proposal.bucket, length, steps))
            del self._unverified[:-_PENDING]

    def _judge(self, tokens: list[int]) -> None:
        """Compare unverified tokens with the text that followed."""
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

    # -- said ----------------------------------------------------------------------------------------------------------

    @property
    def reason(self) -> str:
        """Explain in one line why it drafts, or does not."""
        best, gain, acceptance = self._last.best, self._last.speed, self._last.acceptance
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
        """Return the counts, and the drafter's remark; a sentence each."""
        counted = f"{self.drafter.name}: {self.drafted} rounds with guesses, {self.plain} without, {self.probes} probes"
        return [counted, *filter(None, [self.drafter.reason])]


class Adaptive(Policy):
    """Asks drafters in order, each as far as its control predicts a gain.

    A cheap drafter must promise more than the costly ones after it, so that a vague draft from the text does not
    replace a good one.  For drafters that did not win, the round counts as one without draft tokens.  A drafter that
    always runs layers (early exits) belongs at the end.
    """

    def __init__(self, controls: Sequence[Control], name: str | None = None) -> None:
        self.all = self.controls = list(controls)  # those of drafters that failed are no longer in ``controls``
        self._chosen = False  # whether this round's turns were given
        self._limit = inf  # plain steps that a round may lose
        super().__init__([control.drafter for control in controls], name)

    def begin(self, request: DraftRequest, stats: Stats, first: Sequence[Drafter] = ()) -> None:
        """Begin a request with all drafters."""
        super().begin(request, stats, first)
        self.controls = self.all
        for control in self.controls:
            control.begin(stats, request.params.seeded_rejection)

    def choose(self, tokens: list[int], budget: int) -> Sequence[Ask]:
        """Ask the drafters that are predicted to gain."""
        self._chosen = True
        asks, controls, required = [Ask(drafter, budget) for drafter in self._first], self.controls, 1.0
        for at, control in enumerate(controls, 1):
            if len(controls) > 1:
                required = max((other.promised(budget) for other in controls[at:]), default=1.0)
            if (ask := control.choose(budget, self.width, required, self._limit)) is not None:
                asks.append(ask)
        return asks

    def review(self, ask: Ask, proposal: Proposal, tokens: list[int], ms: float) -> Proposal:
        """Cut the proposal of a cheap drafter."""
        control = self._control_of(ask.drafter)
        return proposal if control is None else control.cut(proposal, tokens, ask.most)

    def expected(self, winner: Ask, proposal: Proposal) -> Expected | None:
        """Return the prediction of the winner's control."""
        control = self._control_of(winner.drafter)
        return None if control is None else control.expected(proposal)

    def told(self, outcome: Outcome) -> None:
        """Pass each control its part of the round's results."""
        super().told(outcome)
        proposal, winner = outcome.proposal, outcome.winner
        own = None if winner is None else winner.drafter
        came, self._chosen = self._chosen and own not in self._first, False
        path, time = outcome.verdict.path, outcome.time
        for control in self.controls:
            drafter = control.drafter
            if len(self.drafters) > 1:
                time = time._replace(draft_ms=outcome.ms(drafter))
            if drafter is own:
                control.told(proposal, len(path), proposal.tested(path), time, came)
                came = False
            else:
                # part of a pass that began while drafting says nothing to the others
                control.told(None, 0, 0, time, came, own is None or not own.runs_ahead)

    def lose(self, drafter: Drafter | None, why: str) -> bool:
        """Remove a drafter and its control."""
        self.controls = [control for control in self.controls if control.drafter is not drafter]
        return super().lose(drafter, why)

    def _control_of(self, drafter: Drafter) -> Control | None:
        for control in self.controls:
            if control.drafter is drafter:
                return control
        return None

    @property
    def reason(self) -> str:
        """Explain why it drafts, or does not; for several drafters, how often each drafted."""
        return self.all[0].reason if len(self.all) == 1 else self._wins()

    @property
    def details(self) -> list[str]:
        """Return the counts, and the drafters' remarks; a sentence each."""
        if len(self.all) == 1:
            return self.all[0].details
        said = []
        for control in self.all:
            lost = self.lost.get(control.drafter)
            words = [lost or control.reason, *([] if lost else control.details)]
            said += [f"{control.drafter.name}: {word}" for word in words if word]
        return said


def _rows(proposal: Proposal, budget: int) -> list[int]:
    """Count the rows of a pass over the draft tokens down to each depth -> [budget + 1]."""
    if proposal.parents is None:
        return [1 + min(depth, len(proposal)) for depth in range(budget + 1)]
    depths = [proposal.depth(i) for i in range(len(proposal))]
    return [1 + sum(d <= depth for d in depths) for depth in range(budget + 1)]
