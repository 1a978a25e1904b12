"""Timings of passes and draft steps by their size, kept comparable while the machine changes its pace.

Sizes are timed at different moments.  A processor that gets hot, or other work beside, makes all of them slower from
some moment on.  A size that is not used then keeps its old timings: it looks cheap, or dear when the slow time is over,
and nothing would ever time it again.  So where several passes in a row, of whatever sizes, take another time than those
sizes did before, everything that was timed before is taken to have changed with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import chain
from statistics import median

WINDOW = 15  # latest timings of a size; their median is not moved by a pass that the system interrupted
_KNOWN = 3  # timings of a size before it can be told that it changed
_SIZES = 32  # pass sizes whose timings are kept: batches have many, and every drafter a model of its own
_IN_A_ROW, _BEYOND = 5, 1.25  # so many passes, all so far off in one direction: another pace


class _Window:
    """Latest timings of one size, and when each was made; without room to spare, because there are many."""

    def __init__(self) -> None:
        self.ms = array("d")
        self.when = array("L")

    def add(self, ms: float, times: int, now: int) -> None:
        self.ms = (self.ms + array("d", [ms] * times))[-WINDOW:]
        self.when = (self.when + array("L", [now] * times))[-WINDOW:]

    def usual(self, before: int) -> float | None:
        """Median of what was timed before that moment."""
        known = sorted(self.ms[: sum(at < before for at in self.when)])
        return known[len(known) // 2] if len(known) >= _KNOWN else None

    def scale(self, factor: float, before: int) -> None:
        """Take what was timed before that moment to be so much longer."""
        self.ms = array("d", [ms * factor if at < before else ms for ms, at in zip(self.ms, self.when, strict=True)])


class Timings:
    """Milliseconds of passes by rows, and of drafts by steps."""

    def __init__(self) -> None:
        self._passes: dict[int, _Window] = {}  # the size timed last is last
        self._drafts: dict[int, _Window] = {}
        self._now = 0
        self._run: list[float] = []  # passes in a row that took clearly longer, or shorter, than usual: how much
        self._since = 0  # when the first of them was timed

    @property
    def passes(self) -> Mapping[int, array[float]]:
        """Rows -> the latest timings, oldest first."""
        return {n: window.ms for n, window in self._passes.items()}

    @property
    def drafts(self) -> Mapping[int, array[float]]:
        """The same of drafts by steps."""
        return {n: window.ms for n, window in self._drafts.items()}

    def one(self) -> float | None:
        """Time of a pass over one row; None = there was none."""
        window = self._passes.get(1)
        return median(window.ms) if window else None

    def add_pass(self, rows: int, ms: float, times: int = 1) -> None:
        """A pass over so many rows took ``ms``; ``times``: as the median of so many."""
        mine = self._add(self._passes, rows, ms, times)
        if (usual := mine.usual(self._since if self._run else self._now)) and ms > 0:
            self._compare(ms / usual)

    def add_draft(self, steps: int, ms: float, times: int = 1) -> None:
        """The same of so many draft steps."""
        self._add(self._drafts, steps, ms, times)

    def _add(self, windows: dict[int, _Window], size: int, ms: float, times: int) -> _Window:
        self._now += 1
        mine = windows.pop(size) if size in windows else _Window()
        windows[size] = mine
        if len(windows) > _SIZES:
            del windows[next(each for each in windows if each > 1)]
        mine.add(ms, times, self._now)
        return mine

    def _compare(self, ratio: float) -> None:
        """The latest pass took ``ratio`` times as long as usual; scale what is older where that is no chance."""
        if 1 / _BEYOND <= ratio <= _BEYOND:
            self._run.clear()
            return
        if self._run and (self._run[0] > 1) != (ratio > 1):
            self._run.clear()
        if not self._run:
            self._since = self._now
        self._run.append(ratio)
        if len(self._run) == _IN_A_ROW:
            factor = median(self._run)
            for window in chain(self._passes.values(), self._drafts.values()):
                window.scale(factor, self._since)
            self._run.clear()
