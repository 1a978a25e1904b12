"""A picture of the memory parts of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.planning.candidates import PlannedRun
from edgespec.planning.plan import Plan, label

MOST = 16  # candidates in a picture


def plot_plan(plan: Plan, path: Path) -> None:
    """Stacked bars of the parts, a candidate each, with the budget as a line; a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = _shown(plan)
    names = list(dict.fromkeys(part.name for candidate in shown for part in candidate.memory.parts))
    figure, axes = pyplot.subplots(figsize=(10, max(4.5, 0.4 * len(shown) + 1.8)))
    colours = pyplot.get_cmap("tab20").colors
    left = [0.0] * len(shown)
    for number, name in enumerate(names):
        widths = [_bytes(candidate, name) / 2**20 for candidate in shown]
        axes.barh([label(one) for one in shown], widths, left=left, color=colours[number % 20], label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    peaks = [candidate.memory.peak / 2**20 for candidate in shown]
    axes.plot(peaks, range(len(shown)), "k|", markersize=12, label="peak")
    axes.axvline(plan.request.budget / 2**20, color="#c0392b", linewidth=1.2, label="budget")
    axes.set_xlim(0, 1.05 * max(*peaks, *left, min(plan.request.budget / 2**20, 2 * max(peaks))))
    axes.invert_yaxis()
    axes.set_xlabel("MiB resident: private and mapped, context full")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _shown(plan: Plan) -> Sequence[PlannedRun]:
    """The candidates worth a bar; labels must differ."""
    return list({label(candidate): candidate for candidate in plan.candidates}.values())[:MOST]


def _bytes(candidate: PlannedRun, name: str) -> int:
    return sum(part.private + part.file for part in candidate.memory.parts if part.name == name)
