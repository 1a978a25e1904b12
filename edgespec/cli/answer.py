"""A request's text and a chat at a terminal or in a pipe, what is said of it, and the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.decoding.stats import WINDOW, Stats
from edgespec.drafters.registry import AR
from edgespec.engine.result import Result
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.json_file import parse_json, read_json

if TYPE_CHECKING:
    from rich.text import Text

    from edgespec.decoding.settings import Settings
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.request import Stream
    from edgespec.engine.result import Chunk, Result


LINE = 4095  # bytes of a line in Linux's own line mode (N_TTY_BUF_SIZE - 1)


def at_terminal() -> bool:
    """Whether somebody types here."""
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def typing() -> Iterator[None]:
    """While this lasts, keys that nobody has asked for yet wait for the next ``read_line``, however many they are."""
    if not _edited():
        yield
        return
    import termios

    file = sys.stdin.fileno()
    before, now = termios.tcgetattr(file), termios.tcgetattr(file)
    now[3] &= ~termios.ICANON  # not ECHO: readline shows no keys where it finds that off
    termios.tcsetattr(file, termios.TCSANOW, now)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


def read_line(prompt: str) -> str:
    """Ask at the terminal, wherever stdout goes, and read a line; lines that are pasted together are one text.

    Raises:
        EOFError: Ctrl-D.
        InvalidRequest: the terminal may have cut the line, or its bytes are no text.
        KeyboardInterrupt: Ctrl-C.
    """
    edited = _edited()
    try:
        with _stdout_at_the_terminal():
            line = input(prompt)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"that line is no {error.encoding} text: {error.reason}") from error
    if not edited and sys.platform == "linux" and len(line.encode("utf-8", "surrogateescape")) >= LINE:
        raise InvalidRequest(
            f"a terminal without an editor of lines keeps {LINE} bytes of a line, and that one may have been cut",
            "pipe the text in, or use a Python that was built with readline",
        )
    return line


def _edited() -> bool:
    """Whether ``input`` reads keys and edits the line itself."""
    try:
        import readline
        import termios
    except ImportError:  # Windows, whose console cuts nothing, or a Python without either
        return False
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return bool(termios) and os.isatty(0) and sys.stdin.fileno() == 0


@contextmanager
def _stdout_at_the_terminal() -> Iterator[None]:
    """Lend ``input`` the terminal where stdout is a file or a pipe: it edits no line otherwise."""
    name = None
    with suppress(OSError, AttributeError):
        name = None if sys.stdout.isatty() else os.ttyname(0)
    if name is None:
        yield
        return
    sys.stdout.flush()
    kept, terminal = os.dup(1), os.open(name, os.O_WRONLY)
    os.dup2(terminal, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(terminal)


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
    """Name the method that decoded, and say whether it was chosen here."""
    return f"auto: {result.method_used}" if result.method_requested in (None, "auto") else result.method_used


def result_lines(result: Result) -> list[str]:
    """List what a result says of itself, and ``stats_lines``."""
    return [
        f"result       {summary(result)}",
        f"method       {_method(result)}: {result.reason}",
        f"text         lossless: {_yes(result.lossless)}, exact: {_yes(result.exact)}",
        *(f"unproven     {reason}" for reason in result.unproven),
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
        f"of late      {_of_late(stats)}",
        f"speed        {_speed(stats)}",
        f"work         {stats.work_per_token:.2f} rows of the target per token, drafts included (plain decoding: 1)",
        f"control      fell back {_times(stats.fallbacks)}, came back {_times(stats.recoveries)}",
        *(f"switched     round {at['round']}: {at['from']} to {at['to']}, {at['why']}" for at in stats.switches),
        *(f"dropped      {at['method']} failed in {at['where']}: {at['error']}" for at in stats.drops),
        f"time         prefill {stats.prefill_ms:.0f} ms, drafts {stats.draft_ms:.0f}, passes {stats.verify_ms:.0f}, "
        f"other {stats.other_ms:.0f}",
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


def _of_late(stats: Stats) -> str:
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
    """Colour a round's piece: accepted guesses green, then refused guesses in red, then the target's own token."""
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
    for line in result_lines(result) if stats else [summary(result)]:
        click.echo(line, err=True)
    if (notice := cut(engine, result, settings)) is not None:
        click.echo(notice, err=True)


def cut(engine: Engine, result: Result, settings: Settings) -> str | None:
    """Say what cut a text short, and what to do; None = it came to its own end, or somebody stopped it."""
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


COMMANDS = {
    "/help": "show these commands",
    "/reset": "forget what was said; the system message stays",
    "/exit": "end the chat; Ctrl-D does as well, and Ctrl-C twice",
}


def template_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of a template from KEY=VALUE; a value is JSON (``false``, ``3``), and text where it is no JSON.

    Raises:
        InvalidRequest: without a key or a value.
    """
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidRequest(f"--template-option {item!r}: expected KEY=VALUE", "as in enable_thinking=false")
        try:
            found[key] = parse_json(value)
        except ValueError:
            found[key] = value
    return found


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


def converse(
    engine: Engine, conversation: Conversation, settings: Settings, show_drafts: bool, show_stats: bool
) -> None:
    """Answer what is typed until the chat is ended."""
    first = [message for message in conversation.messages[:1] if message.get("role") == "system"]
    click.echo("/help shows the commands of the chat", err=True)
    pressed = False  # Ctrl-C, and nothing since
    while True:
        try:
            question = read_line("you> ")
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            if pressed:
                return
            pressed = True
            click.echo("Ctrl-C again, Ctrl-D or /exit ends the chat", err=True)
            continue
        except InvalidRequest as error:
            click.echo(f"error: {error}", err=True)
            continue
        pressed = False
        if not (word := question.strip()):
            continue
        if word == "/exit":
            return
        if word == "/reset":
            conversation.messages = list(first)
            continue
        if word.startswith("/") and len(word.split()) == 1:
            _show_commands(word)
            continue
        try:
            ask(engine, conversation, question, settings, show_drafts, show_stats)
        except EdgespecError as error:
            click.echo(f"error: {error}", err=True)  # what was said so far stays


def _show_commands(word: str) -> None:
    """List the commands of a chat, after a word that asks for them or is none."""
    if word != "/help":
        click.echo(f"no command {word}", err=True)
    for name, what in COMMANDS.items():
        click.echo(f"  {name:<8}{what}", err=True)


def ask(
    engine: Engine, conversation: Conversation, question: str, settings: Settings, show_drafts: bool, show_stats: bool
) -> Result:
    """Ask one question, and show the answer and what is said of it.

    Raises:
        InvalidRequest: the template refuses it, or it has no room.
    """
    before = conversation.left_out
    stream = conversation.stream(question)
    if conversation.left_out > before:
        click.echo(f"the context is full: the oldest {conversation.left_out} messages are not seen now", err=True)
    show(engine, stream, show_drafts)
    conversation.take(stream.result)
    conclude(engine, stream.result, settings, show_stats)
    return stream.result
