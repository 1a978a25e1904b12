"""Time passes, and find where they take longer than the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from edgespec.decoding.target import BEST
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.planning.traffic import kv_token_bytes, read_bytes
from edgespec.runtimes.ort.native_library import (
    PARTS,
    PassCounts,
    RooflineLimits,
    count_passes,
    measure_roofs,
    native_library,
)
from edgespec.runtimes.slots.slot import Slot

N = TypeVar("N")


def turned(names: Sequence[N], number: int) -> list[N]:
    """Return all of them; the first one changes from turn to turn."""
    at = number % len(names)
    return [*names[at:], *names[:at]]


def pass_over(slot: Slot, rows: int) -> Callable[[], object]:
    """Make a pass of ``rows`` rows, as in a greedy round, to time it."""
    tokens = np.arange(rows) % slot.vocab_size  # different ones, which go to different experts
    if BEST in slot.can:
        return lambda: slot.forward(tokens, None, True)
    return lambda: slot.forward(tokens).logits.argmax(-1)


ROWS = (1, 2, 4, 8, 16, 32)
DEPTH = 200
TURNS = 9  # of each number of rows; the fastest counts for all, so that its parts add up
WARM = 2


def profile_passes(
    engine: Engine, rows: Sequence[int] = ROWS, depth: int = DEPTH, turns: int = TURNS
) -> dict[str, Any]:
    """Profile passes of several numbers of rows, interleaved, over synthetic keys and values.

    Rooflines are the machine's, the better of before and after.  ``planned_mb`` is the planner's estimate of the data
    that a pass of one row reads (``traffic``).  For JSON; the keys are stable.

    Raises:
        InvalidRequest: the engine does not run native operators on the processor.
    """
    if engine.operators.kind != "native" or engine.device != "cpu":
        raise InvalidRequest("--profile counts passes of native operators", "leave out --operators and --device")
    slot, threads = engine.open_slot(), engine.model.threads
    wanted = [n for n in rows if n + 1 < engine.context]
    depth = max(1, min(depth, engine.context - max(wanted) - 1))
    slot.stand_in(depth)
    runs = {n: pass_over(slot, n) for n in wanted}
    best: dict[int, PassCounts] = {}
    before = measure_roofs(threads)
    for turn in range(WARM + turns):
        for n, run in runs.items():
            found = count_passes(run)
            if turn >= WARM and (n not in best or found.wall < best[n].wall):
                best[n] = found
    after, target = measure_roofs(threads), engine.bundle.manifest.target
    roofs = RooflineLimits(max(before.bandwidth, after.bandwidth), max(before.dots, after.dots))
    planned = read_bytes(target, "native") + depth * kv_token_bytes(target, "native", engine.attention.name)
    return {
        "isa": native_library().isa,
        "threads": threads,
        "depth": depth,
        "bandwidth_gb_s": roofs.bandwidth / 1e9,
        "dot_gmac_s": roofs.dots / 1e9,
        "planned_mb": planned / 1e6,
        "passes": [_pass(n, counts, best[min(best)].wall, roofs) for n, counts in best.items()],
    }


def _pass(rows: int, found: PassCounts, one: float, roofs: RooflineLimits) -> dict[str, Any]:
    """Describe passes over ``rows`` rows; ``one``: seconds of a pass over the fewest."""
    parts = {
        name: {
            "ms": 1000 * part.seconds,
            "mb": part.bytes / 1e6,
            "gmac": part.macs / 1e9,
            "roof_share": roofs.seconds(part.bytes, part.macs) / part.seconds if part.macs else None,
        }
        for name, part in ((name, found.parts[name]) for name in PARTS)
    }
    return {
        "rows": rows,
        "ms": 1000 * found.wall,
        "v": found.wall / one,
        "least_ms": 1000 * sum(roofs.seconds(part.bytes, part.macs) for part in found.parts.values()),
        "python_ms": 1000 * (found.wall - found.inside),
        "parts": parts,
    }
