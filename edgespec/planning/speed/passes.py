"""How long a pass takes, by rows and by depth: measured points, and the lines between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of passes.

    Between measured rows and depths it is linear, beyond the last of either it goes on with the last slope, and before
    the first with the first one.  More rows, or more depth, never cost less: a dip is noise.

    Attributes:
        table: by depth (tokens before the pass), by rows.
    """

    table: Mapping[int, Mapping[int, float]]

    def ms(self, rows: float, depth: float) -> float:
        """Of so many rows (a mean of passes need not be whole) after so many tokens."""
        return line(rising({at: line(rising(points), rows) for at, points in self.table.items()}), depth)

    @property
    def deepest(self) -> int:
        """The last depth that was measured."""
        return max(self.table)

    def split(self, rows: float) -> tuple[float, float]:
        """(milliseconds at no depth, milliseconds a token of depth), by least squares; >= 0 each.

        The first is the weights and the host, the second the keys and values that attention reads.
        """
        points = [(depth, line(rising(points), rows)) for depth, points in sorted(self.table.items())]
        if len(points) == 1:
            return points[0][1], 0.0
        middle = sum(depth for depth, _ in points) / len(points)
        mean = sum(ms for _, ms in points) / len(points)
        spread = sum((depth - middle) ** 2 for depth, _ in points)
        slope = max(0.0, sum((depth - middle) * (ms - mean) for depth, ms in points) / spread)
        return max(mean - slope * middle, 0.0), slope


def rising(points: Mapping[int, float]) -> list[tuple[float, float]]:
    """The points in order, each at least as high as those before it."""
    found: list[tuple[float, float]] = []
    for at, value in sorted(points.items()):
        found.append((at, max(value, found[-1][1]) if found else value))
    return found


def line(points: Points, at: float) -> float:
    """Value at ``at`` of the line through ``points`` (ascending), continued with its end slopes where they rise."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_right([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    if at > x1:
        return y1 + max(slope, 0.0) * (at - x1)
    if at < x0:
        return max(y0 - max(slope, 0.0) * (x0 - at), y0 / 2)
    return y0 + slope * (at - x0)
