"""Estimate how often draft tokens are accepted and how many are fastest: pure functions, no clock, no state.

Position j of a proposal has the rate a_j = P(token j is accepted | all before it were).  A round over K tokens gives
1 + sum_{i <= K} prod_{j <= i} a_j tokens in the time ``costs[K]``, in plain steps; plain decoding is K = 0, at speed 1.

Each rate is a posterior mean.  It combines counts of verified tokens, with less weight for older ones, and a prior that
counts as ``weight`` of them.  The prior of a position moves as far as the evidence moved the position before.  So a
position that is seldom verified follows the earlier ones, and forgets a few early results.  The levels are chained: a
method's published acceptance, export's measurement, the engine's record, this request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

Rates = Sequence[float]  # of positions 1 and on; the last one holds for those after it

LEAST, MOST = 0.01, 0.99  # bounds of a prior rate: evidence can always move it


@dataclass(frozen=True, slots=True)
class Evidence:
    """Discounted counts by position: verified tokens, and the accepted ones among them."""

    tested: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()


NOTHING = Evidence()


def learn(evidence: Evidence, right: int, tested: int, keep: float) -> Evidence:
    """Add a round: its first ``tested`` tokens were verified, and the first ``right`` of them accepted.

    All older counts are multiplied by ``keep``, including those of positions that this round did not reach.
    """
    more = max(tested - len(evidence.tested), 0)
    old_tested = evidence.tested + (0.0,) * more if more else evidence.tested
    old_accepted = evidence.accepted + (0.0,) * more if more else evidence.accepted
    return Evidence(
        tuple([keep * count + (at < tested) for at, count in enumerate(old_tested)]),
        tuple([keep * count + (at < right) for at, count in enumerate(old_accepted)]),
    )


def measured(rates: Rates, positions: int) -> Evidence:
    """Return the counts that ``rates`` come from, if measured on chains after ``positions`` positions."""
    tested, left = [], float(positions)
    for rate in rates:
        tested.append(left)
        left *= rate
    return Evidence(tuple(tested), tuple(count * rate for count, rate in zip(tested, rates, strict=True)))


def posterior(prior: Rates, weight: float, evidence: Evidence, length: int) -> list[float]:
    """Estimate the rates of the first ``length`` positions."""
    found, moved, last = [], 0.0, len(prior) - 1
    known = len(evidence.tested)
    for at in range(length):
        before = prior[at if at < last else last]
        rate = min(max(before + moved, LEAST), MOST)
        if at < known:
            rate = (evidence.accepted[at] + weight * rate) / (evidence.tested[at] + weight)
        moved = rate - before
        found.append(rate)
    return found


def hopeful(rates: Rates, weight: float, evidence: Evidence, share: float) -> list[float]:
    """Raise each rate by ``share`` standard deviations: an uncertain rate may be better than its estimate."""
    known, found = len(evidence.tested), []
    for at, rate in enumerate(rates):
        seen = weight + (evidence.tested[at] if at < known else 0.0)
        found.append(min(rate + share * sqrt(rate * (1 - rate) / seen), MOST))
    return found


def tokens(rates: Rates, length: int) -> float:
    """Predict the tokens of a round over a chain of ``length`` guesses."""
    total = chance = 1.0
    for at in range(length):
        chance *= rates[min(at, len(rates) - 1)]
        total += chance
    return total


def best_length(
    rates: Rates, costs: Sequence[float], required: float = 1.0, round_loss_limit: float = inf
) -> tuple[int, float, float]:
    """Find the length of the highest predicted speed.

    Args:
        rates: of the positions.
        costs: plain steps that a round over each number of guesses takes; ``costs[0]`` is plain decoding's, 1.
        required: speed that a length must exceed.
        round_loss_limit: plain steps that a round may lose if all its guesses are wrong.

    Returns:
        (length, its speed, the highest speed of any length >= 1); length 0 where no length exceeds ``required``, and
        its speed is ``required``.
    """
    best, gain, highest, last = 0, required, 0.0, len(rates) - 1
    total = chance = 1.0
    for length in range(1, len(costs)):
        chance *= rates[length - 1 if length <= last else last]
        total += chance
        speed = total / costs[length]
        if speed > highest:
            highest = speed
        if speed > gain and costs[length] - 1 <= round_loss_limit:
            best, gain = length, speed
    return best, gain, highest


@dataclass(frozen=True, slots=True)
class Pace:
    """Discounted sums over rounds of a drafter that decides when to stop: tokens, and time in plain steps."""

    tokens: float = 0.0
    steps: float = 0.0

    @property
    def speed(self) -> float:
        """Return tokens per plain step; 1 where nothing was summed."""
        return self.tokens / self.steps if self.steps else 1.0


def pace_after(pace: Pace, tokens: float, steps: float, keep: float) -> Pace:
    """Add a round that gave ``tokens`` in ``steps``; older rounds count ``keep`` times as much as before."""
    return Pace(keep * pace.tokens + tokens, keep * pace.steps + steps)


def pace_with(prior: Pace, weight: float, pace: Pace) -> Pace:
    """Add a prior that counts as ``weight`` plain steps."""
    return Pace(pace.tokens + weight * prior.speed, pace.steps + weight)


def scaled(evidence: Evidence, factor: float) -> Evidence:
    """Multiply the weight of all evidence."""
    return Evidence(
        tuple(factor * count for count in evidence.tested), tuple(factor * count for count in evidence.accepted)
    )
