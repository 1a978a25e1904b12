"""Decide whether two different texts are the same except for rounding.

Rounding may differ between a row of a larger pass and a pass over a single row.  Then the most probable token changes
only if two tokens were about equally probable: a near-tie.  `edgespec verify` measures in standard deviations of a row
of logits, `edgespec judge` in nats of log-probabilities; the rule is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

Verdict = Literal["identical", "near-ties", "wrong"]
NEAR_TIE_FACTOR = 4.0  # noise is measured on a few rows; others may differ more


def first_difference(expected: Sequence[Any], got: Sequence[Any]) -> int | None:
    """Find the first place where two texts differ; None = they are equal.  One may be the beginning of the other."""
    for at, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def near_tie_limit(measured: float, floor: float, most: float = math.inf) -> float:
    """Return the largest margin of a near-tie, from the largest difference of rows that was measured."""
    return min(max(NEAR_TIE_FACTOR * measured, floor), most)


def is_near_tie(gaps: Iterable[float], limit: float) -> bool:
    """Whether no gap is further than the limit; the first may be on either side."""
    found = list(gaps)
    return bool(found) and abs(found[0]) <= limit and max(found) <= limit


def verdict_of(near_ties: Iterable[bool | None]) -> Verdict:
    """Sum up differences, each a near-tie, not one (False), or unknown (None: never counted as wrong)."""
    found = list(near_ties)
    if any(one is False for one in found):
        return "wrong"
    return "near-ties" if found else "identical"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of several verdicts; of none: identical."""
    order: tuple[Verdict, ...] = ("identical", "near-ties", "wrong")
    return max(verdicts, key=order.index, default="identical")
