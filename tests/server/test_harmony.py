"""gpt_oss over HTTP: channels of harmony are thoughts, text and calls, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.server.conftest import Later, Served, start, stop
from tests.server.test_tools import streamed, tool
from tests.support import harmony

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

pytestmark = pytest.mark.usefixtures("native")
THOUGHT, ANSWER, ARGUMENTS = ("".join(words) for words in (harmony.THOUGHT, harmony.ANSWER, harmony.ARGUMENTS))
CLOCK = tool("clock", zone={"type": "string"})
ALARM = tool("alarm", hour={"enum": [7, 9]})
ASK: dict[str, Any] = {"model": "oss", "messages": [{"role": "user", "content": "What time is it?"}], "max_tokens": 60,
                       "temperature": 0}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("harmony")
    source = harmony.write_model(folder / "source")
    export_model(ExportOptions(str(source), folder / "bundle", [], "int8", threads=1, quick=True), golden=False)
    running = start(folder / "bundle", "--name", "oss", "--no-log")
    yield running
    stop(running)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made


def both(client: openai.OpenAI, **asked: Any) -> tuple[dict[str, Any], str | None]:
    """Ask for a message whole and as a stream, which are the same -> it and why it ended."""
    (choice,) = client.chat.completions.create(**asked).choices
    message = choice.message
    found = {
        "content": message.content or "",
        "reasoning_content": (message.model_extra or {}).get("reasoning_content", ""),
        "tool_calls": [[one.function.name, one.function.arguments] for one in message.tool_calls or ()],
    }
    assert streamed(client, **asked) == (found, choice.finish_reason)
    return found, choice.finish_reason


@pytest.mark.parametrize("method", ["ar", "ngram"])
def test_thoughts_text_and_calls_are_told_apart(client: openai.OpenAI, method: str) -> None:
    asked = ASK | {"extra_body": {"edgespec": {"method": method}}}
    said = {"content": ANSWER, "reasoning_content": THOUGHT, "tool_calls": []}
    assert both(client, **asked) == (said, "stop")
    called = {"content": "", "reasoning_content": THOUGHT, "tool_calls": [["clock", ARGUMENTS]]}
    assert both(client, **asked, tools=[CLOCK, ALARM]) == (called, "tool_calls")
    turns = [{"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": ARGUMENTS}}]},
             {"role": "tool", "tool_call_id": "call_1", "content": "23:10"}]  # fmt: skip
    assert both(client, **asked | {"messages": ASK["messages"] + turns}, tools=[CLOCK, ALARM]) == (said, "stop")


def test_a_forced_call_thinks_first(client: openai.OpenAI) -> None:
    """The grammar allows the model's own thought, and then only a call of the tool, with its arguments."""
    named = {"type": "function", "function": {"name": "alarm"}}
    found, why = both(client, **ASK, tools=[CLOCK, ALARM], tool_choice=named)
    assert why == "tool_calls"
    assert (found["content"], found["reasoning_content"]) == ("", THOUGHT)
    ((name, arguments),) = found["tool_calls"]
    assert name == "alarm"
    assert json.loads(arguments)["hour"] in (7, 9)


@pytest.mark.parametrize("shape", [{"enum": ["early", "late"]}, ALARM["function"]["parameters"]])
def test_a_schema_binds_the_final_channel(client: openai.OpenAI, shape: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": shape}}
    found, why = both(client, **ASK, response_format=form)
    assert why == "stop"
    assert found["reasoning_content"] == THOUGHT
    assert json.loads(found["content"]) in ("early", "late", {"hour": 7}, {"hour": 9})


def test_channels_in_responses(client: openai.OpenAI) -> None:
    functions: Any = [{"type": "function", **CLOCK["function"]}]
    asked: Any = {"model": "oss", "input": "What time is it?", "max_output_tokens": 60, "temperature": 0}
    assert [item.type for item in client.responses.create(**asked).output] == ["reasoning", "message"]
    called = client.responses.create(**asked, tools=functions).output
    assert [item.type for item in called] == ["reasoning", "function_call"]
