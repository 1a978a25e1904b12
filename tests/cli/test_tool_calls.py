"""Tools of MCP servers in a chat: a real server, started and spoken to by the SDK."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from edgespec.cli import chat as chat_module
from edgespec.cli.chat import Chat
from edgespec.cli.tool_calls import Call, Tools, mcp_tools
from edgespec.decoding.settings import Grammar, Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from tests.cli.conftest import Command
from tests.conftest import THREADS

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}") for name in ("mcp", "llguidance")
]  # which only the process that runs these tests imports

SERVER = """
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("broken on purpose")

server.run("stdio")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER, "utf-8")
    return file


@pytest.fixture(scope="module")
def tools(server: Path) -> Iterator[Tools]:
    with mcp_tools([f"{sys.executable} {server}"]) as found:
        assert found is not None
        yield found


@pytest.fixture(scope="module")
def chat_engine(chatty: Path) -> Engine:
    return load(chatty, threads=THREADS)


def test_tools_are_listed_and_called(tools: Tools) -> None:
    by_name = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert by_name["add"]["description"] == "Add two numbers."
    assert by_name["add"]["parameters"]["required"] == ["a", "b"]
    assert tools.run("add", {"a": 2, "b": 40}) == "42"
    assert "The call failed" in tools.run("fail", {})


def test_two_servers_of_a_file_may_have_tools_of_one_name(server: Path, tmp_path: Path) -> None:
    one = {"command": sys.executable, "args": [str(server)]}
    file = tmp_path / "servers.json"
    file.write_text(json.dumps({"mcpServers": {"first": one, "second": one}}), "utf-8")
    with mcp_tools([str(file)]) as found:
        assert found is not None
        names = {schema["function"]["name"] for schema in found.schemas}
        assert names == {"add", "fail", "second_add", "second_fail"}
        assert found.run("second_add", {"a": 1, "b": 1}) == "2"


@pytest.mark.parametrize("servers, part", [
    ("no-such-program-here", "no MCP server that works"),
    (f"{sys.executable} -c pass", "no MCP server that works"),
    ({"mcpServers": {"far": {"url": "https://example.com/mcp"}}}, "only local servers"),
    ({"servers": {}}, "expected an object mcpServers"),
])  # fmt: skip
def test_what_is_no_local_server(servers: object, part: str, tmp_path: Path) -> None:
    given = str(servers)
    if not isinstance(servers, str):
        (tmp_path / "servers.json").write_text(json.dumps(servers), "utf-8")
        given = str(tmp_path / "servers.json")
    with pytest.raises(InvalidRequest, match=part), mcp_tools([given]):
        pass


def test_without_somebody_to_ask_no_tool_is_called(command: Command, chatty: Path) -> None:
    command("run", chatty, "--chat", "--prompt", "x", "--mcp", "y").refused(2, "where you confirm each call")


@pytest.mark.parametrize("typed, said", [("y", "42"), ("n", "does not allow"), ("", "does not allow"), ("a", "42")])
def test_a_call_is_asked_for_run_and_answered(
    chat_engine: Engine, tools: Tools, typed: str, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The random model is forced to write a call each time, so its last answer also has one."""
    monkeypatch.setattr(chat_module, "MOST_CALLS", 2)
    asked: list[str] = []
    tools.allowed.clear()
    tools.ask = lambda question: asked.append(question) or typed  # type: ignore[func-returns-value]
    written = '{"name": "add", "arguments": {"a": 40, "b": 2}}'
    settings = Settings(
        max_new_tokens=200, grammar=Grammar.regex('\\{"name": "add", "arguments": \\{"a": 40, "b": 2\\}\\}')
    )
    talk = Chat(chat_engine, chat_engine.conversation([], settings, tools=tools.schemas), settings, set(), tools)
    talk.ask("what is 40 + 2?")
    messages = talk.conversation.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == json.loads(written)
    assert said in messages[2]["content"]
    assert len(asked) == (1 if typed == "a" else 2)
    assert "call: add" in capsys.readouterr().err
    ids = [one["id"] for message in messages for one in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == 3
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == ids[:2]
    assert talk.conversation.undo() == "what is 40 + 2?"
    assert talk.conversation.messages == []


def test_a_tool_that_nobody_has_is_said_to_the_model(tools: Tools) -> None:
    assert "no tool drop" in tools.answer(Call("1", "drop", "{}"))


@pytest.mark.parametrize("where", ["asked", "running"])
def test_a_call_that_is_stopped_has_an_answer(
    chat_engine: Engine, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> str:
        raise click.Abort if where == "asked" else KeyboardInterrupt

    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    tools = Tools([schema], stop, set() if where == "asked" else {"add"}, stop)
    talk = Chat(chat_engine, chat_engine.conversation([], Settings()), Settings(), set(), tools)
    with pytest.raises(KeyboardInterrupt):
        talk._call([Call("1", "add", "{}"), Call("2", "add", "{}")])
    said = [(message["tool_call_id"], message["content"]) for message in talk.conversation.messages]
    assert said == [("1", "The user stopped this call."), ("2", "The user stopped this call.")]


def test_what_ends_a_chat_is_not_wrapped(server: Path) -> None:
    good = f"{sys.executable} {server}"
    with pytest.raises(InvalidRequest, match="no MCP server that works"), mcp_tools([good, "no-such-program-here"]):
        pass
    with pytest.raises(KeyboardInterrupt), mcp_tools([good]):
        raise KeyboardInterrupt


def test_what_a_server_says_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "function", "function": {"name": "say", "description": "", "parameters": {}}}
    said = Tools([schema], lambda *_: "\x1b[2Jred\n\x07", {"say"}).answer(Call("1", "say", "{}"))
    assert said == "\x1b[2Jred\n\x07"  # the model receives all of it
    assert "\x1b" not in capsys.readouterr().err


def test_what_a_server_writes_beside_the_protocol_is_passed_over(
    server: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    noisy = tmp_path / "noisy.py"
    noisy.write_text(f"print('hello', flush=True)\n{server.read_text('utf-8')}", "utf-8")
    with mcp_tools([f"{sys.executable} {noisy}"]) as found:
        assert found is not None
        assert found.run("add", {"a": 1, "b": 2}) == "3"
    assert "Traceback" not in capfd.readouterr().err
