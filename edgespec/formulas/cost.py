"""Formulas for the cost and gain of speculation, and the measured numbers to put into them.

    speedup = E(a, gamma) / (gamma * c + v(gamma + 1))

a = acceptance, E = expected tokens per round, c = time of one draft step and v(n) = time of a target pass over n rows,
both in units of a pass over one row.  Leviathan et al. (arXiv 2211.17192, theorem 3.8) have v = 1, which holds for a
machine with compute to spare; on a CPU it does not.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import TypeVar

Curve = Callable[[int], float]  # n -> v(n)

# Assumptions, for use until something was measured on this device.  v: int4 linear layers on stock ONNX Runtime
# operators, 0.5B shape, 2 threads of a Cascade Lake machine (Zen 4: docs/methods.md).  c: a draft of a twentieth of
# the target.
ASSUMED_VERIFY: Mapping[int, float] = {1: 1.0, 4: 1.67, 8: 2.57, 16: 3.95}
ASSUMED_DRAFT = 0.05
WORTH = 1.05  # predicted gain below which a plan does not pick a drafting method

WINDOW = 15  # latest timings of a size; their median is not moved by a pass that the system interrupted
_KNOWN = 3  # timings of a size that are needed to detect a change
_SIZES = 32  # pass sizes whose timings are kept: batches have many sizes, and every drafter has its own model
_IN_A_ROW, _BEYOND = 5, 1.1  # this many passes in a row, all this far off in one direction: the speed has changed

ENOUGH = 3  # timings before they count
_KEEP_READS = 0.98  # what a pass leaves of the weight of older ones among the bytes that passes read
_GIVEN_READS = 4.0  # passes that the given curve counts as
_REFRESH = 8  # timings between two evaluations of the medians


def expected_tokens(acceptance: float | Sequence[float], gamma: int) -> float:
    """Predict the tokens of a round that drafts ``gamma`` tokens.

    Args:
        acceptance: P(accepted | all before it were) of every token, or of each position; the last one is used for the
            positions after it.
        gamma: draft tokens, >= 0.

    Returns:
        1 + sum_i prod_{j <= i} a_j; for one a it is (1 - a^(gamma + 1)) / (1 - a) (arXiv 2211.17192, equation 1).
    """
    at = [acceptance] if isinstance(acceptance, (int, float)) else list(acceptance) or [0.0]
    total = chance = 1.0
    for i in range(gamma):
        chance *= at[min(i, len(at) - 1)]
        total += chance
    return total


def speedup(acceptance: float | Sequence[float], gamma: int, c: float, v: Curve) -> float:
    """Return the speed over plain decoding: arXiv 2211.17192 theorem 3.8, with the verify curve."""
    return expected_tokens(acceptance, gamma) / (gamma * c + v(gamma + 1))


Windows = dict[int, deque[tuple[int, float]]]  # by size: when each of the latest passes was timed, and milliseconds


class Timings:
    """Milliseconds of passes by rows, and of drafts by steps, kept comparable while the machine changes its speed.

    Sizes are timed at different moments.  A hot processor, or other work, slows all of them down from some moment
    on.  A size that is not used then keeps its old timings.  It looks cheap, or expensive once the slow time is over,
    and is never timed again.  So if several passes in a row, of any sizes, take a different time than those sizes did
    before, all earlier timings are rescaled by the same factor.
    """

    def __init__(self) -> None:
        self._passes: Windows = {}  # the size timed last is last
        self._drafts: Windows = {}
        self._now = 0
        self._run: list[float] = []  # passes in a row that took clearly longer, or shorter, than usual: how much
        self._since = 0  # when the first of them was timed

    @property
    def passes(self) -> Mapping[int, list[float]]:
        """Rows -> the latest timings, oldest first."""
        return {n: [ms for _, ms in window] for n, window in self._passes.items()}

    @property
    def drafts(self) -> Mapping[int, list[float]]:
        """The same of drafts by steps."""
        return {n: [ms for _, ms in window] for n, window in self._drafts.items()}

    def one(self) -> float | None:
        """Time of a pass over one row; None = there was none."""
        window = self._passes.get(1)
        return median(ms for _, ms in window) if window else None

    def add_pass(self, rows: int, ms: float, times: int = 1) -> None:
        """Record that a pass over ``rows`` rows took ``ms``; ``times``: weight of the sample."""
        before = self._since if self._run else self._now + 1
        known = sorted(taken for when, taken in self._add(self._passes, rows, ms, times) if when < before)
        if len(known) >= _KNOWN and (usual := known[len(known) // 2]) and ms > 0:
            self._compare(ms / usual)

    def add_draft(self, steps: int, ms: float, times: int = 1) -> None:
        """Record that ``steps`` draft steps took ``ms``."""
        self._add(self._drafts, steps, ms, times)

    def _add(self, windows: Windows, size: int, ms: float, times: int) -> deque[tuple[int, float]]:
        self._now += 1
        windows[size] = mine = windows.pop(size, deque(maxlen=WINDOW))
        if len(windows) > _SIZES:
            del windows[next(each for each in windows if each > 1)]
        mine.extend([(self._now, ms)] * times)
        return mine

    def _compare(self, ratio: float) -> None:
        """Compare the latest pass, ``ratio`` times as long as usual; rescale older timings if five in a row agree."""
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
            for windows in (self._passes, self._drafts):
                for size, window in windows.items():
                    scaled = ((when, ms * factor if when < self._since else ms) for when, ms in window)
                    windows[size] = deque(scaled, WINDOW)
            self._run.clear()


class DiskReads:
    """Bytes that passes read from a disk, by their rows, and the time that they wait for a byte.

    Bytes are counted, and depend on the text alone; the clock of a disk that others use says little about one pass.

    ``given``: points {rows: bytes}, in some proportion, until passes have shown them.
    """

    def __init__(self, given: Mapping[int, float]) -> None:
        self.given = dict(sorted(given.items()))
        self._by_rows: dict[int, tuple[float, float]] = {}  # discounted: passes, and bytes of them
        self._waited, self._bytes = 0.0, 0.0  # the same of all passes: milliseconds, bytes

    def add(self, rows: int, read: float, waited_ms: float) -> None:
        """Count a pass."""
        passes, total = self._by_rows.get(rows, (0.0, 0.0))
        self._by_rows[rows] = _KEEP_READS * passes + 1, _KEEP_READS * total + read
        self._waited = _KEEP_READS * self._waited + waited_ms
        self._bytes = _KEEP_READS * self._bytes + read

    @property
    def one(self) -> float | None:
        """Bytes of a pass over one row; None = too few were counted."""
        passes, total = self._by_rows.get(1, (0.0, 0.0))
        return total / passes if passes > ENOUGH - 1 and total else None

    @property
    def one_ms(self) -> float:
        """Milliseconds that a pass over one row waits."""
        return (self.one or 0.0) * self._waited / self._bytes if self._bytes else 0.0

    def ratio(self, rows: int) -> float:
        """Bytes of a pass over ``rows`` rows over those of one row."""
        points, one = list(self.given.items()), self.one
        given = _interpolate(points, rows) / points[0][1]
        passes, total = self._by_rows.get(rows, (0.0, 0.0))
        if rows == 1 or one is None:
            return given
        return (total / one + _GIVEN_READS * given) / (passes + _GIVEN_READS)


class CostModel:
    """d(k), the time of k draft steps, and v(n): given, and corrected by what is observed.

    Where passes read weights from a disk, a pass waits for bytes, which are counted (``DiskReads``), and computes for
    the rest of its time, which the clock teaches: v is the sum of both.

    Both are linear between their points and continue with the last slope; d(0) = 0 and v(1) = 1 by definition.  A
    drafter that first reads what the target wrote takes longest for its first guess.  v grows a little with the depth
    of the context; observations come from the depth of the moment.

    Args:
        verify: points {rows: v}, or any times in proportion to them; None = ``ASSUMED_VERIFY``.
        draft: c; None = ``ASSUMED_DRAFT``.
        first: of the first step of a round; None = ``draft``.
        reads: points {rows: bytes that passes read from a disk}, or in proportion to them; None = they read none.
        draft_reads: bytes that a draft step reads over those of a one-row pass, until drafts were timed.

    Raises:
        ValueError: no point, or one that is not a positive number of rows with a positive cost.
    """

    def __init__(
        self,
        verify: Mapping[int, float] | None = None,
        draft: float | None = None,
        first: float | None = None,
        reads: Mapping[int, float] | None = None,
        draft_reads: float = 0.0,
    ) -> None:
        points = dict(ASSUMED_VERIFY if verify is None else verify)
        if not points or min(points) < 1 or min(points.values()) <= 0 or min(draft or 0.0, first or 0.0) < 0:
            raise ValueError(f"expected {{rows >= 1: cost > 0}} and draft cost >= 0, got {points}, {draft} and {first}")
        self._given_c, self._given_first = ASSUMED_DRAFT if draft is None else draft, first
        self._given_reads, self._draft_reads = draft_reads, draft_reads
        one = points.get(1, points[min(points)])
        self._given = {1: 1.0} | {n: cost / one for n, cost in sorted(points.items())}
        self.reads = None if reads is None else DiskReads(reads)
        self.timings = Timings()
        self._unread = 0
        self._version = 0  # how often timings were folded in
        self._points = list(self._given.items())
        self._steps = [(0, 0.0), (1, self._given_c)]
        if first is not None:
            self._steps[1:] = [(1, first), (2, first + self._given_c)]
        self._table, self._draft_table = array("d"), array("d")
        self._plain_ms: float | None = None  # of computing
        self._waits = 0.0  # share of a one-row pass that it waits for the disk

    def given(self) -> CostModel:
        """Copy without observations: the same in every run."""
        reads = None if self.reads is None else self.reads.given
        return CostModel(self._given, self._given_c, self._given_first, reads, self._given_reads)

    @property
    def c(self) -> float:
        """Time of the first draft step over the time of a one-row pass."""
        return self.d(1)

    def d(self, k: int) -> float:
        """Time of ``k`` draft steps over the time of a one-row pass."""
        if self._unread >= _REFRESH:
            self._refresh()
        while len(self._draft_table) <= k:
            steps = len(self._draft_table)
            computed = (1 - self._waits) * _interpolate(self._steps, steps)
            self._draft_table.append(computed + self._waits * self._draft_reads * steps)
        return self._draft_table[k]

    def v(self, n: int) -> float:
        """Time of an ``n``-row pass over the time of a one-row pass."""
        if self._unread >= _REFRESH:
            self._refresh()
        while len(self._table) <= n:
            rows = len(self._table)
            self._table.append(self._mixed(_interpolate(self._points, rows), rows))
        return self._table[n]

    def _mixed(self, computed: float, rows: int) -> float:
        """Add the time of computing, over that of one row, and the time of reading."""
        return computed if self.reads is None else (1 - self._waits) * computed + self._waits * self.reads.ratio(rows)

    def least(self, n: int) -> float:
        """Return the least that an ``n``-row pass can cost: one row's computing, and the bytes that it reads."""
        if self.reads is None:
            return 1.0
        return self.v(n) if self._plain_ms is None else self._mixed(1.0, n)

    @property
    def version(self) -> int:
        """Number of times that ``d`` and ``v`` have changed."""
        if self._unread >= _REFRESH:
            self._refresh()
        return self._version

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of a one-row pass; None = not measured."""
        if self._unread >= _REFRESH:
            self._refresh()
        return None if self._plain_ms is None else self._plain_ms / (1 - self._waits)

    def observe_verify(self, n: int, ms: float, times: int = 1) -> None:
        """Record that a pass over ``n`` rows computed for ``ms``; ``times``: weight of the sample."""
        self.timings.add_pass(n, ms, times)
        self._unread += times

    def observe_reads(self, n: int, read: float, waited_ms: float) -> None:
        """Record the bytes that a pass over ``n`` rows read from a disk, and how long it waited for them."""
        if self.reads is not None:
            self.reads.add(n, read, waited_ms)

    def observe_draft(self, n: int, ms: float, times: int = 1) -> None:
        """Record that ``n`` draft steps took ``ms``; ``times``: weight of the sample."""
        if n > 0:
            self.timings.add_draft(n, ms, times)
            self._unread += times

    def observe_round(self, n: int, steps: int, ms: float) -> None:
        """Record that drafting ``steps`` steps and verifying ``n`` rows computed for ``ms``: drafts are the rest."""
        one = self.timings.one()
        if one and steps > 0:
            self.observe_draft(steps, max(0.0, ms - one * _interpolate(self._points, n)))

    def _refresh(self) -> None:
        """Update the curves with new timings; not in every round, because medians of all windows are expensive."""
        self._unread = 0
        self._version += 1
        ms = {n: median(times) for n, times in sorted(self.timings.passes.items()) if len(times) >= ENOUGH}
        if not ms:
            return
        smallest = next(iter(ms))
        # One-row passes may never happen (each round drafts): then the given curve says what one would take.
        one = ms[smallest] / _interpolate(list(self._given.items()), smallest)
        self._plain_ms = one
        if self.reads is not None:
            self._waits = self.reads.one_ms / (self.reads.one_ms + one)
            self._draft_table = array("d")
        points = self._given | {n: time / one for n, time in ms.items()} | {1: 1.0}
        # Measured points stay; a given point between measured ones may contradict them.
        known = {n: cost for n, cost in points.items() if n in ms or n == 1 or not min(ms) < n < max(ms)}
        self._points, self._table = rising(known), array("d")
        if drafts := {k: median(times) / one for k, times in self.timings.drafts.items() if len(times) >= ENOUGH}:
            self._steps, self._draft_table, self._draft_reads = rising({0: 0.0} | drafts), array("d"), 0.0


def rising(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Sort the points and make them non-decreasing: a dip is noise, and argmax would select it."""
    top, found = 0.0, []
    for n, cost in sorted(points.items()):
        top = max(top, cost)
        found.append((n, top))
    return found


def _interpolate(points: Sequence[tuple[int, float]], n: int) -> float:
    """Interpolate ``points`` (ascending) linearly at ``n``, and extrapolate at the right end with the last slope."""
    if n <= points[0][0] or len(points) == 1:
        return points[0][1]
    (left, low), (right, high) = next((pair for pair in pairwise(points) if n <= pair[1][0]), points[-2:])
    return low + (high - low) * (n - left) / (right - left)


Clock = Callable[[], float]  # seconds
K = TypeVar("K", bound=Hashable)
LEAST, MOST = 3, 15  # timed turns of each


def time_turns(
    runs: Mapping[K, Callable[[], object]],
    seconds: float,
    clock: Clock = perf_counter,
    prepare: Callable[[K], object] | None = None,
    least: int = LEAST,
    most: int = MOST,
    warm: int = 1,
) -> dict[K, list[float]]:
    """Time interleaved runs, so that a slow moment of the machine affects all of them -> milliseconds of each turn.

    After ``warm`` untimed turns, there are ``least`` to ``most``; no further one begins after ``seconds``.
    ``prepare`` is called before each run; its time does not count.
    """
    times: dict[K, list[float]] = {name: [] for name in runs}
    begun = clock()
    for turn in range(warm + most):
        if turn >= warm + least and clock() - begun > seconds:
            break
        for name, run in runs.items():
            if prepare:
                prepare(name)
            start = clock()
            run()
            if turn >= warm:
                times[name].append(1000 * (clock() - start))
    return {name: taken for name, taken in times.items() if taken}


def medians(times: Mapping[K, Sequence[float]]) -> dict[K, float]:
    return {name: median(taken) for name, taken in times.items()}


def measure_all(run: Callable[[int], object], sizes: Iterable[int], repeats: int = 7) -> dict[int, list[float]]:
    """Time passes of several sizes, interleaved, ``run(n)`` for each, after an untimed one -> {n: milliseconds}."""
    return time_turns({n: partial(run, n) for n in sizes}, 0.0, least=repeats, most=repeats)


def measure(run: Callable[[int], object], sizes: Iterable[int], repeats: int = 7) -> dict[int, float]:
    """Take the median of each size of ``measure_all``."""
    return medians(measure_all(run, sizes, repeats))


def spread(times: Sequence[float]) -> float:
    """Return how unsteady the machine was in equal runs: upper quartile of their times over the lower one."""
    if len(times) < 2:
        return 1.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high / low if low else 1.0  # no clock so coarse measures anything
