"""``edgespec run --stats``: what was counted, for people."""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.decoding.monitor import WINDOW, Monitor
from edgespec.decoding.stats import Stats
from edgespec.drafters.registry import AR
from edgespec.engine.result import Result


def summary(result: Result) -> str:
    """One line: how much, how fast, the same text or not, and by which method."""
    stats = result.stats
    speed = stats.request_speedup
    if stats.drafted and speed is not None:
        gain = f"{speed:.1f}x plain decoding"
    elif stats.drafted:
        gain = f"{stats.tokens_per_round:.1f} tokens a pass"
    else:
        gain = "nothing was guessed" if result.method_used != AR else "plain decoding"
    parts = [gain, _same(result), f"{stats.tokens} tokens at {stats.tokens_per_second:.1f} a second", _method(result)]
    parts.append(own_sampling_words(result.model_sampling))
    if result.device_lost is not None:
        parts.append(f"device lost: {result.device_lost}")
    if stats.dropped_reason is not None:
        parts.append(f"drafter dropped: {stats.dropped_reason}")
    return ", ".join(filter(None, parts))


def own_sampling_words(found: Mapping[str, float]) -> str:
    """Which of the model's own sampling settings decided; nothing where none did."""
    if not found:
        return ""
    return f"sampling as the model asks: {', '.join(f'{name} {value:g}' for name, value in found.items())}"


def _same(result: Result) -> str:
    """How the text stands to plain decoding's."""
    if result.unproven:
        return f"UNPROVEN: {'; '.join(result.unproven)}"
    if not result.lossless:
        return "lossy as asked for"
    if not result.stats.drafted:
        return ""
    return "same text" if result.exact else "lossless"


def _method(result: Result) -> str:
    """The method that decoded, and whether it was chosen here."""
    return f"auto: {result.method_used}" if result.method_requested in (None, "auto") else result.method_used


def result_lines(result: Result) -> list[str]:
    """What a result says of itself, and ``stats_lines``."""
    return [
        f"result       {summary(result)}",
        f"method       {_method(result)}: {result.reason}",
        f"text         lossless: {_yes(result.lossless)}, exact: {_yes(result.exact)}",
        *(f"unproven     {reason}" for reason in result.unproven),
        *stats_lines(result.stats),
    ]


def stats_lines(stats: Stats) -> list[str]:
    """A line for each thing that was watched."""
    monitor, control = stats.monitor, stats.monitor.control
    lines = [
        f"prompt       {stats.prompt_tokens} tokens, {stats.reused_tokens} of them still in the cache",
        f"rounds       {stats.rounds}, {stats.tokens_per_round:.2f} tokens each: "
        f"{monitor.drafted_rounds} drafted, {control.probes} of them probes; "
        f"{monitor.plain_rounds} plain",
        f"acceptance   {_percent(stats.acceptance_rate) if stats.drafted else 'nothing was drafted'}"
        + (f", {stats.accepted} of {stats.drafted} guesses" if stats.drafted else "")
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


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
