"""Timing many things within a limit, and where the time of a pass goes beside what the machine allows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from edgespec.decoding.target import GreedyTarget
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.planning.traffic import kv_token_bytes, read_bytes
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import PARTS, PassCounts, Roofs, count_passes, measure_roofs, native_library
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
    """Time each run.

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
    """Make a pass of ``rows`` rows as a greedy round makes it, to be timed."""
    tokens = np.arange(rows) % slot.vocab_size  # different ones, which go to different experts
    if isinstance(slot, GreedyTarget):
        return lambda: slot.forward_best(tokens)
    return lambda: slot.forward(tokens).logits.argmax(-1)


ROWS = (1, 2, 4, 8, 16, 32)
DEPTH = 200
TURNS = 9  # of each number of rows; the fastest stands for all, so that its parts add up
WARM = 2


@dataclass(frozen=True)
class PassProfile:
    """Passes of one bundle.

    Attributes:
        roofs: of the machine, measured before and after the passes.
        isa: the instruction set of the kernels.
        threads: of a pass.
        depth: tokens before a pass.
        planned_bytes: what the planner takes a pass of one row to read (``traffic``).
        counts: by rows.
    """

    roofs: Roofs
    isa: str
    threads: int
    depth: int
    planned_bytes: float
    counts: dict[int, PassCounts]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {
            "isa": self.isa,
            "threads": self.threads,
            "depth": self.depth,
            "bandwidth_gb_s": self.roofs.bandwidth / 1e9,
            "dot_gmac_s": self.roofs.dots / 1e9,
            "planned_mb": self.planned_bytes / 1e6,
            "passes": [self._pass(rows, found) for rows, found in self.counts.items()],
        }

    def _pass(self, rows: int, found: PassCounts) -> dict[str, Any]:
        parts = {}
        for name in PARTS:
            part = found.parts[name]
            parts[name] = {
                "ms": 1000 * part.seconds,
                "mb": part.bytes / 1e6,
                "gmac": part.macs / 1e9,
                "roof_share": self.roofs.seconds(part.bytes, part.macs) / part.seconds if part.macs else None,
            }
        least = sum(self.roofs.seconds(part.bytes, part.macs) for part in found.parts.values())
        return {
            "rows": rows,
            "ms": 1000 * found.wall,
            "v": found.wall / self.counts[min(self.counts)].wall,
            "least_ms": 1000 * least,
            "python_ms": 1000 * (found.wall - found.inside),
            "parts": parts,
        }


def profile_passes(engine: Engine, rows: Sequence[int] = ROWS, depth: int = DEPTH, turns: int = TURNS) -> PassProfile:
    """Profile passes of several numbers of rows, in turns, over keys and values that are made up.

    Raises:
        InvalidRequest: the engine does not run native operators on the processor.
    """
    if engine.operators.kind != "native" or engine.device != "cpu":
        raise InvalidRequest("--profile counts passes of native operators", "leave out --operators and --device")
    slot = open_slot(engine.model, context=engine.context)
    wanted = [n for n in rows if n + 1 < engine.context]
    depth = max(1, min(depth, engine.context - max(wanted) - 1))
    slot.stand_in(depth)
    runs = {n: pass_over(slot, n) for n in wanted}
    best: dict[int, PassCounts] = {}
    before = measure_roofs(engine.model.threads)
    for turn in range(WARM + turns):
        for n, run in runs.items():
            found = count_passes(run)
            if turn >= WARM and (n not in best or found.wall < best[n].wall):
                best[n] = found
    after = measure_roofs(engine.model.threads)
    target = engine.bundle.manifest.target
    planned = read_bytes(target, "native") + depth * kv_token_bytes(target, "native", engine.attention.name)
    return PassProfile(
        roofs=Roofs(max(before.bandwidth, after.bandwidth), max(before.dots, after.dots)),
        isa=native_library().isa,
        threads=engine.model.threads,
        depth=depth,
        planned_bytes=planned,
        counts=best,
    )
