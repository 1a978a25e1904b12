"""Fields that ask for nothing are left out, and those that would change an answer are refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError

from edgespec.errors import InvalidRequest
from edgespec.server.apis import APIS, Kind, fields_of
from edgespec.server.errors import Failure, misread
from edgespec.server.messages import MessagesRequest
from edgespec.server.readers import Readers
from edgespec.server.requests import ChatRequest, CompletionRequest, NamedTool
from edgespec.server.responses import ResponsesRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
MESSAGE = CHAT | {"max_tokens": 9}
RESPONSE = {"model": "m", "input": "x"}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    "kind, sent, more",
    [
        ("chat", CHAT, {"functions": None, "function_call": None, "audio": None, "whatever": None}),
        ("chat", CHAT, {"modalities": ["text"], "functions": [], "web_search_options": {}, "min_tokens": 0}),
        ("chat", CHAT, {"guided_json": None, "stop_sequences": [], "skip_special_tokens": True, "repeat_penalty": 1.0}),
        ("chat", CHAT, {"future_field": {"deep": [1]}, "client_version": "9"}),
        ("message", MESSAGE, {"thread": {"type": "create"}, "container": None, "mcp_servers": []}),
        ("message", MESSAGE, {"seed": None, "betas": ["x"], "future": 1}),
        ("response", RESPONSE, {"conversation": None, "prompt": None, "future": True, "top_logprobs": None}),
        ("response", RESPONSE, {"top_logprobs": 0, "truncation": "auto", "background": False}),
        ("completion", {"model": "m", "prompt": "x"}, {"best_of": 1, "suffix": None, "echo": False, "future": 1}),
        ("embedding", {"model": "m", "input": "x"}, {"future": 1, "dimensions": None}),
    ],
)
def test_what_asks_for_nothing_is_left_out(kind: Kind, sent: dict[str, Any], more: dict[str, Any]) -> None:
    form = APIS[kind].request
    made, unknown = fields_of(kind, sent | more)
    assert {name: value for name, value in made.items() if name not in form.model_fields} == {}
    form.model_validate(made)
    assert set(unknown) <= more.keys()


@pytest.mark.parametrize(
    "kind, sent, more",
    [
        ("chat", CHAT, {"functions": [{"name": "f"}]}),
        ("chat", CHAT, {"modalities": ["text", "audio"]}),
        ("chat", CHAT, {"audio": {"voice": "a"}}),
        ("chat", CHAT, {"guided_regex": "a+"}),
        ("chat", CHAT, {"min_tokens": 5}),
        ("chat", CHAT, {"stop_sequences": ["x"]}),
        ("chat", CHAT, {"temprature": 0.5}),
        ("chat", CHAT, {"max_output_tokens": 5}),
        ("chat", CHAT, {"skip_special_tokens": False}),
        ("message", MESSAGE, {"mcp_servers": [{"url": "x"}]}),
        ("message", MESSAGE, {"logit_bias": {"5": 1}}),
        ("response", RESPONSE, {"conversation": "c"}),
        ("response", RESPONSE, {"prompt": {"id": "p"}}),
        ("completion", {"model": "m", "prompt": "x"}, {"tools": [{}]}),
    ],
)
def test_what_would_change_the_answer_is_refused(kind: Kind, sent: dict[str, Any], more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"^{next(iter(more))}: "):
        fields_of(kind, sent | more)


def test_a_conversation_that_a_server_should_keep() -> None:
    """Anthropic's tool runner sends all messages after the error that they are not kept."""
    MessagesRequest.model_validate(MESSAGE | {"thread": {"type": "create"}}).asked()
    going_on = MESSAGE | {"thread": {"type": "continue", "previous_message_id": "msg_1"}}
    with pytest.raises(Failure) as caught:
        MessagesRequest.model_validate(going_on).asked()
    assert caught.value.body("/v1/messages")["error"]["details"] == {"error_code": "thread_not_found"}


def test_a_field_that_nobody_knows_is_logged_once() -> None:
    said: list[str] = []
    readers = Readers([], said.append)
    for _ in range(3):
        readers._note("chat", ["future", "other"])
    readers._note("message", ["future"])
    assert [line.split(":")[0] for line in said] == ["/v1/chat/completions"] * 2 + ["/v1/messages"]
    readers._note("chat", [str(number) for number in range(10_000)])
    assert len(said) < 300
    asyncio.run(readers.close())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("given, expected", [(None, 50), (7, 7), (100, 100), (101, 100), (32_000, 100), (2**53, 100)])
def test_more_tokens_than_the_server_gives(name: str, given: int | None, expected: int) -> None:
    asked = ChatRequest.model_validate(CHAT | {name: given})
    assert asked.changes(100, 50)["max_new_tokens"] == expected


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected 1 to 100"):
        CompletionRequest.model_validate({"model": "m", "prompt": "x", "max_tokens": 0}).changes(100, 50)


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("chat", {"stream": True, "stream_options": {"include_usage": None}}),
        ("chat", {"edgespec": {"show_drafts": None, "reasoning": None, "regex": None}}),
        ("chat", {"tools": [function("a") | {"type": None}], "tool_choice": function("a") | {"type": None}}),
        ("chat", {"tools": [{"function": {"name": "a", "parameters": None, "description": None, "strict": None}}]}),
        ("chat", {"prediction": {"type": None, "content": "x"}}),
        ("message", {"messages": [{"role": "user", "content": None, "id": None}]}),
        ("response", {"input": [{"type": None, "role": "user", "content": "x", "status": None, "id": None}]}),
    ],
)
def test_a_null_within_an_object_is_not_there(kind: Kind, sent: dict[str, Any]) -> None:
    of: dict[str, dict[str, Any]] = {"chat": CHAT, "message": MESSAGE, "response": RESPONSE}
    asked: Any = APIS[kind].request.model_validate(of[kind] | sent)
    assert asked.asked().messages


@pytest.mark.parametrize(
    "sent, expected", [("", []), ([""], []), (["", "x"], ["x"]), ([], []), ("x", ["x"]), (None, [])]
)
def test_a_stop_of_no_characters_stops_nothing(sent: Any, expected: list[str]) -> None:
    assert ChatRequest.model_validate(CHAT | {"stop": sent}).changes(9, 9)["stop"] == expected
    if isinstance(sent, list):
        assert (
            MessagesRequest.model_validate(MESSAGE | {"stop_sequences": sent}).asked().changes(9, 9)["stop"] == expected
        )


@pytest.mark.parametrize(
    "given, forced, named",
    [
        ("auto", False, None),
        ({"type": "auto"}, False, None),
        ({"type": "none"}, False, None),
        ({"type": "required"}, True, None),
        ("any", True, None),
        ({"type": "any"}, True, None),
        (function("b"), True, "b"),
        ({"type": "function", "name": "b"}, True, "b"),
    ],
)
def test_a_choice_of_tools_in_the_words_of_any_client(given: Any, forced: bool, named: str | None) -> None:
    chat = ChatRequest.model_validate(CHAT | {"tools": [function("a"), function("b")], "tool_choice": given})
    flat = [{"type": "function", "name": name} for name in "ab"]
    response = ResponsesRequest.model_validate(RESPONSE | {"tools": flat, "tool_choice": given}).asked()
    for asked in (chat, response):
        assert asked.forces_call is forced
        assert (asked.tool_choice.function.name if isinstance(asked.tool_choice, NamedTool) else None) == named


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n", "seed", "top_k"])
def test_a_whole_number_may_have_a_point(name: str) -> None:
    """JSON has one kind of numbers, and some languages write 5 as 5.0."""
    asked = ChatRequest.model_validate(CHAT | {name: 5.0})
    assert (getattr(asked, name), type(getattr(asked, name))) == (5, int)
    for wrong in (5.5, True, "5", float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            ChatRequest.model_validate(CHAT | {name: wrong})


@pytest.mark.parametrize(
    "kind, sent, message",
    [
        ("response", {"input": []}, "input: List should have at least 1 item"),
        ("response", {"input": 5}, "input: Input should be a valid string"),
        ("completion", {"prompt": []}, "prompt: List should have at least 1 item"),
        ("completion", {"prompt": [[]]}, "prompt.0: List should have at least 1 item"),
        ("completion", {"prompt": ["a", 5]}, "prompt.1: Input should be a valid string"),
        ("completion", {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ("completion", {"prompt": [1, -1]}, "prompt.1: Input should be greater than or equal to 0"),
        ("completion", {"prompt": ["a"] * 300}, "prompt: List should have at most 32 items"),
        ("embedding", {"input": ["a"] * 3000}, "input: List should have at most "),
        ("chat", {"messages": [{}], "stop": ["x" * 1000]}, "stop.0: String should have at most 256 characters"),
        ("chat", {"messages": [{}], "stop": 5}, "stop: Input should be a valid string"),
        ("chat", {"messages": [{}], "tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
        ("chat", {"messages": "x"}, "messages: Input should be a valid list"),
    ],
)
def test_the_nearest_of_several_kinds_is_told(kind: Kind, sent: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        APIS[kind].request.model_validate({"model": "m"} | sent)
    assert misread(caught.value).message.startswith(message)


@pytest.mark.parametrize("given", ["some", {"type": "web_search"}, {"type": "function"}, {"name": 5}, 5])
def test_a_choice_of_tools_that_is_none(given: Any) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate(CHAT | {"tools": [function("a")], "tool_choice": given})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some_of_the_tools(mode: str) -> None:
    """Both of OpenAI's APIs have this choice, with different fields."""
    tools = [function(name) for name in "abc"]
    allowed = {"mode": mode, "tools": [function("c"), function("a")]}
    chat = ChatRequest.model_validate(
        CHAT | {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    )
    flat = [{"type": "function", "name": name} for name in "abc"]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [flat[2], flat[0]]}
    response = ResponsesRequest.model_validate(RESPONSE | {"tools": flat, "tool_choice": choice}).asked()
    for asked in (chat, response):
        assert [tool["function"]["name"] for tool in asked.offered or ()] == ["a", "c"]
        assert asked.forces_call is (mode == "required")
    allowed["tools"] = [function("d")]
    unknown = {"type": "allowed_tools", "allowed_tools": allowed}
    with pytest.raises(InvalidRequest, match="allows 'd'"):
        _ = ChatRequest.model_validate(CHAT | {"tools": tools, "tool_choice": unknown}).offered


@pytest.mark.parametrize("more", [{"output_format": {}}, {"output_config": {"format": {}}}])
def test_both_names_of_a_format_of_messages(more: dict[str, Any]) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    sent = MESSAGE | ({"output_format": form} if "output_format" in more else {"output_config": {"format": form}})
    grammar = MessagesRequest.model_validate(sent).asked().grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form, schema",
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": None}, {"type": "object"}),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, {}),
    ],
)
def test_a_schema_is_found(form: dict[str, Any], schema: dict[str, Any]) -> None:
    grammar = ChatRequest.model_validate(CHAT | {"response_format": form}).grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text) == schema


@pytest.mark.parametrize(
    "inner", [{}, {"json_schema": {"name": "n"}}, {"json_schema": {"schema": None}}, {"schema": None}]
)
def test_a_schema_that_is_not_there_is_refused(inner: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="json_schema with a schema"):
        _ = ChatRequest.model_validate(CHAT | {"response_format": {"type": "json_schema", **inner}}).grammar
