"""Timing many things within a limit: they take turns, and what time there is decides how often."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from statistics import median
from time import perf_counter
from typing import TypeVar

import numpy as np

from edgespec.decoding.target import GreedyTarget
from edgespec.runtimes.slots.slot import Slot

Clock = Callable[[], float]  # seconds
K = TypeVar("K", bound=Hashable)
LEAST, MOST = 3, 15  # timed turns of each


def take_turns(
    runs: Mapping[K, Callable[[], object]],
    seconds: float,
    clock: Clock = perf_counter,
    prepare: Callable[[K], object] | None = None,
    least: int = LEAST,
    most: int = MOST,
    warm: int = 1,
) -> dict[K, float]:
    """Median time of each run, as ``time_turns`` takes them."""
    return {name: median(taken) for name, taken in time_turns(runs, seconds, clock, prepare, least, most, warm).items()}


def time_turns(
    runs: Mapping[K, Callable[[], object]],
    seconds: float,
    clock: Clock = perf_counter,
    prepare: Callable[[K], object] | None = None,
    least: int = LEAST,
    most: int = MOST,
    warm: int = 1,
) -> dict[K, list[float]]:
    """Times of each run.

    They take turns, so that a slow moment of the machine hits all of them.

    Args:
        runs: what to time.
        seconds: no turn begins after so long, once there were ``least``.
        clock: seconds.
        prepare: called before each run; its time does not count for the run.
        least: timed turns, however long they take.
        most: timed turns, however much time is left.
        warm: turns before, which are not timed.

    Returns:
        {name: milliseconds of each turn}.
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


def pass_over(slot: Slot, rows: int) -> Callable[[], object]:
    """A pass of so many rows as a greedy round makes it, to be timed."""
    tokens = np.arange(rows) % slot.vocab_size  # different ones, which go to different experts
    if isinstance(slot, GreedyTarget):
        return lambda: slot.forward_best(tokens)
    return lambda: slot.forward(tokens).logits.argmax(-1)
