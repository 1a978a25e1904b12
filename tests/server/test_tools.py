"""Tools and thoughts over HTTP, as OpenAI's own client asks for them: forced calls in every format, streamed and not.

The tools have the shape of those of public coding agents (Codex's `shell`, Claude Code's `Read` and `Edit`, Cline's
`execute_command`), with texts of bounded length, as this model generates Shakespeare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from edgespec.runtimes.text.call_formats import FORMATS
from tests.server.conftest import Later, Served, start, stop, with_template

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:2],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": parameters}}


SHORT = {"type": "string", "maxLength": 8}
TOOLS = [
    tool("shell", command={"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2}, timeout_ms={"enum": [1, 9]}),
    tool("Read", file_path=SHORT, limit={"type": "integer", "maximum": 99, "minimum": 0}),
    tool("Edit", file_path=SHORT, new_string=SHORT, replace_all={"type": "boolean"}),
    tool("execute_command", command=SHORT, requires_approval={"type": "boolean"}),
]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
ASK: dict[str, Any] = {
    "model": "agent",
    "messages": [{"role": "developer", "content": "You edit files."}, {"role": "user", "content": "Fix the bug."}],
    "max_tokens": 200,
    "temperature": 0,
    "tools": TOOLS,
}


@pytest.fixture(scope="module")
def served_chat(chat_bundle: Path) -> Iterator[Served]:
    running = start(chat_bundle, "--name", "agent", "--max-batch-size", "2", "--no-log")
    yield running
    assert "POST" not in stop(running)


@pytest.fixture
def client(served_chat: Served) -> Iterator[openai.OpenAI]:
    with served_chat.openai() as made:
        yield made


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[dict[str, Any], str | None]:
    """Put the message of a stream together -> it and why it ended."""
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    why = None
    for event in client.chat.completions.create(**asked, stream=True):
        for choice in event.choices:
            delta = choice.delta
            said["content"] += delta.content or ""
            said["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
            for one in delta.tool_calls or ():
                assert one.function is not None
                if one.id:
                    assert one.index == len(said["tool_calls"])
                    said["tool_calls"].append([one.function.name, ""])
                said["tool_calls"][one.index][1] += one.function.arguments or ""
            why = choice.finish_reason or why
    return said, why


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("choice", ["required", "Edit"])
def test_a_forced_call_is_valid_streamed_and_not(client: openai.OpenAI, form: str, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}} if choice in SCHEMAS else choice
    own = {"edgespec": {"tool_format": form, "method": "ngram"}}
    asked = ASK | {"tool_choice": named, "parallel_tool_calls": False, "extra_body": own}
    answer = client.chat.completions.create(**asked)
    (one,) = answer.choices
    assert one.finish_reason == "tool_calls"
    assert one.message.content is None
    calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls or ()]
    assert calls
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    if named != choice:
        assert [name for name, _ in calls] == [choice]
    said, why = streamed(client, **asked)
    assert why == "tool_calls"
    assert said["tool_calls"] == [list(call) for call in calls]
    assert not said["content"]
    assert answer.model_extra is not None
    assert "the grammar guessed" in "; ".join(answer.model_extra["edgespec"][0]["details"])


@pytest.mark.parametrize("most", [3, 9, 20, 35])
def test_a_call_that_is_cut_says_so(client: openai.OpenAI, most: int) -> None:
    asked = ASK | {"tool_choice": "required", "max_tokens": most, "extra_body": {"edgespec": {"tool_format": "hermes"}}}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "length"
    said, why = streamed(client, **asked)
    calls = answer.choices[0].message.tool_calls or []
    assert said["tool_calls"] == [[call.function.name, call.function.arguments] for call in calls]
    assert said["content"] == (answer.choices[0].message.content or "")
    assert why == "length"


@pytest.mark.parametrize("form", ["hermes", "json", "qwen3-coder"])
def test_a_call_that_is_cut_is_the_same_in_every_api(client: openai.OpenAI, served_chat: Served, form: str) -> None:
    """No piece of its notation is text; it has the arguments that came, and a stream is put together to the same."""
    own: Any = {"extra_body": {"edgespec": {"tool_format": form}, "temperature": 0}}
    asked: Any = own | {"model": "agent", "tool_choice": "required", "tools": TOOLS, "parallel_tool_calls": False}
    messages: Any = ASK["messages"]
    functions = [{"type": "function", **one["function"]} for one in TOOLS]
    tools: Any = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    talk: Any = own | {
        "model": "agent",
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    talk |= {"system": messages[0]["content"], "messages": messages[1:]}
    seen = [""]
    with anthropic.Anthropic(base_url=served_chat.url, api_key="none", max_retries=0) as other:
        for most in range(1, 100, 6):
            (choice,) = client.chat.completions.create(**asked, messages=messages, max_tokens=most).choices
            if choice.finish_reason != "length":
                break
            assert not choice.message.content
            calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
            assert len(calls) <= 1
            if calls:
                assert calls[0][1].startswith(seen[-1])
                seen.append(calls[0][1])
            answer = client.responses.create(**asked | {"tools": functions}, input=messages, max_output_tokens=most)
            assert answer.status == "incomplete"
            found = [(one.name, one.arguments, one.status) for one in answer.output if one.type == "function_call"]
            assert found == [(*one, "incomplete") for one in calls]
            assert not answer.output_text
            message = other.messages.create(**talk, max_tokens=most)
            assert message.stop_reason == "max_tokens"
            with other.messages.stream(**talk, max_tokens=most) as stream:
                again = stream.get_final_message()
            assert [one.type for one in again.content] == ["tool_use"] * len(calls)
            assert [one.name for one in message.content if one.type == "tool_use"] == [name for name, _ in calls]
            inputs = [one.input for one in message.content if one.type == "tool_use"]
            assert inputs == [one.input for one in again.content if one.type == "tool_use"]
    assert len(set(seen)) > 2
    assert choice.finish_reason == "tool_calls"


def test_an_answer_without_calls_is_the_text_as_it_was(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK)
    without = client.chat.completions.create(**ASK | {"extra_body": {"edgespec": {"tool_format": "gemma"}}})
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == without.choices[0].message.content
    said, _ = streamed(client, **ASK)
    assert said["content"] == answer.choices[0].message.content


def test_what_tools_answered_goes_through_the_template(client: openai.OpenAI) -> None:
    """A turn of an agent: its call, what the tool said, and the next answer."""
    call = {"id": "call_1", "type": "function", "function": {"name": "Read", "arguments": '{"file_path": "a"}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "1: def f():"}]},
    ]
    before = client.chat.completions.create(**ASK).usage
    after = client.chat.completions.create(**ASK | {"messages": ASK["messages"] + turns}).usage
    assert before is not None
    assert after is not None
    assert after.prompt_tokens > before.prompt_tokens


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "Write"}}}, "names 'Write'"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "expected one of them"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"extra_body": {"edgespec": {"tool_format": "telepathy"}}}, "telepathy"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "no option of a template"),
        ({"reasoning_effort": "boundless"}, "reasoning_effort"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(client: openai.OpenAI, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**ASK | change)


THINKS = (
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    "{% if mood %}{{ mood }}{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
)


@pytest.fixture(scope="module")
def served_thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the same model by a template that begins every answer with a thought."""
    running = start(with_template(THINKS, tmp_path_factory.mktemp("thinks")), "--name", "agent")
    yield running
    stop(running)


@pytest.fixture
def thinker(served_thinker: Served) -> Iterator[openai.OpenAI]:
    with served_thinker.openai() as made:
        yield made


PLAIN = {key: value for key, value in ASK.items() if key != "tools"} | {"max_tokens": 12}


def test_thoughts_come_apart_from_the_text(thinker: openai.OpenAI) -> None:
    answer = thinker.chat.completions.create(**PLAIN)
    message = answer.choices[0].message
    assert message.content == ""
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"].strip()
    said, _ = streamed(thinker, **PLAIN)
    assert said["reasoning_content"] == message.model_extra["reasoning_content"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    joined = thinker.chat.completions.create(**PLAIN, extra_body={"edgespec": {"reasoning": False}})
    assert joined.choices[0].message.content


def test_a_template_is_told_what_it_asks_for(thinker: openai.OpenAI) -> None:
    for how in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        message = thinker.chat.completions.create(**PLAIN, **how).choices[0].message
        assert message.content
        assert "reasoning_content" not in message.model_extra
    usage = [
        thinker.chat.completions.create(**PLAIN, **how).usage.prompt_tokens
        for how in ({}, {"reasoning_effort": "high"}, {"extra_body": {"chat_template_kwargs": {"mood": "merry merry"}}})
    ]
    assert usage[0] < usage[1]
    assert usage[0] < usage[2]


def test_a_grammar_binds_what_comes_behind_the_thought(thinker: openai.OpenAI) -> None:
    """The thought ends where the model, biased to end it, writes its tag; then the schema holds."""
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    message = thinker.chat.completions.create(**PLAIN | {"max_tokens": 6, "response_format": shape}).choices[0].message
    assert message.content == ""
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"]
    calm = {"enable_thinking": False}
    own = PLAIN | {"response_format": shape, "extra_body": {"chat_template_kwargs": calm}}
    assert thinker.chat.completions.create(**own).choices[0].message.content in ('"yes"', '"no"')


def test_thoughts_in_other_apis(served_thinker: Served, thinker: openai.OpenAI) -> None:
    plain: Any = {"model": "agent", "max_tokens": 9, "extra_body": {"temperature": 0}}
    turns: Any = [{"role": "user", "content": "Hm?"}]
    with anthropic.Anthropic(base_url=served_thinker.url, api_key="x", max_retries=0) as claude:
        thought = claude.messages.create(**plain, messages=turns)
        assert [block.type for block in thought.content] == ["thinking"]
        with claude.messages.stream(**plain, messages=turns) as stream:
            assert stream.get_final_message().content == thought.content
        off = claude.messages.create(**plain, messages=turns, thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
    said = thinker.responses.create(model="agent", input="Hm?", max_output_tokens=9, temperature=0)
    assert [item.type for item in said.output] == ["reasoning"]
    assert said.usage is not None
    assert said.usage.output_tokens_details.reasoning_tokens == 9
    with thinker.responses.stream(model="agent", input="Hm?", max_output_tokens=9, temperature=0) as events:
        kinds = {event.type for event in events}
    assert {"response.reasoning_text.delta", "response.reasoning_text.done", "response.incomplete"} <= kinds


def test_several_calls_in_one_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK | {"tool_choice": "required"})
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    for call in calls[:-1]:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_predicted_output_saves_rounds(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**PLAIN | {"max_tokens": 60}, extra_body={"edgespec": {"method": "ar"}})
    own = {"edgespec": {"method": "ngram"}}
    asked = PLAIN | {"max_tokens": 60, "prediction": {"type": "content", "content": plain.choices[0].message.content}}
    answer = client.chat.completions.create(**asked, extra_body=own)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.model_extra is not None
    (said,) = answer.model_extra["edgespec"]
    assert said["rounds"] < 30
    assert "the prediction guessed in" in "; ".join(said["details"])


def test_a_line_is_written_for_each_request(chat_bundle: Path) -> None:
    running = start(chat_bundle, "--name", "agent")
    with running.openai() as made:
        made.chat.completions.create(**PLAIN)
        with pytest.raises(openai.NotFoundError):
            made.models.retrieve("a\nb")
    lines = [line for line in stop(running).splitlines() if " POST " in line or " GET " in line]
    assert [line.split()[2:5] for line in lines] == [
        ["POST", "/v1/chat/completions", "200"],
        ["GET", "/v1/models/a\\nb", "404"],
    ]
    assert all(line.split()[1] == "127.0.0.1" and line.endswith(" ms") for line in lines)
