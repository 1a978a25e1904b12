"""``edgespec run``."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.answer import at_terminal, conclude, drain, end, read_tools, template_options
from edgespec.cli.chat import Chat, typing
from edgespec.cli.common import (
    COMMON,
    COUNT,
    OUTPUT,
    PATH,
    GroupedCommand,
    bundle_argument,
    emit_json,
    group,
    json_option,
    make_settings,
    open_engine,
    option,
    request_options,
)
from edgespec.cli.markdown import show
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.request import Stream


@click.command("run", cls=GroupedCommand)
@bundle_argument
@group(
    COMMON,
    option(
        "--prompt",
        "The text to continue, or with --chat a question, which may be repeated; - reads it from stdin.",
        dest="prompts",
        multiple=True,
    ),
    option("--chat", "Ask through the model's own chat template: --prompt, what is piped in, or what you type.", bool),
    option("--method", "A method of the bundle, chain, or auto, which takes what pays.  [default: auto]"),
)
@group(
    COMMON,
    option(
        "--max-new-tokens",
        "Most tokens to write.  [default: an answer, or a text of a grammar, to its end; else 128]",
        COUNT,
    ),
    option(
        "--session",
        "File that keeps what was computed: found again here, saved at the end.",
        click.Path(path_type=Path, dir_okay=False),
    ),
)
@group(COMMON, option("--show-drafts", "Accepted guesses green, rejected ones red.", bool))
@request_options
@group(
    "Chat",
    option("--system", "System message of a chat."),
    option("--tools", "JSON file: functions that the model may call.", PATH),
    option(
        "--template-option",
        "For the chat template, as in enable_thinking=false; may be repeated.",
        dest="template",
        multiple=True,
        metavar="KEY=VALUE",
    ),
)
@group(OUTPUT, option("--stats", "All of it: method, acceptance, speed, work.", bool, dest="show_stats"))
@json_option
def command(
    bundle: Path,
    prompts: tuple[str, ...],
    chat: bool,
    method: str | None,
    session: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from a bundle; it streams to stdout, one line about it goes to stderr.

    A terminal shows the prompt before the text; a pipe gets the text alone, as does a text that a grammar binds.  A
    text that a grammar binds and that was cut exits with 3.  In a chat at a terminal, /reset forgets what was said,
    /help names the commands, and /exit ends it.

    \b
    edgespec run demo --prompt "ROMEO:"
    edgespec run demo --prompt "ROMEO:" --method self-spec --show-drafts
    edgespec run demo --prompt "ROMEO:" --method chain --set proposers=ngram,self-spec
    edgespec run demo --prompt "def f(" --method swift --set kind=code
    echo "Summarise: ..." | edgespec run demo --prompt - --json
    edgespec run demo --prompt "ROMEO:" --method ngram --ngram-store my-texts.store
    edgespec run my-chat-model --chat --template-option enable_thinking=false
    edgespec run my-chat-model --chat --session talk.session
    edgespec run my-chat-model --chat --prompt "What is a bundle?"
    echo "What is a bundle?" | edgespec run my-chat-model --chat
    """
    if not chat and not prompts:
        raise click.UsageError("give --prompt TEXT, --chat, or both")
    if len(prompts) > 1 and not chat:
        raise click.UsageError("several --prompt belong to --chat, which asks them in turn")
    typed = chat and not prompts and at_terminal()
    if as_json and (typed or len(prompts) > 1):
        raise click.UsageError("--json prints one answer: give one --prompt TEXT, or pipe the question in")
    system, show_drafts, show_stats = (options[name] for name in ("system", "show_drafts", "show_stats"))
    for name, given in (
        ("--system", system), ("--tools", options["tools"]), ("--template-option", options["template"] or None),
    ):  # fmt: skip
        if given is not None and not chat:
            raise click.UsageError(f"{name} belongs to --chat")
    make_settings(method, options)  # what cannot be is refused before anything is loaded
    texts = [] if typed else [_read_stdin() if text == "-" else text for text in prompts or "-"]
    how: dict[str, Any] = {
        "tools": read_tools(options["tools"]),
        "template_options": template_options(options["template"]),
    }
    with typing() if typed else nullcontext():
        engine = open_engine(bundle, options)
        settings = make_settings(method, options, engine.defaults)
        kept = engine.restore_session(session) if session is not None and session.exists() else []
        if not chat:
            _complete(engine, texts[0], settings, session, bundle, show_drafts, show_stats, as_json)
            return
        first = [{"role": "system", "content": system}] if system else []
        if kept and first and kept[:1] != first:
            raise InvalidRequest(f"{session}: begun with another --system", "leave it out, or name another file")
        conversation = engine.conversation(kept or first, settings, **how)
        # no template: say so before the first question
        hello = [*conversation.messages, {"role": "user", "content": "hello"}]
        engine.codec.chat(hello, conversation.tools, options=conversation.options)
        shown = {name for name, on in (("drafts", show_drafts), ("stats", show_stats), ("markdown", typed)) if on}
        talk = Chat(engine, conversation, settings, shown)
        try:
            if typed:
                talk.talk()
            elif as_json:
                _answer_json(engine, conversation, texts[0], settings, bundle)
            else:
                for text in texts:
                    end(engine, talk.ask(_question(text)), settings)
        finally:
            if session is not None:
                conversation.save(session)


def _complete(
    engine: Engine,
    text: str,
    settings: Settings,
    session: Path | None,
    bundle: Path,
    show_drafts: bool,
    show_stats: bool,
    as_json: bool,
) -> None:
    """Go on with a text as it is."""
    stream = engine.stream(text, settings)
    if as_json:
        drain(stream)
        _keep(engine, stream, session)
        emit_json({"bundle": str(bundle), "prompt": text} | stream.result.as_dict())
        end(engine, stream.result, settings, told=False)
        return
    if engine.codec.chat_template is not None:
        click.echo(f"this is a chat model; to talk to it: edgespec run {shlex.quote(str(bundle))} --chat", err=True)
    if sys.stdout.isatty() and settings.grammar is None:
        click.echo(text, nl=False)
    show(engine, stream, show_drafts)
    _keep(engine, stream, session)
    conclude(engine, stream.result, settings, show_stats)
    end(engine, stream.result, settings)


def _answer_json(engine: Engine, conversation: Conversation, text: str, settings: Settings, bundle: Path) -> None:
    """Answer one question with one JSON object."""
    question = _question(text)
    stream = conversation.stream(question)
    drain(stream)
    conversation.take(stream.result)
    emit_json({"bundle": str(bundle), "prompt": question} | stream.result.as_dict())
    end(engine, stream.result, settings, told=False)


def _question(text: str) -> str:
    """Strip a question of the line end that `echo` puts behind it."""
    if not text.strip():
        raise InvalidRequest("the question is empty", "give it with --prompt TEXT, or pipe it in")
    return text.rstrip("\r\n")


def _keep(engine: Engine, stream: Stream, session: Path | None) -> None:
    """Save what was computed of a request."""
    if session is not None:
        engine.save_session(session, stream.tokens)


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InvalidRequest("stdin is closed, but the prompt is to be read from it", "give it with --prompt TEXT")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"stdin is not {error.encoding} text: {error.reason}", "convert it to UTF-8") from error
