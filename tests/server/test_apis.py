"""Anthropic's messages and OpenAI's responses, as their own clients ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from edgespec.server.stored import BYTES_OF_ONE, MOST_BYTES, Stored
from tests.server.conftest import Later, Served, start, stop, with_template
from tests.server.test_tools import SCHEMAS, TOOLS

if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = Later("anthropic"), Later("openai")

TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ c.function.name }} {{ c.function.arguments.items() | list }}\n</tool_call>{% endfor %}\n\n"
    "{% endfor %}"
    "{% if tools %}{{ tools | length }} TOOLS\n{% endif %}{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
KEY, OTHER = "secret", "another"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = with_template(TEMPLATE, tmp_path_factory.mktemp("agent"))
    running = start(folder, "--name", "agent", "--api-key", KEY, "--api-key", OTHER, "--max-tokens", "300")
    yield running
    stop(running)


@pytest.fixture
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.openai(KEY) as made:
        yield made


CLAUDE_TOOLS = [
    {"name": one["function"]["name"], "description": "", "input_schema": one["function"]["parameters"]} for one in TOOLS
]
# in the shape of Claude Code's requests: system blocks and tool results with cache control, a call in the history
AGENT: dict[str, Any] = {
    "model": "agent",
    "max_tokens": 3000,
    "extra_body": {"temperature": 0},
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ],
    "messages": [
        {"role": "user", "content": "Fix the bug."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py", "limit": 9}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "1: def f():"}]},
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": CLAUDE_TOOLS,
    "metadata": {"user_id": "me"},
}


def test_a_message_is_the_chat_that_it_is(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    asked = AGENT | {"max_tokens": 20}
    answer = claude.messages.create(**asked)
    chat = client.chat.completions.create(
        model="agent",
        max_tokens=20,
        temperature=0,
        tools=TOOLS,  # type: ignore[arg-type]
        messages=[
            {"role": "system", "content": "You are an agent.\n\nBe brief."},
            {"role": "user", "content": "Fix the bug."},
            {
                "role": "assistant",
                "content": "I read it.",
                "tool_calls": [
                    {
                        "id": "toolu_1",
                        "type": "function",
                        "function": {"name": "Read", "arguments": '{"file_path": "a.py", "limit": 9}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "content": "1: def f():"},
            {"role": "user", "content": "Go on."},
        ],
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == chat.choices[0].message.content
    assert (answer.stop_reason, answer.role, answer.model) == ("max_tokens", "assistant", "agent")
    assert chat.usage is not None
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert (read, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    count = claude.messages.count_tokens(**{key: asked[key] for key in ("model", "system", "messages", "tools")})
    assert count.input_tokens == chat.usage.prompt_tokens


def test_a_message_as_a_stream(claude: anthropic.Anthropic) -> None:
    asked = AGENT | {"max_tokens": 20}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text"]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Edit"}]
)
def test_a_message_that_must_call(claude: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    asked = AGENT | {"tool_choice": choice}
    whole = claude.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, SCHEMAS[block.name])
    assert whole.stop_reason == "tool_use"
    assert choice.get("name", block.name) == block.name
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [one.input for one in final.content if one.type == "tool_use"] == [block.input]
    assert final.stop_reason == "tool_use"


def test_a_message_that_is_begun_goes_on(claude: anthropic.Anthropic) -> None:
    """The last turn is the model's own: what it writes follows it at once."""
    asked = AGENT | {"max_tokens": 8, "messages": [*AGENT["messages"], {"role": "assistant", "content": "My lord"}]}
    with_it = claude.messages.create(**asked)
    plain = claude.messages.create(**AGENT | {"max_tokens": 8})
    assert with_it.content[0].text != plain.content[0].text
    text = plain.content[0].text
    stopped = claude.messages.create(**AGENT | {"max_tokens": 8, "stop_sequences": [text[3:5], "never"]})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source of type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools itself"),
        ({"tool_choice": {"type": "tool", "name": "Write"}}, "names 'Write'"),
        ({"tool_choice": {"type": "best"}}, "tool_choice"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_body": {"edgespec": {"show_drafts": True}, "stream": True}}, "show_drafts"),
    ],
)
def test_errors_of_messages_have_their_shape(claude: anthropic.Anthropic, change: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        claude.messages.create(**AGENT | change)
    assert caught.value.body["type"] == "error"  # type: ignore[index]
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


def test_errors_before_a_message_is_read_have_its_shape_too(server: Served, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'opus'"):
        claude.messages.create(**AGENT | {"model": "opus"})
    with (
        pytest.raises(anthropic.AuthenticationError),
        anthropic.Anthropic(base_url=server.url, api_key="wrong") as wrong,
    ):
        wrong.messages.create(**AGENT)
    kinds = {
        httpx.post(f"{server.url}/v1/messages", content=body, headers={"x-api-key": KEY, "content-type": kind}).json()[
            "error"
        ]["type"]
        for body, kind in ((b"{}", "text/plain"), (b"{", "application/json"), (b" " * (1 << 21), "application/json"))
    }
    assert kinds == {"invalid_request_error", "request_too_large"}


# -- responses ---------------------------------------------------------------------------------------------------------

FUNCTIONS = [{"type": "function", **one["function"]} for one in TOOLS]
# in the shape of Codex's requests: instructions, a developer's message, calls and outputs as items, nothing stored
CODEX: dict[str, Any] = {
    "model": "agent",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look first."}]},
        {"type": "function_call", "call_id": "call_1", "name": "Read", "arguments": '{"file_path": "a.py"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "1: def f():"},
    ],
    "tools": FUNCTIONS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "x",
    "temperature": 0,
    "max_output_tokens": 16,
}


def test_a_response_is_the_chat_that_it_is(client: openai.OpenAI) -> None:
    answer = client.responses.create(**CODEX)
    chat = client.chat.completions.create(
        model="agent",
        max_tokens=16,
        temperature=0,
        tools=TOOLS,  # type: ignore[arg-type]
        messages=[
            {"role": "system", "content": "You are a coding agent."},
            {"role": "developer", "content": "Sandbox: none."},
            {"role": "user", "content": "Fix the bug."},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "Read", "arguments": '{"file_path": "a.py"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "1: def f():"},
        ],
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage is not None
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 16)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "Edit"}])
def test_a_response_as_a_stream(client: openai.OpenAI, choice: Any) -> None:
    asked = CODEX | {"tool_choice": choice, "max_output_tokens": 100}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    final: Any = events[-1]
    final = final.response
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        {event.sequence_number for event in events if hasattr(event, "sequence_number")}
    )
    assert final.output_text == whole.output_text
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in final.output if item.type == "function_call"] == [
        (item.name, item.arguments) for item in calls
    ]
    assert bool(calls) == (choice != "auto")
    for item in calls:
        jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])


def test_a_stored_response_is_gone_on_from(client: openai.OpenAI, server: Served) -> None:
    asked: dict[str, Any] = {"model": "agent", "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(**asked, input="Good night", instructions="Be brief.")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**asked, input="And now?", previous_response_id=first.id)
    turns: Any = [
        {"role": "user", "content": "Good night"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    same = client.responses.create(**asked, input=turns, store=False)
    assert second.output_text == same.output_text
    assert second.usage is not None
    assert same.usage is not None
    assert second.usage.input_tokens == same.usage.input_tokens
    with server.openai(OTHER) as other:
        for ask in (
            lambda: other.responses.retrieve(first.id),
            lambda: other.responses.create(**asked, input="x", previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError, match="no response"):
                ask()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input": [{"type": "input_image"}]}, "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text alone"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"tools": [{"type": "file_search"}]}, "runs no tools itself"),
        ({"background": True}, "background"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json"),
    ],
)
def test_errors_of_responses(client: openai.OpenAI, change: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**CODEX | change)


def test_what_is_stored_is_bounded_and_each_owners_own() -> None:
    kept = Stored()
    piece = b"x" * (1 << 20)
    for number in range(2 * BYTES_OF_ONE >> 20):
        kept.put("me", str(number), piece, b"")
    kept.put("you", "a", b"mine", b"said")
    assert kept.get("me", "0") is None
    assert kept.get("me", str((2 * BYTES_OF_ONE >> 20) - 1)) == (piece, b"")
    assert (kept.get("me", "a"), kept.get("you", "a")) == (None, (b"mine", b"said"))
    for number in range(2 * MOST_BYTES >> 20):
        kept.put(f"other {number}", "b", piece, b"")
    assert kept.get("you", "a") is None
    assert not kept.remove("you", "a")
