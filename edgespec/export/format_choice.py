"""Chooses the format of a bundle if no format is given: the fastest that keeps the model's quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import QualityError
from edgespec.export.measuring.loss import Loss
from edgespec.planning.budget import show_bytes
from edgespec.runtimes.files.formats import FILE, FORMATS, Format

CHOSEN: tuple[Format, ...] = ("int4", "int8", "fp32")
"""Candidate formats; w8a8 also rounds activations more than int8."""

GOOD = 0.01  # relative perplexity: a format that loses no more is as good as the source
# relative perplexity, and nats per token: a format that loses more is only used on request
BOUND, KL_BOUND = 0.02, 0.02


@dataclass(frozen=True)
class Candidate:
    """A format, and what is known of a bundle in it."""

    format: Format
    size: int  # bytes of the bundle's files
    peak: int  # bytes of memory that it is predicted to take
    rate: float  # speed of plain decoding, in proportion
    fits: bool  # the budget
    loss: Loss | None  # None = it was not measured
    streams: bool = False  # it fits only while layers are read from the disk for each token

    @property
    def good(self) -> bool:
        """Whether it loses next to nothing."""
        return self.loss is not None and self.loss.perplexity <= GOOD and self.loss.kl <= KL_BOUND

    @property
    def bearable(self) -> bool:
        """Whether it may be taken without being asked for."""
        return self.loss is not None and self.loss.perplexity <= BOUND and self.loss.kl <= KL_BOUND

    def as_dict(self, chosen: float) -> dict[str, Any]:
        """For JSON; the keys are stable.  ``chosen``: the rate of what was chosen."""
        return {"format": self.format, "bytes": self.size, "peak": self.peak, "relative_speed": self.rate / chosen,
                "fits": self.fits, "loss": None if self.loss is None else self.loss.as_dict()}  # fmt: skip


@dataclass(frozen=True)
class FormatChoice:
    """The chosen format and the candidates."""

    pick: Candidate
    candidates: Sequence[Candidate]
    unmeasured: str = ""  # why nothing was measured; empty = it was
    calibrates: bool = False  # whether an export in 4 bits would calibrate its levels, and so lose less

    @property
    def line(self) -> str:
        """Describe in one line the chosen format, its loss, and faster formats."""
        pick = self.pick
        if pick.format == FILE:
            return f"the file's own weights, {show_bytes(pick.size)}"
        if pick.loss is None:
            lost = f"quality loss not measured ({self.unmeasured})"
        else:
            lost = f"{_percent(pick.loss)} quality loss{' (estimate)' if pick.loss.estimated else ''}"
        words = f"{pick.format}, {lost}, {show_bytes(pick.size)}"
        faster = [one for one in self.candidates if one.fits and one.rate > pick.rate]
        if not faster:
            return words
        best = max(faster, key=lambda one: one.rate)
        what = "loses more" if best.loss is None else f"loses {_percent(best.loss)}"
        if best.loss is not None and self.calibrates and best.format == "int4":
            what += " before calibration"
        return f"{words}; --format {best.format} is {best.rate / pick.rate:.1f}x as fast and {what}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {"format": self.pick.format, "line": self.line, "unmeasured": self.unmeasured or None,
                "candidates": [one.as_dict(self.pick.rate) for one in self.candidates]}  # fmt: skip


def choose(
    candidates: Sequence[Candidate], budget: int, unmeasured: str = "", calibrates: bool = False
) -> FormatChoice:
    """Choose the fastest format that loses next to nothing, or else the best that fits.

    Args:
        candidates: from fast to slow.
        budget: bytes of memory.
        unmeasured: why nothing was measured; int8 is taken then.
        calibrates: whether an export in 4 bits would calibrate.

    Raises:
        QualityError: only what loses more than the bound fits, or nothing.
    """
    streamed = [one for one in candidates if one.fits]
    fitting = [one for one in streamed if not one.streams] or streamed
    if not fitting:
        least = min(candidates, key=lambda one: one.peak)
        raise QualityError(
            f"nothing fits {show_bytes(budget)}: closest is {least.format}, which needs {show_bytes(least.peak)}",
            f"a budget of {-(-least.peak // 1024**2)} MiB; a shorter --context",
        )
    if unmeasured:
        known = [one for one in fitting if one.format != "int4"]
        pick = known[0] if known else None
    elif good := [one for one in fitting if one.good]:
        pick = max(good, key=lambda one: one.rate)
    else:
        near = [one for one in fitting if one.bearable and one.loss]
        pick = min(near, key=lambda one: one.loss.kl if one.loss else 0.0, default=None)
    if pick is not None:
        return FormatChoice(pick, candidates, unmeasured, calibrates)
    best = max(fitting, key=lambda one: FORMATS.index(one.format) if one.loss is None else -one.loss.kl)
    lost = "an unmeasured share" if best.loss is None else _percent(best.loss)
    better = min((one for one in candidates if one not in fitting), key=lambda one: one.peak, default=None)
    more = f"; {better.format} needs {show_bytes(better.peak)}" if better else ""
    raise QualityError(
        f"only {best.format} fits {show_bytes(budget)}, and it loses {lost} of quality (bound: {BOUND:.0%}){more}",
        f"to take it all the same, add --format {best.format}",
        best.format,
    )


def _percent(loss: Loss) -> str:
    """Show a loss of perplexity: ``0.2 %``."""
    share = 100 * max(0.0, loss.perplexity)
    if share > 1000:
        return "more than 1000 %"
    if share < 0.05:
        return "less than 0.1 %"
    return ("about " if loss.estimated else "") + (f"{share:.1f} %" if share < 9.95 else f"{share:.0f} %")
