"""Statistics about a request's text, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.engine.exactness import EXACT, NEAR_TIES
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.json_file import parse_json, read_json

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.decoding.stats import Stats
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result
    from edgespec.engine.stream import Stream


def at_terminal() -> bool:
    """Whether a user types here."""
    return sys.stdin is not None and sys.stdin.isatty()


def summary(result: Result) -> str:
    """One line: tokens, speed, whether the text is the same, and the method."""
    from edgespec.drafters.registry import AR

    stats = result.stats
    speed = stats.request_speedup
    if stats.drafted and speed is not None:
        gain = f"{speed:.1f}x plain decoding"
    elif stats.drafted:
        gain = f"{stats.tokens_per_round:.1f} tokens per pass"
    else:
        gain = "nothing was guessed" if result.method_used != AR else "plain decoding"
    parts = [gain, _same(result), f"{stats.tokens} tokens at {stats.tokens_per_second:.1f} per second", _method(result)]
    parts.append(own_sampling_words(result.model_sampling))
    if result.device_lost is not None:
        parts.append(f"device lost: {result.device_lost}")
    if stats.dropped_reason is not None:
        parts.append(f"drafter dropped: {stats.dropped_reason}")
    return ", ".join(filter(None, parts))


def own_sampling_words(found: Mapping[str, float]) -> str:
    """List the model's sampling settings that were used; empty without any."""
    if not found:
        return ""
    return f"sampling as the model asks: {', '.join(f'{name} {value:g}' for name, value in found.items())}"


def _same(result: Result) -> str:
    """Relation of the text to plain decoding's."""
    if result.unverified:
        return f"UNVERIFIED: {'; '.join(result.unverified)}"
    if not result.lossless:
        return "lossy as asked for"
    if not result.stats.drafted:
        return ""
    if result.exact:
        return "same text"
    return NEAR_TIES if result.stats.exact else "lossless"  # sampled by another rule


def _ties(result: Result) -> str:
    """Why a text is not exact although its method is."""
    return f", {NEAR_TIES}" if result.exact is False and result.lossless and result.stats.exact else ""


def _method(result: Result) -> str:
    """Name the method that decoded, and whether it was chosen automatically."""
    return f"auto: {result.method_used}" if result.method_requested in (None, "auto") else result.method_used


def result_lines(result: Result) -> list[str]:
    """List the statements of a result, and ``stats_lines``."""
    return [
        f"result       {summary(result)}",
        f"method       {_method(result)}: {result.reason}",
        f"text         lossless: {_yes(result.lossless)}, {EXACT}: {_yes(result.exact)}{_ties(result)}",
        *(f"unverified   {reason}" for reason in result.unverified),
        *(f"details      {said}" for said in result.details),
        *stats_lines(result.stats),
    ]


def stats_lines(stats: Stats) -> list[str]:
    """List a line for each thing that was watched."""
    lines = [
        f"prompt       {stats.prompt_tokens} tokens, {stats.reused_tokens} of them still in the cache",
        f"rounds       {stats.rounds}, {stats.tokens_per_round:.2f} tokens each: "
        f"{stats.drafted_rounds} drafted, {stats.probes} of them probes; "
        f"{stats.plain_rounds} plain",
        f"acceptance   {_percent(stats.acceptance_rate) if stats.drafted else 'nothing was drafted'}"
        + (f", {stats.accepted} of {stats.drafted} guesses" if stats.drafted else "")
        + (f"; by position {' '.join(f'{rate:.2f}' for rate in stats.acceptance_at)}" if stats.drafted else ""),
        f"recent       {_recent(stats)}",
        f"speed        {_speed(stats)}",
        f"work         {stats.work_per_token:.2f} rows of the target per token, drafts included (plain decoding: 1)",
        f"control      fell back {_times(stats.fallbacks)}, came back {_times(stats.recoveries)}",
        *(f"switched     round {at['round']}: {at['from']} to {at['to']}, {at['why']}" for at in stats.switches),
        *(f"dropped      {at['method']} failed in {at['where']}: {at['error']}" for at in stats.drops),
        f"time         setup {stats.setup_ms:.0f} ms, prefill {stats.prefill_ms:.0f}, drafts {stats.draft_ms:.0f}, "
        f"passes {stats.verify_ms:.0f}, other {stats.other_ms:.0f}",
    ]
    if stats.shadow_every:
        first = ""
        if stats.shadow_first is not None:
            at, expected, got = stats.shadow_first
            first = f"; first other token at {at}: {got}, plain decoding {expected}"
        lines.append(
            f"shadow       {stats.shadow_agreeing} of {stats.shadow_checked} tokens are plain decoding's, "
            f"every {stats.shadow_every} rounds{first}"
        )
    return lines


def _recent(stats: Stats) -> str:
    from edgespec.decoding.stats import WINDOW

    parts = [
        f"{method} {found['rounds']:.0f} rounds, {found['tokens_per_round']:.2f} tokens each"
        + ("" if method == "plain" else f", accepted {_percent(found['acceptance_rate'])}")
        for method, found in stats.recently().items()
    ]
    return f"(last {WINDOW} rounds) {'; '.join(parts) or 'none'}"


def _speed(stats: Stats) -> str:
    predicted, measured = stats.predicted_speedup, stats.measured_speedup
    if predicted is None or measured is None:
        return "no rounds to compare with a plain step"
    return f"drafted rounds: predicted {predicted:.2f}x, measured {measured:.2f}x a plain step's"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


CUT = 3  # exit code: a text that a grammar binds ended before it was complete


def drain(stream: Stream) -> None:
    """Let a request run to its end; Ctrl-C ends it."""
    try:
        for _ in stream:
            pass
    except KeyboardInterrupt:
        stream.close()


def conclude(engine: Engine, result: Result, settings: Settings, stats: bool, chatting: bool = False) -> None:
    """One line about a result, or all of it, and whether its text was cut."""
    for line in result_lines(result) if stats else [summary(result)]:
        click.echo(line, err=True)
    if (notice := cut(engine, result, settings, chatting)) is not None:
        click.echo(notice, err=True)


def cut(engine: Engine, result: Result, settings: Settings, chatting: bool = False) -> str | None:
    """Explain why a text was cut, and the remedy; None = it was not, or the user stopped it.

    ``chatting``: commands of a chat can be typed.
    """
    longer = "/set max_new_tokens N" if chatting else "--max-new-tokens N"
    memory = result.finish == "length" and engine.ends_by_itself(settings)
    why = {
        "context": f"the context of {engine.context} tokens is full",
        "length": "no more fit the memory" if memory else f"{longer} allows more",
        "stop": "a stop string came",
    }
    if result.finish not in why or (settings.grammar is None and result.finish == "stop"):
        return None
    after = f"cut after {len(result.tokens)} tokens"
    if settings.grammar is None:
        return f"note: {after}: {why[result.finish]}"
    return f"warning: {after}, before the grammar was complete: {why[result.finish]}; exit code {CUT}"


def end(engine: Engine, result: Result, settings: Settings, told: bool = True) -> None:
    """Exit with a code if the text is incomplete: 130 after Ctrl-C, ``CUT`` where a grammar was not completed.

    Args:
        engine: where it ran.
        result: its result.
        settings: as asked for.
        told: whether ``conclude`` has said it.
    """
    if result.finish == "cancelled":
        sys.exit(130)
    if settings.grammar is not None and (notice := cut(engine, result, settings)) is not None:
        if not told:
            click.echo(notice, err=True)
        sys.exit(CUT)


def template_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a template from KEY=VALUE; a value is JSON (``false``, ``3``), else text.

    Raises:
        InvalidRequest: without a key or a value.
    """
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidRequest(f"--template-option {item!r}: expected KEY=VALUE", "as in enable_thinking=false")
        found[key] = template_value(value)
    return found


def template_value(text: str) -> Any:
    """Read a value: JSON (``false``, ``3``), else text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def read_tools(file: Path | None) -> list[dict[str, Any]] | None:
    """Functions that the model may call, from a JSON file: a list of JSON schemas; None = none.

    Raises:
        InvalidRequest: no such file, or something else in it.
    """
    if file is None:
        return None
    hint = 'give a list such as [{"type": "function", "function": {"name": ..., "parameters": ...}}]'
    tools = read_json(file, InvalidRequest, hint)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"{file}: expected a list of JSON schemas", hint)
    return tools
