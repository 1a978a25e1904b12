"""Tests of counts against a distribution, and how small an excess they find: chi-square, also noncentral.

Nothing here but arithmetic: `edgespec judge`, `edgespec verify` and the tests of sampling share it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

LEAST = 5.0  # draws that a cell must expect; smaller cells are put together
_ENOUGH = 1e-15
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Fit:
    """Distance of counts from their expectation.

    Attributes:
        statistic: Pearson's sum; infinite = an impossible value was sampled.
        degrees: of freedom; 0 = nothing could be compared.
        draws: number of samples.
    """

    statistic: float = 0.0
    degrees: int = 0
    draws: int = 0

    def __add__(self, other: Fit) -> Fit:
        """Combine independent tests."""
        return Fit(self.statistic + other.statistic, self.degrees + other.degrees, self.draws + other.draws)

    def p(self, tolerated: float = 0.0) -> float:
        """Return the probability of counts at least this far away.

        Args:
            tolerated: distance of the distributions that is allowed, as ``distance`` gives it.
        """
        if not self.degrees:
            return 1.0
        return chi_square_tail(self.statistic, self.degrees, self.draws * tolerated**2)


def pearson(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> Fit:
    """Compare counts with probabilities by Pearson's test; cells that expect fewer than five samples are merged.

    Args:
        counts: of the samples.
        expected: probability of each cell, in sum one.
    """
    total = sum(counts.values())
    if any(expected.get(cell, 0) <= 0 for cell, count in counts.items() if count):
        return Fit(math.inf, 1, total)
    cells: list[tuple[float, float]] = []
    rest, rest_seen = 0.0, 0
    for cell, chance in expected.items():
        if chance * total < LEAST:
            rest, rest_seen = rest + chance * total, rest_seen + counts.get(cell, 0)
        else:
            cells.append((chance * total, counts.get(cell, 0)))
    if rest >= LEAST:
        cells.append((rest, rest_seen))
    elif cells and rest > 0:  # too few for their own cell: merge them with the smallest cell
        least = min(range(len(cells)), key=lambda at: cells[at][0])
        cells[least] = (cells[least][0] + rest, cells[least][1] + rest_seen)
    if len(cells) < 2:
        return Fit(0.0, 0, total)
    return Fit(sum((seen - e) ** 2 / e for e, seen in cells), len(cells) - 1, total)


def two_samples(first: Mapping[Any, int], second: Mapping[Any, int]) -> Fit:
    """Compare the counts of two samples by Pearson's test of homogeneity; rare cells are merged.

    ``draws`` of the result is the size of one sample with the same power against a known distribution.
    """
    sizes = (sum(first.values()), sum(second.values()))
    total = sum(sizes)
    if not min(sizes):
        return Fit()
    cells: list[tuple[int, int]] = []
    rest = (0, 0)
    for cell in {**first, **second}:
        seen = (first.get(cell, 0), second.get(cell, 0))
        if sum(seen) * min(sizes) / total < LEAST:
            rest = (rest[0] + seen[0], rest[1] + seen[1])
        else:
            cells.append(seen)
    if sum(rest) * min(sizes) / total >= LEAST:
        cells.append(rest)
    elif cells and sum(rest):
        least = min(range(len(cells)), key=lambda at: sum(cells[at]))
        cells[least] = (cells[least][0] + rest[0], cells[least][1] + rest[1])
    if len(cells) < 2:
        return Fit()
    statistic = 0.0
    for cell_counts in cells:
        for seen_here, size in zip(cell_counts, sizes, strict=True):
            e = sum(cell_counts) * size / total
            statistic += (seen_here - e) ** 2 / e
    return Fit(statistic, len(cells) - 1, sizes[0] * sizes[1] // total)


def chi_square(counts: Counter[Any], expected: Mapping[Any, float]) -> float:
    """p-value of Pearson's test; 0 if something impossible was seen."""
    return pearson(counts, expected).p()


def chi_square_tail(x: float, degrees: float, noncentrality: float = 0.0) -> float:
    """Probability that a chi-square variable is at least ``x``; noncentral: a Poisson mixture of central ones."""
    if math.isinf(x):
        return 0.0
    if noncentrality <= 0:
        return _upper_gamma(degrees / 2, x / 2)
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 12
    total = 0.0
    for j in range(max(0, int(mean - spread)), int(mean + spread) + 1):
        weight = math.exp(-mean + j * math.log(mean) - math.lgamma(j + 1))
        total += weight * _upper_gamma(degrees / 2 + j, x / 2)
    return min(total, 1.0)


def chi_square_limit(degrees: float, chance: float, noncentrality: float = 0.0) -> float:
    """Return the value that a chi-square variable exceeds with the probability ``chance``."""
    low, high = 0.0, degrees + noncentrality + 10
    while chi_square_tail(high, degrees, noncentrality) > chance:
        high *= 2
    return _bisect(lambda x: chi_square_tail(x, degrees, noncentrality) > chance, low, high)


def smallest_distance(draws: int, degrees: int, alpha: float, power: float, tolerated: float = 0.0) -> float:
    """Return the smallest distance of two distributions that Pearson's test detects with probability ``power``.

    The distance is sqrt(sum of (q - p)^2 / p): 0.1 if half of the probability is sampled a tenth too often.  Infinite
    where nothing could be compared.
    """
    if not draws or not degrees:
        return math.inf
    limit = chi_square_limit(degrees, alpha, draws * tolerated**2)
    high = 1.0
    while chi_square_tail(limit, degrees, high) < power:
        high *= 2
    needed = _bisect(lambda x: chi_square_tail(limit, degrees, x) < power, 0.0, high)
    return math.sqrt(needed / draws)


def distance(p: Mapping[Any, float], q: Mapping[Any, float]) -> float:
    """Distance of q from p: sqrt(sum of (q - p)^2 / p) over the cells of p."""
    return math.sqrt(sum((q.get(cell, 0.0) - chance) ** 2 / chance for cell, chance in p.items() if chance > 0))


def normal_tail(z: float) -> float:
    """Two-sided p-value of a standard normal variable."""
    return math.erfc(abs(z) / math.sqrt(2))


def normal_limit(chance: float) -> float:
    """Return the value that the size of a standard normal variable exceeds with the probability ``chance``."""
    return -_NORMAL.inv_cdf(chance / 2)


def _bisect(below: Any, low: float, high: float) -> float:
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
        if high - low <= 1e-9 * high:
            break
    return (low + high) / 2


def _upper_gamma(a: float, x: float) -> float:
    """Regularized upper incomplete gamma function Q(a, x): a series below a + 1, Lentz's continued fraction above."""
    if x <= 0:
        return 1.0
    front = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * _ENOUGH:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - front * total)
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = step * d + b
        d = 1 / (d if abs(d) > tiny else tiny)
        c = b + step / c
        c = c if abs(c) > tiny else tiny
        fraction *= c * d
        if abs(c * d - 1) < _ENOUGH:
            break
    return min(1.0, front * fraction)
