"""Shared parts of the benchmarks: conditions, medians with intervals, alternating runs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

from edgespec.reports.bench import bootstrap


def conditions(**more: Any) -> dict[str, Any]:
    """Give the machine and the versions a figure belongs to."""
    import onnxruntime

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    } | more


def alternate(
    runs: Mapping[str, Callable[[], None]], pairs: int, warm: int = 3, pause: float = 0
) -> dict[str, list[float]]:
    """Milliseconds of each run, taking turns; the order is reversed every other time.

    ``pause``: seconds before each run, in which threads of the one before stop waiting for work.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warm + pairs):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            sleep(pause)
            start = perf_counter()
            runs[name]()
            if turn >= warm:
                times[name].append(1000 * (perf_counter() - start))
    return times


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    """Median of pairwise ratios over / under, with its 95 % interval, and their mean."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, high = bootstrap(ratios)
    return {"ratio": round(median(ratios), 3), "low": round(low, 3), "high": round(high, 3),
            "mean": round(mean(ratios), 3), "pairs": len(ratios)}  # fmt: skip


def show(figures: Mapping[str, Any]) -> None:
    """One JSON object."""
    json.dump(figures, sys.stdout, indent=1)
    print()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            flags = next((line for line in file if line.startswith("flags")), "").split()
            known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni") if flag in flags]
    except OSError:
        known = []
    return f"{platform.machine()} {' '.join(known)}".strip()
