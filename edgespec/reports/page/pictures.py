"""Pictures of a page, as SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN, FAST, INK = "#9aa5b1", "#3b7dd8", "#24292f"
WIDTH = 6.4  # inches


class _Picture:
    """Axes to draw on; ``svg`` is the picture without a prologue, ready to stand in a page."""

    def __init__(self, height: float, title: str, across: str, up: str = "") -> None:
        from matplotlib.figure import Figure  # without pyplot: nothing global

        self.figure = Figure(figsize=(WIDTH, height))
        self.axes = self.figure.subplots()
        self.axes.set_title(title, parse_math=False, fontsize=10, loc="left")
        self.axes.set_xlabel(across, fontsize=9)
        self.axes.set_ylabel(up, fontsize=9)
        self.axes.tick_params(labelsize=8)
        self.axes.spines[["top", "right"]].set_visible(False)

    def svg(self) -> str:
        import matplotlib

        self.figure.tight_layout()
        out = io.StringIO()
        # text stays text; the same picture is the same file
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "edgespec"}):
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        text = out.getvalue()
        return text[text.index("<svg") :]


def speeds(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Bars of the speed-ups with their intervals."""
    picture = _Picture(0.42 * len(rows) + 0.9, "Speed", "speed over plain decoding: median, 95 % interval")
    values = [row["speedup"] for row in rows]
    low = [max(0.0, row["speedup"] - row["speedup_low"]) for row in rows]
    high = [max(0.0, row["speedup_high"] - row["speedup"]) for row in rows]
    colours = [PLAIN if row["method"] == "plain" else FAST for row in rows]
    picture.axes.barh(range(len(rows)), values, xerr=[low, high], color=colours, ecolor=INK)
    picture.axes.set_yticks(range(len(rows)), names, parse_math=False)
    picture.axes.axvline(1, color=INK, linewidth=0.8)
    picture.axes.invert_yaxis()
    return picture.svg()


def lines(points: Mapping[str, Mapping[int, float]], title: str, across: str, up: str, log: bool = False) -> str:
    """One line a name, through its points, which stand at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    picture = _Picture(2.6, title, across, up)
    for name, found in points.items():
        picture.axes.plot(list(found), list(found.values()), marker="o", markersize=3, label=name)
    picture.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        picture.axes.set_xscale("log", base=2)
        picture.axes.set_xticks(places := sorted({at for found in points.values() for at in found}), map(str, places))
    picture.axes.set_ylim(bottom=0)
    if len(points) > 1:
        picture.axes.legend(fontsize=8, frameon=False)
    return picture.svg()


def stacks(parts: Mapping[str, Mapping[str, int]], title: str) -> str:
    """Stacked bars in MiB, a method each."""
    picture = _Picture(0.42 * len(parts) + 1.3, title, "MiB, the context full")
    largest: dict[str, int] = {}
    for of_it in parts.values():
        for name, size in of_it.items():
            largest[name] = max(size, largest.get(name, 0))
    shown = sorted(largest, key=lambda name: -largest[name])[:6]
    left = [0.0] * len(parts)
    for name in [*shown, "the rest"]:
        wanted = shown if name == "the rest" else []
        widths = [
            sum(size for part, size in of_it.items() if (part not in wanted if wanted else part == name)) / 2**20
            for of_it in parts.values()
        ]
        picture.axes.barh(range(len(parts)), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    picture.axes.set_yticks(range(len(parts)), list(parts), parse_math=False)
    picture.axes.invert_yaxis()
    picture.axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture.svg()
