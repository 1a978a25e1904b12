"""``edgespec run --chat``: questions from a terminal, the command line or a pipe, and what the template gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.answer import conclude, show
from edgespec.cli.terminal import read_line
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.json_file import parse_json, read_json

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result

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
        if word.startswith("/") and len(word.split()) == 1:
            if word == "/exit":
                return
            if word == "/reset":
                conversation.messages = list(first)
            elif word != "/help":
                click.echo(f"no command {word}", err=True)
            for name, what in COMMANDS.items() if word != "/reset" else ():
                click.echo(f"  {name:<8}{what}", err=True)
            continue
        try:
            ask(engine, conversation, question, settings, show_drafts, show_stats)
        except EdgespecError as error:
            click.echo(f"error: {error}", err=True)  # what was said so far stays


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
