"""Tools of local MCP servers in a chat: each call is asked for first.

The servers are programs of this machine, started here and spoken to over their stdin and stdout by the Python SDK of
the Model Context Protocol (modelcontextprotocol.io).
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.markdown import cleaned, harmless
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.json_file import read_json

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client

    from edgespec.engine.conversation import Conversation
    from edgespec.engine.stream import Stream
    from edgespec.runtimes.text.call_formats import AnswerShape
    from edgespec.runtimes.text.codec import TextCodec

CALL_SECONDS = 120.0  # that a server may take
HINT = "give the command of a local server, or a JSON file with mcpServers as other clients have"


@dataclass(frozen=True)
class Call:
    """A call that the model has written: an id, the tool's name, and its arguments as JSON."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """For the model's template, which wants the arguments as an object."""
        return {
            "id": self.id, "type": "function", "function": {"name": self.name, "arguments": json.loads(self.arguments)}
        }  # fmt: skip


@dataclass
class Tools:
    """Tools that may be called, by name."""

    schemas: list[dict[str, Any]]  # JSON schemas of functions, as templates take them
    run: Callable[[str, dict[str, Any]], str]  # calls a tool: name and arguments -> its output
    allowed: set[str]  # tools that the user has already allowed
    ask: Callable[[str], str] = input  # asks the user a question, and gives what is typed

    def answer(self, call: Call) -> str:
        """Call a tool if the user allows it -> the result for the model.

        Raises:
            KeyboardInterrupt: Ctrl-C, also where it is asked for.
        """
        if call.name not in {schema["function"]["name"] for schema in self.schemas}:
            return f"There is no tool {call.name}."
        click.echo(f"call: {call.name} {call.arguments}", err=True)
        if call.name not in self.allowed:
            try:
                word = self.ask("run it? [y]es, [n]o, [a]lways this tool: ").strip().lower()[:1]
            except click.Abort:  # of click.prompt, for Ctrl-C and Ctrl-D
                raise KeyboardInterrupt from None
            if word == "a":
                self.allowed.add(call.name)
            elif word != "y":
                return "The user does not allow this call."
        try:
            said = self.run(call.name, json.loads(call.arguments))
        except Exception as error:  # any kind, of the SDK or the server
            said = f"The call failed: {error}"
        click.echo(f"it says: {cleaned(said[:500])}{'...' if len(said) > 500 else ''}", err=True)
        return said


@contextmanager
def mcp_tools(given: Sequence[str]) -> Iterator[Tools | None]:
    """Start MCP servers, and stop them at the end; None where there are none.

    Args:
        given: a command each, or JSON files with ``mcpServers``.

    Raises:
        InvalidRequest: a server that cannot be started, or has no tools.
    """
    if not given:
        yield None
        return
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, StdioServerParameters

    # output outside of the protocol is skipped; the SDK would show a traceback for each line
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
    failure: BaseException | None = None
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        try:
            schemas: list[dict[str, Any]] = []
            owners: dict[str, tuple[Client, str]] = {}
            for name, command in _commands(given).items():
                click.echo(f"{name}: started, its tools are asked for", err=True)
                client = Client(StdioServerParameters(**command), read_timeout_seconds=CALL_SECONDS)
                try:
                    stack.enter_context(portal.wrap_async_context_manager(client))
                    found = portal.call(client.list_tools).tools
                except Exception as error:  # any kind, of the SDK
                    raise InvalidRequest(f"--mcp: {name} is no MCP server that works: {_cause(error)}", HINT) from error
                for tool in found:
                    known = tool.name if tool.name not in owners else f"{name}_{tool.name}"
                    owners[known] = client, tool.name
                    schema = tool.model_dump(by_alias=True)["inputSchema"]
                    function = {"name": known, "description": tool.description or "", "parameters": schema}
                    schemas.append({"type": "function", "function": function})
            yield Tools(schemas, lambda name, arguments: _run(portal, *owners[name], arguments), set())
        except BaseException as error:  # the SDK's task groups would wrap it
            failure = error
    if failure is not None:
        raise failure


def _run(portal: BlockingPortal, client: Client, name: str, arguments: dict[str, Any]) -> str:
    result = portal.call(client.call_tool, name, arguments)
    said = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
    return f"The call failed: {said}" if result.is_error else said


def _cause(error: BaseException) -> str:
    while inner := getattr(error, "exceptions", ()):  # of a group, which Python 3.10 does not have
        error = inner[0]
    return str(error) or type(error).__name__


def _commands(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read what to start, by name: ``command``, ``args``, ``env`` and ``cwd`` of each.

    Raises:
        InvalidRequest: another form, or a server that is not local.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        if not text.endswith(".json"):
            words = shlex.split(text)
            if not words:
                raise InvalidRequest("--mcp: expected a command", HINT)
            found[Path(words[0]).name if words[0] not in found else text] = {"command": words[0], "args": words[1:]}
            continue
        servers = read_json(Path(text), InvalidRequest, HINT)
        servers = servers.get("mcpServers") if isinstance(servers, dict) else None
        if not isinstance(servers, dict) or not servers:
            raise InvalidRequest(f"{text}: expected an object mcpServers", HINT)
        for name, one in servers.items():
            if not isinstance(one, dict) or not isinstance(one.get("command"), str):
                raise InvalidRequest(f"{text}: {name}: expected a command; only local servers are used", HINT)
            found[name] = {key: one[key] for key in ("command", "args", "env", "cwd") if key in one}
    return found


def answer_shape(codec: TextCodec, conversation: Conversation, question: Any) -> AnswerShape:
    """Return the model's notation of calls and thoughts."""
    from edgespec.runtimes.images.prompt import apart
    from edgespec.runtimes.text.call_formats import AnswerShape
    from edgespec.runtimes.text.chat import choose_template

    template = choose_template(codec.templates, conversation.tools)
    asked = [*conversation.messages, *([{"role": "user", "content": question}] if question is not None else [])]
    messages = codec.adapted(apart(asked)[0], conversation.tools)
    prompt = codec.write_chat(messages, conversation.tools, options=conversation.options, nulls=True)
    return AnswerShape.of(template, prompt, conversation.tools or ())


def read_answer(stream: Stream, shape: AnswerShape) -> tuple[str, list[Call]]:
    """Show an answer as it comes, without the notation of its calls; Ctrl-C ends it.

    Returns:
        its text, its thoughts, and its calls.
    """
    from edgespec.runtimes.text.answer import AnswerReader

    reader, text, calls = AnswerReader(shape), "", list[list[str]]()
    dumb = os.environ.get("TERM") == "dumb"

    def take(pieces: Sequence[Any]) -> None:
        nonlocal text
        for piece in pieces:
            if piece.kind == "call":
                calls.append([piece.text, ""])
            elif piece.kind == "arguments":
                calls[-1][1] += piece.text
            elif piece.kind == "text":
                text += piece.text
                click.echo(harmless(piece.text), nl=False)
            elif piece.kind == "reasoning":
                text = harmless(piece.text)
                click.echo(text if dumb else click.style(text, dim=True), nl=False)

    try:
        for chunk in stream:
            take(reader.push(chunk.text))
    except KeyboardInterrupt:
        stream.close()
    cut = reader.calling
    take(reader.finish())
    click.echo()
    whole = calls[:-1] if cut and calls else calls
    return text, [Call(shape.new_call_id(), name, arguments or "{}") for name, arguments in whole]
