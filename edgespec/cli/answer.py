"""A request's text on a screen or in a pipe, what is said of it, and the exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.text import Text

    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.engine.request import Stream
    from edgespec.engine.result import Chunk, Result

CUT = 3  # exit code: a text that a grammar binds ended before it was complete


def drain(stream: Stream) -> None:
    """Let a request run to its end; Ctrl-C ends it."""
    try:
        for _ in stream:
            pass
    except KeyboardInterrupt:
        stream.close()


def show(engine: Engine, stream: Stream, drafts: bool) -> None:
    """Write a text to stdout as it comes, and a line end; Ctrl-C ends it."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    # without colours nothing would tell a refused guess from the text
    in_colour = drafts and console.color_system is not None and not console.no_color
    if drafts and not in_colour:
        click.echo("note: no colours here, so guesses are not shown", err=True)
    try:
        for chunk in stream:
            if in_colour and chunk.round is not None:
                console.print(coloured(engine, stream, chunk), end="")
            else:
                click.echo(chunk.text, nl=False)
    except KeyboardInterrupt:
        stream.close()
    click.echo()


def coloured(engine: Engine, stream: Stream, chunk: Chunk) -> Text:
    """A round's piece: accepted guesses green, then the guesses the target refused in red, then its own token."""
    from rich.text import Text

    item = chunk.round
    assert item is not None
    accepted, own = chunk.pieces[: item.accepted], chunk.pieces[item.accepted :]
    line = Text().append("".join(accepted), "green")
    if item.rejected and len(chunk.pieces) == len(item.tokens):  # a stop string may have cut the round
        line.append(
            engine.codec.continuation(stream.tokens[: -len(item.tokens) + item.accepted or None], item.rejected),
            "red strike",
        )
    line.append("".join(own))
    return line


def conclude(engine: Engine, result: Result, settings: Settings, stats: bool) -> None:
    """One line about a result, or all of it, and whether its text was cut."""
    from edgespec.cli.stats import result_lines, summary

    for line in result_lines(result) if stats else [summary(result)]:
        click.echo(line, err=True)
    if (notice := cut(engine, result, settings)) is not None:
        click.echo(notice, err=True)


def cut(engine: Engine, result: Result, settings: Settings) -> str | None:
    """What cut a text short, and what to do; None = it came to its own end, or somebody stopped it."""
    memory = result.finish == "length" and engine.ends_by_itself(settings)
    why = {
        "context": f"the context of {engine.context} tokens is full",
        "length": "no more fit the memory" if memory else "--max-new-tokens N allows more",
        "stop": "a stop string came",
    }
    if result.finish not in why or (settings.grammar is None and result.finish == "stop"):
        return None
    after = f"cut after {len(result.tokens)} tokens"
    if settings.grammar is None:
        return f"note: {after}: {why[result.finish]}"
    return f"warning: {after}, before the grammar was complete: {why[result.finish]}; exit code {CUT}"


def end(engine: Engine, result: Result, settings: Settings, told: bool = True) -> None:
    """Exit with what says that the text is not all: 130 after Ctrl-C, ``CUT`` where a grammar was not completed.

    Args:
        engine: where it ran.
        result: what it gave.
        settings: as asked for.
        told: whether ``conclude`` has said it.
    """
    if result.finish == "cancelled":
        sys.exit(130)
    if settings.grammar is not None and (notice := cut(engine, result, settings)) is not None:
        if not told:
            click.echo(notice, err=True)
        sys.exit(CUT)
