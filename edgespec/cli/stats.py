"""``edgespec run --stats``: what was counted, for people."""

from __future__ import annotations

from edgespec.decoding.monitor import WINDOW, Monitor
from edgespec.decoding.stats import Stats


def stats_lines(stats: Stats) -> list[str]:
    """A line for each thing that was watched."""
    monitor, control = stats.monitor, stats.monitor.control
    lines = [
        f"rounds       {stats.rounds}: {monitor.drafted_rounds} drafted, {control.probes} of them probes; "
        f"{monitor.plain_rounds} plain",
        f"acceptance   {_percent(stats.acceptance_rate) if stats.drafted else 'nothing was drafted'}"
        + (f"; by position {' '.join(f'{rate:.2f}' for rate in stats.acceptance_at)}" if stats.drafted else ""),
        f"of late      {_of_late(monitor)}",
        f"speed        {_speed(monitor)}",
        f"work         {monitor.work_per_token:.2f} rows of the target per token, drafts included (plain decoding: 1)",
        f"control      fell back {_times(control.fallbacks)}, came back {_times(control.recoveries)}",
        *(f"switched     {switch}" for switch in control.switches),
        *(f"dropped      {drop}" for drop in monitor.drops),
        f"time         prefill {stats.prefill_ms:.0f} ms, drafts {stats.draft_ms:.0f}, passes {stats.verify_ms:.0f}, "
        f"other {stats.other_ms:.0f}",
    ]
    shadow = monitor.shadow
    if shadow.every:
        first = ""
        if shadow.first is not None:
            at, expected, got = shadow.first
            first = f"; first other token at {at}: {got}, plain decoding {expected}"
        lines.append(
            f"shadow       {shadow.agreeing} of {shadow.checked} tokens are plain decoding's, every {shadow.every} "
            f"rounds{first}"
        )
    return lines


def _of_late(monitor: Monitor) -> str:
    parts = [
        f"{method} {found['rounds']:.0f} rounds, {found['tokens_per_round']:.2f} tokens each"
        + ("" if method == "plain" else f", accepted {_percent(found['acceptance_rate'])}")
        for method, found in monitor.of_late().items()
    ]
    return f"(last {WINDOW} rounds) {'; '.join(parts) or 'none'}"


def _speed(monitor: Monitor) -> str:
    predicted, measured = monitor.predicted_speedup, monitor.measured_speedup
    if predicted is None or measured is None:
        return "no rounds to compare with a plain step"
    return f"drafted rounds: predicted {predicted:.2f}x, measured {measured:.2f}x a plain step's"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
