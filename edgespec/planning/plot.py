"""A picture of the memory parts of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.planning.plan import Candidate, Plan, label

COLOURS = ("#3b7dd8", "#8fb8ec", "#f2a541", "#f7cf8d", "#6aa84f", "#b6d7a8", "#9aa5b1", "#d9dee3", "#c27ba0", "#7a5195")
MOST = 16  # candidates in a picture


def plot_plan(plan: Plan, path: Path) -> None:
    """Stacked bars of the parts, a candidate each, with the budget as a line; a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = _shown(plan)
    names = list(dict.fromkeys(part.name for candidate in shown for part in candidate.memory.parts))
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(shown) + 1.8))
    left = [0.0] * len(shown)
    for number, name in enumerate(names):
        widths = [_bytes(candidate, name) / 2**20 for candidate in shown]
        axes.barh([label(one) for one in shown], widths, left=left, color=COLOURS[number % len(COLOURS)], label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    peaks = [candidate.memory.peak / 2**20 for candidate in shown]
    axes.plot(peaks, range(len(shown)), "k|", markersize=12, label="peak")
    axes.axvline(plan.wish.budget / 2**20, color="#c0392b", linewidth=1.2, label="budget")
    axes.set_xlim(0, 1.05 * max(*peaks, *left, min(plan.wish.budget / 2**20, 2 * max(peaks))))
    axes.invert_yaxis()
    axes.set_xlabel("MiB resident: private and mapped, context full")
    axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _shown(plan: Plan) -> Sequence[Candidate]:
    """The candidates worth a bar; labels must differ."""
    return list({label(candidate): candidate for candidate in plan.candidates}.values())[:MOST]


def _bytes(candidate: Candidate, name: str) -> int:
    return sum(part.private + part.file for part in candidate.memory.parts if part.name == name)
