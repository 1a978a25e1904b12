"""Whether anything else ran on the machine while something was measured: a busy machine's times mislead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from edgespec.runtimes.ort.session import processors

BUSY = 1.5  # from this spread of equal passes on, something else ran on the machine
OTHERS = 0.2  # share of the processors: from here on, what others take shows in the times
STAT = Path("/proc/stat")
UNITS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # ticks a second in ``STAT``
IDLE = (3, 4)  # idle and waiting for a disk, in ``STAT``


class Watch:
    """Counts what other processes, and other virtual machines, take of this process's processors from now on."""

    def __init__(self) -> None:
        self._begun, self._busy, self._own = perf_counter(), _busy(), _own()

    def others(self) -> float | None:
        """Return the share of the processors that others took since the start, 0 to 1; None = not known here."""
        elapsed = (perf_counter() - self._begun) * len(processors())
        if self._busy is None or (busy := _busy()) is None or elapsed <= 0:
            return None
        return min(1.0, max(0.0, (busy - self._busy) - (_own() - self._own)) / elapsed)


def busy_words(spread: float, others: float | None = None) -> str:
    """Say why times may be wild; empty = the machine was quiet.

    Args:
        spread: of times of equal passes, the upper quartile over the lower.
        others: share of the processors that others took; None = not known.
    """
    found = []
    if spread >= BUSY:
        found.append(f"the middle half of equal passes differed by {spread:.1f} times")
    if others is not None and others >= OTHERS:
        found.append(f"other programs took {others:.0%} of the processors")
    return f"the machine was busy: {', and '.join(found)}" if found else ""


def export_busy(cost: Mapping[str, Any]) -> str:
    """Say why the times of a bundle's export (``Manifest.cost``) may be wild; empty = they should hold."""
    return busy_words(float(cost.get("spread", 1.0)), float(cost.get("others", 0.0)))


def _own() -> float:
    """Seconds of processor time of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy() -> float | None:
    """Seconds that the processors of this process have worked since the machine started; None = not known."""
    wanted = {f"cpu{number}" for number in processors()}
    try:
        lines = [line.split() for line in STAT.read_text("ascii").splitlines()]
    except (OSError, ValueError):
        return None
    rows = [[int(one) for one in line[1:9]] for line in lines if line and line[0] in wanted]
    return sum(sum(row) - sum(row[at] for at in IDLE) for row in rows) / UNITS if rows else None
