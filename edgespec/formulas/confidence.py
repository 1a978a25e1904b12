"""Estimate how often a draft token of a given probability is accepted, and whether one more token is worth it.

The next draft token is accepted if all tokens before it are, and it is itself: the probabilities multiply.  It is worth
its time if this product exceeds the tokens that decoding would generate in the same time.  (arXiv 2409.00142 and
2405.19715 stop drafts by predicted acceptance; here the prediction is counted, and the bound is measured time.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # upper bounds of the ranges of draft probability
_PRIOR = (0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)  # high planes of small models, greedy
_LIKE = 8  # guesses of a range that its prior counts as
_DECAY = 0.99


class Confidence:
    """Acceptance by the draft's probability of a token.

    Args:
        rates: of tokens below the first of ``BOUNDS``, up to the second, and so on; empty = assumed.
        mean: of all tokens; None = not known.
    """

    def __init__(self, rates: Sequence[float] = (), mean: float | None = None) -> None:
        self.rates, self.seen = list(rates or _PRIOR), [0] * (len(BOUNDS) + 1)
        self.mean, self.tested = 0.8 if mean is None else mean, 0

    def chance(self, probability: float) -> float:
        """Return the acceptance of a token with that draft probability."""
        return self.rates[bisect_right(BOUNDS, probability)]

    def learn(self, probability: float, accepted: bool) -> None:
        """Count a token that was verified."""
        at = bisect_right(BOUNDS, probability)
        self.rates[at] += max(1 - _DECAY, 1 / (self.seen[at] + _LIKE + 1)) * (accepted - self.rates[at])
        self.mean += max(1 - _DECAY, 1 / (self.tested + _LIKE + 1)) * (accepted - self.mean)
        self.seen[at] += 1
        self.tested += 1


def counted(probabilities: Sequence[float], right: Sequence[bool]) -> list[float]:
    """Count tested draft tokens by their draft's probability -> ``rates``, which include the assumed prior."""
    sums, seen = [_LIKE * rate for rate in _PRIOR], [_LIKE] * len(_PRIOR)
    for probability, good in zip(probabilities, right, strict=True):
        at = bisect_right(BOUNDS, probability)
        sums[at] += good
        seen[at] += 1
    return [total / count for total, count in zip(sums, seen, strict=True)]
