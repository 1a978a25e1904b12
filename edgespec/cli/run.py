"""``edgespec run``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.chat import read_tools, template_options
from edgespec.cli.common import (
    bundle_argument,
    drafting_options,
    emit_json,
    grammar_options,
    json_option,
    length_option,
    loading_options,
    make_settings,
    memory_options,
    open_engine,
    sampling_options,
)
from edgespec.cli.groups import COMMON, OUTPUT, GroupedCommand, group
from edgespec.errors import EdgespecError, InvalidRequest

if TYPE_CHECKING:
    from rich.text import Text

    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.request import Stream
    from edgespec.engine.result import Chunk, Result


@click.command("run", cls=GroupedCommand)
@bundle_argument
@group(
    COMMON,
    click.option("--prompt", help="The text to continue; - reads it from stdin."),
    click.option("--chat", is_flag=True, help="A conversation through the model's own chat template."),
    click.option("--method", help="A method of the bundle, chain, or auto, which takes what pays.  [default: auto]"),
)
@length_option
@group(
    COMMON,
    click.option(
        "--session",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File that keeps what was computed: found again here, saved at the end.",
    ),
)
@group(COMMON, click.option("--show-drafts", is_flag=True, help="Accepted guesses green, rejected ones red."))
@memory_options
@sampling_options
@drafting_options
@grammar_options
@loading_options
@group(
    "Chat",
    click.option("--system", help="System message of a chat."),
    click.option("--tools", type=click.Path(path_type=Path), help="JSON file: functions that the model may call."),
    click.option(
        "--template-option",
        "template",
        multiple=True,
        metavar="KEY=VALUE",
        help="For the chat template, as in enable_thinking=false; may be repeated.",
    ),
)
@group(OUTPUT, click.option("--stats", "show_stats", is_flag=True, help="All of it: method, acceptance, speed, work."))
@json_option
def command(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    tools: Path | None,
    template: tuple[str, ...],
    method: str | None,
    session: Path | None,
    show_drafts: bool,
    show_stats: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from a bundle; it streams to stdout, one line about it goes to stderr.

    In a chat, /reset forgets what was said, /help names the commands, and /exit ends it.

    \b
    edgespec run demo --prompt "ROMEO:"
    edgespec run demo --prompt "ROMEO:" --method self-spec --show-drafts
    edgespec run demo --prompt "ROMEO:" --method chain --set proposers=ngram,self-spec
    edgespec run demo --prompt "def f(" --method swift --set kind=code
    echo "Summarise: ..." | edgespec run demo --prompt - --json
    edgespec run demo --prompt "ROMEO:" --method ngram --ngram-store my-texts.store
    edgespec run my-chat-model --chat --template-option enable_thinking=false
    edgespec run my-chat-model --chat --session talk.session
    """
    if chat == (prompt is not None):
        raise click.UsageError("give either --prompt TEXT or --chat")
    if chat and as_json:
        raise click.UsageError("--chat is interactive and has no --json")
    for name, given in (("--system", system), ("--tools", tools), ("--template-option", template or None)):
        if given is not None and not chat:
            raise click.UsageError(f"{name} belongs to --chat")
    settings = make_settings(method, options)
    if sys.stdin is None and (chat or prompt == "-"):
        raise InvalidRequest("stdin is closed, but the prompt is to be read from it", "give it with --prompt TEXT")
    how: dict[str, Any] = {"tools": read_tools(tools), "template_options": template_options(template)}
    text = _read_stdin() if prompt == "-" else prompt
    engine = open_engine(bundle, options)
    settings = make_settings(method, options, engine.defaults)
    kept = engine.restore_session(session) if session is not None and session.exists() else []
    if chat:
        first = [{"role": "system", "content": system}] if system else []
        if kept and first and kept[:1] != first:
            raise InvalidRequest(f"{session}: begun with another --system", "leave it out, or name another file")
        conversation = engine.conversation(kept or first, settings, **how)
        # no template: say so before the first question
        hello = [*conversation.messages, {"role": "user", "content": "hello"}]
        engine.codec.chat(hello, conversation.tools, options=conversation.options)
        try:
            _converse(engine, conversation, show_drafts, show_stats)
        finally:
            if session is not None:
                conversation.save(session)
        return
    stream = engine.stream(text or "", settings)
    if as_json:
        _drain(stream)
        _keep(engine, stream, session)
        emit_json({"bundle": str(bundle), "prompt": text} | stream.result.as_dict())
        _end(stream.result)
        return
    if engine.codec.chat_template is not None:
        click.echo(f"this is a chat model; to talk to it: edgespec run {shlex.quote(str(bundle))} --chat", err=True)
    click.echo(text, nl=False)
    _print(engine, stream, show_drafts)
    _keep(engine, stream, session)
    _conclude(stream.result, show_stats)
    _end(stream.result)


def _end(result: Result) -> None:
    """After Ctrl-C what was written is shown, and the exit code says that it is not all."""
    if result.finish == "cancelled":
        sys.exit(130)


def _keep(engine: Engine, stream: Stream, session: Path | None) -> None:
    """Save what was computed of a request."""
    if session is not None:
        engine.save_session(session, stream.tokens)


def _conclude(result: Result, show_stats: bool) -> None:
    """One line about a result, or all of it."""
    from edgespec.cli.stats import result_lines, summary

    for line in result_lines(result) if show_stats else [summary(result)]:
        click.echo(line, err=True)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not {error.encoding} text: {error.reason}", "convert it to UTF-8") from error


def _drain(stream: Stream) -> None:
    try:
        for _ in stream:
            pass
    except KeyboardInterrupt:
        stream.close()


def _print(engine: Engine, stream: Stream, show_drafts: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    # without colours nothing would tell a refused guess from the text
    in_colour = show_drafts and console.color_system is not None and not console.no_color
    if show_drafts and not in_colour:
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


CHAT_COMMANDS = {
    "/help": "show these commands",
    "/reset": "forget what was said; the system message stays",
    "/exit": "end the chat; Ctrl-D does as well",
}


def _converse(engine: Engine, conversation: Conversation, show_drafts: bool, show_stats: bool) -> None:
    first = [message for message in conversation.messages[:1] if message.get("role") == "system"]
    click.echo("/help shows the commands of the chat", err=True)
    while True:
        try:
            question = click.prompt("you", prompt_suffix="> ", err=True)
        except click.Abort:
            click.echo(err=True)
            return
        if (word := question.strip()).startswith("/") and " " not in word:
            if word == "/exit":
                return
            if word == "/reset":
                conversation.messages = list(first)
            elif word != "/help":
                click.echo(f"no command {word}", err=True)
            for name, what in CHAT_COMMANDS.items() if word != "/reset" else ():
                click.echo(f"  {name:<8}{what}", err=True)
            continue
        before = conversation.left_out
        try:
            stream = conversation.stream(question)
        except EdgespecError as error:
            if len(conversation.messages) <= len(first):
                raise
            click.echo(f"error: {error}", err=True)  # what was said so far stays
            continue
        if conversation.left_out > before:
            click.echo(f"the context is full: the oldest {conversation.left_out} messages are not seen now", err=True)
        _print(engine, stream, show_drafts)
        conversation.take(stream.result)
        _conclude(stream.result, show_stats)
