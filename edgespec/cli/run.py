"""``edgespec run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.chat import read_tools, template_options
from edgespec.cli.common import decode_options, emit_json, json_option, load_options, make_settings, open_engine
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.text import Text

    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.request import Stream
    from edgespec.engine.result import Chunk, Result


@click.command("run")
@load_options
@click.option("--prompt", help="The text to continue; - reads it from stdin.")
@click.option("--chat", is_flag=True, help="A conversation through the model's own chat template.")
@click.option("--system", help="System message of a chat.")
@click.option("--tools", type=click.Path(path_type=Path), help="JSON file: functions that a chat's model may call.")
@click.option(
    "--template-option",
    "template",
    multiple=True,
    metavar="KEY=VALUE",
    help="For a chat's template, as in enable_thinking=false; may be repeated.",
)
@click.option(
    "--method",
    help="A method of the bundle, chain, or auto: whichever is predicted to be faster, changed where it does not pay.  "
    "[default: auto]",
)
@decode_options
@click.option("--show-drafts", is_flag=True, help="Accepted guesses green, rejected ones red, as they happen.")
@click.option("--stats", "show_stats", is_flag=True, help="What was watched: acceptance, speed, work, fall-backs.")
@click.option(
    "--shadow",
    type=click.IntRange(min=0),
    help="Compare one round in N with plain decoding; 0 = none.  [default: 16 where acceptance is lossy, else 0]",
)
@json_option
def command(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    tools: Path | None,
    template: tuple[str, ...],
    method: str | None,
    show_drafts: bool,
    show_stats: bool,
    shadow: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from a bundle; it streams to stdout, a summary goes to stderr.

    \b
    edgespec run demo --prompt "ROMEO:"
    edgespec run demo --prompt "ROMEO:" --method self-spec --show-drafts
    edgespec run demo --prompt "ROMEO:" --method chain --proposers ngram,self-spec
    edgespec run demo --prompt "def f(" --method swift --stream-kind code
    echo "Summarise: ..." | edgespec run demo --prompt - --json
    edgespec run demo --prompt "ROMEO:" --method ngram --ngram-store my-texts.store
    edgespec run my-chat-model --chat --template-option enable_thinking=false
    """
    if chat == (prompt is not None):
        raise click.UsageError("give either --prompt TEXT or --chat")
    if chat and as_json:
        raise click.UsageError("--chat is interactive and has no --json")
    for name, given in (("--system", system), ("--tools", tools), ("--template-option", template or None)):
        if given is not None and not chat:
            raise click.UsageError(f"{name} belongs to --chat")
    settings = make_settings(method, options).changed(shadow=shadow)
    if sys.stdin is None and (chat or prompt == "-"):
        raise InvalidRequest("stdin is closed, but the prompt is to be read from it", "give it with --prompt TEXT")
    how: dict[str, Any] = {"tools": read_tools(tools), "template_options": template_options(template)}
    text = _read_stdin() if prompt == "-" else prompt
    engine = open_engine(bundle, options)
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        _converse(engine, engine.conversation(messages, settings, **how), show_drafts, show_stats)
        return
    stream = engine.stream(text or "", settings)
    if as_json:
        _drain(stream)
        emit_json({"bundle": str(bundle), "prompt": text} | stream.result.as_dict())
        return
    click.echo(text, nl=False)
    _print(engine, stream, show_drafts)
    click.echo(summary(stream.result), err=True)
    if show_stats:
        _print_stats(stream.result)


def _print_stats(result: Result) -> None:
    from edgespec.cli.stats import stats_lines

    for line in stats_lines(result.stats):
        click.echo(line, err=True)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not {error.encoding} text: {error.reason}", "convert it to UTF-8") from error


def summary(result: Result) -> str:
    """One line about a result."""
    stats = result.stats
    return (
        f"[{_method(result)}] {stats.tokens} tokens, {stats.tokens_per_round:.2f} a round, "
        f"{stats.tokens_per_second:.1f} tokens/s; accepted {stats.accepted} of {stats.drafted} guesses; "
        f"lossless: {_yes(result.lossless)}, exact: {_yes(result.exact)}; {result.reason}"
    )


def _method(result: Result) -> str:
    """The method that decoded, and whether it was chosen here."""
    return f"auto: {result.method_used}" if result.method_requested in (None, "auto") else result.method_used


def _yes(value: bool) -> str:
    return "yes" if value else "no"


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


def _converse(engine: Engine, conversation: Conversation, show_drafts: bool, show_stats: bool) -> None:
    # no template: say so before the first question
    hello = [*conversation.messages, {"role": "user", "content": "hello"}]
    engine.codec.chat(hello, conversation.tools, options=conversation.options)
    while True:
        try:
            question = click.prompt("you", prompt_suffix="> ", err=True)
        except click.Abort:
            click.echo(err=True)
            return
        stream = conversation.stream(question)
        _print(engine, stream, show_drafts)
        result = stream.result
        conversation.take(result)
        click.echo(
            f"{summary(result)}; {result.stats.reused_tokens} of {result.stats.prompt_tokens} prompt tokens reused",
            err=True,
        )
        if show_stats:
            _print_stats(result)
