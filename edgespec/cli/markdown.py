"""A stream of text shown at a terminal: as it is, with guesses in color, or with its Markdown rendered."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Chunk
    from edgespec.engine.stream import Stream

# characters that a terminal obeys, except ends of lines and tabs, and those that reverse letters
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def cleaned(text: str) -> str:
    """Replace the characters of a text that a terminal would obey, such as those that begin an escape sequence."""
    return _CONTROL.sub("\ufffd", text.replace("\r", ""))


def harmless(text: str) -> str:
    """Clean generated text where stdout is a terminal; elsewhere it stays as it is."""
    return cleaned(text) if sys.stdout.isatty() else text


def show(engine: Engine, stream: Stream, drafts: bool, markdown: bool = False) -> None:
    """Write a text to stdout as it comes, and a line end; Ctrl-C ends it.

    Args:
        engine: where it is decoded.
        stream: the request.
        drafts: show guesses in color.
        markdown: render Markdown where stdout is a terminal and no guesses are shown.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    # without colors a rejected guess would look like the text
    in_color = drafts and console.color_system is not None and not console.no_color
    if drafts and not in_color:
        click.echo("note: no colors here, so guesses are not shown", err=True)
    try:
        if markdown and not drafts and console.is_terminal and not console.is_dumb_terminal:
            with MarkdownStream(Console(highlight=False)) as blocks:
                for chunk in stream:
                    blocks.feed(harmless(chunk.text))
            return
        for chunk in stream:
            if in_color and chunk.round is not None:
                console.print(colored(engine, stream, chunk), end="")
            else:
                click.echo(harmless(chunk.text), nl=False, color=True)  # else click changes it in a pipe
    except KeyboardInterrupt:
        stream.close()
    click.echo()


def colored(engine: Engine, stream: Stream, chunk: Chunk) -> Text:
    """Color a round's piece: accepted guesses green, then rejected ones red, then the target's token."""
    from rich.text import Text

    item = chunk.round
    assert item is not None
    accepted, own = chunk.pieces[: item.accepted], chunk.pieces[item.accepted :]
    line = Text().append(harmless("".join(accepted)), "green")
    if item.rejected and len(chunk.pieces) == len(item.tokens):  # a stop string may have cut the round
        before = stream.tokens[: -len(item.tokens) + item.accepted or None]
        line.append(harmless(engine.codec.continuation(before, item.rejected)), "red strike")
    line.append(harmless("".join(own)))
    return line


def split_blocks(text: str) -> tuple[list[str], str]:
    """Part a text into blocks of Markdown that are complete, and the rest.

    A block ends at a blank line, or where a fence of code is closed.
    """
    blocks: list[str] = []
    lines: list[str] = []
    fence = ""
    whole, _, unfinished = text.rpartition("\n")
    for line in whole.split("\n") if whole or text.startswith("\n") else []:
        found = _FENCE.match(line)
        if fence:
            lines.append(line)
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                blocks.append("\n".join(lines))
                lines, fence = [], ""
            continue
        if found:
            if lines:
                blocks.append("\n".join(lines))
            lines, fence = [line], found[1]
        elif line.strip():
            lines.append(line)
        elif lines:
            blocks.append("\n".join(lines))
            lines = []
    return blocks, "\n".join([*lines, unfinished]) if lines else unfinished


class MarkdownStream:
    """Render a text as it comes: blocks that are complete as Markdown, the last one as it was written so far.

    Args:
        console: of a terminal.
    """

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console, self._rest, self._first = console, "", True
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        rest, self._rest = self._rest, ""
        self._show("")
        self._live.stop()
        if rest.strip():
            self._print(rest)

    def feed(self, text: str) -> None:
        """Take the next piece."""
        blocks, self._rest = split_blocks(self._rest + text)
        for block in blocks:
            self._show("")
            self._print(block)
        self._show("\n".join(self._rest.split("\n")[-max(1, self._console.height - 2) :]))

    def _show(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text), refresh=True)

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        if not self._first:
            self._console.print()
        self._first = False
        if not _FENCE.match(block):
            block = block.replace("\n", "  \n")  # lines stay lines: a model breaks them where it means to
        self._console.print(Markdown(block))
