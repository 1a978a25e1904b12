"""Requests in the shapes of public coding agents; the texts and the tools' descriptions are our own.

Their fields, in this order of kinds, are known from
- Codex CLI: openai/codex (Apache-2.0), codex-rs/codex-api/src/common.rs and codex-rs/core/tests/suite/web_search.rs;
- Claude Code: anthropics/claude-code issue 96101 and ggml-org/llama.cpp pull request 20623, which show its requests,
  and the public reference of Anthropic's API;
- opencode: its client library, vercel/ai (Apache-2.0), packages/openai-compatible;
- aider: its client library, BerriAI/litellm (MIT), litellm/llms/openai;
- Continue: continuedev/continue (Apache-2.0), packages/openai-adapters;
- Cline: cline/cline (Apache-2.0), src/core/api/transform/openai-format.ts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.messages import MessagesRequest
from edgespec.server.responses import ResponsesRequest
from edgespec.server.tooling import said
from tests.server.conftest import Served, start, stop

Body = dict[str, Any]
LONG = "You change code in a repository, in small steps. " * 8
SHORT = {"type": "string", "maxLength": 8}
PIXEL = "iVBORw0KGgo="


def schema(*required: str, **properties: Any) -> Body:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


CODEX: Body = {
    "model": "it",
    "instructions": LONG,
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>Ask before writing.</permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the test."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Look first."}],
            "content": None,
            "encrypted_content": None,
        },
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "call_1"},
        {
            "type": "function_call",
            "name": "find",
            "namespace": "mcp__notes",
            "arguments": '{"what": "test"}',
            "call_id": "call_2",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py\ntest_a.py"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "nothing"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I see."}],
            "phase": "commentary",
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": schema("cmd", cmd=SHORT, yield_time_ms={"enum": [1, 9]}),
        },
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__notes",
            "description": "Notes.",
            "tools": [
                {
                    "type": "function",
                    "name": "find",
                    "description": "Finds notes.",
                    "parameters": schema("what", what=SHORT),
                }
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-thread",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
    "max_output_tokens": 12,
}
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: Body = {
    "model": "it",
    "max_tokens": 12,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: version=1; entrypoint=cli; cch=12345;"},
        {"type": "text", "text": "You help in a terminal.", **CACHED},
        {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is a day.</system-reminder>"},
                {"type": "text", "text": "Fix the test.", **CACHED},
            ],
        },
        {"role": "system", "content": "<total_tokens>900 tokens left</total_tokens>"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look first.", "signature": "c2lnbg=="},
                {"type": "redacted_thinking", "data": "eA=="},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "1: def f():"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": "no such file",
                    "is_error": True,
                    **CACHED,
                },
                {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"},
            ],
        },
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#"}
            | schema("file_path", file_path=SHORT, limit={"type": "integer", "exclusiveMinimum": 0, "maximum": 99}),
        },
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": schema("command", command=SHORT, run_in_background={"type": "boolean"}),
            "eager_input_streaming": True,
            **CACHED,
        },
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "diagnostics": {"previous_message_id": None},
    "temperature": 1,
    "stream": True,
}


def call(id_: str, name: str, **arguments: Any) -> Body:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TURNS: list[Body] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("c1", "read", filePath="a"), call("c2", "bash", command="ls")],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "1: def f():"},
    {"role": "tool", "tool_call_id": "c2", "content": "a.py"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "description": "Reads.", "parameters": schema("filePath", filePath=SHORT)},
    },
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs.",
            "parameters": schema("command", command=SHORT),
            "strict": False,
        },
    },
]
OPENCODE: Body = {
    "model": "it",
    "max_tokens": 12,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Fix the test."}, *TURNS],
    "tools": TOOLS,
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "verbosity": "low",
    "prompt_cache_key": "ses_0",
}
AIDER: Body = {
    "model": "it",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": LONG, **CACHED}]},
        {"role": "user", "content": "*Added a.py to the chat.*"},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": [{"type": "text", "text": "Rename f to g.", **CACHED}]},
    ],
    "temperature": 0,
    "stream": True,
    "max_tokens": 12,
    "metadata": {"a": "b"},
}
CONTINUE: Body = {
    "model": "it",
    "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Where is f?"}, *TURNS],
    "max_tokens": 12,
    "temperature": None,
    "top_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "stop": ["\n\n\n\n", "/src/"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": TOOLS,
    "parallel_tool_calls": False,
}
CLINE: Body = {
    "model": "it",
    "messages": [
        {"role": "system", "content": LONG},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>Fix the test.</task>"},
                {"type": "text", "text": "<environment_details>none</environment_details>"},
            ],
        },
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call("c1", "read", filePath="a")]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1: def f():"}]},
    ],
    "tools": [one | CACHED for one in TOOLS],
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 12,
}
AGENTS: dict[str, tuple[str, Body]] = {
    "codex": ("/v1/responses", CODEX),
    "claude code": ("/v1/messages?beta=true", CLAUDE),
    "opencode": ("/v1/chat/completions", OPENCODE),
    "aider": ("/v1/chat/completions", AIDER),
    "continue": ("/v1/chat/completions", CONTINUE),
    "cline": ("/v1/chat/completions", CLINE),
}
LAST = {"/v1/responses": "response.incomplete", "/v1/messages?beta=true": "message_stop"}


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Served]:
    running = start(chat_bundle, "--name", "it", "--max-batch-size", "2")
    yield running
    stop(running)


def post(server: Served, path: str, body: Body) -> httpx.Response:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=120)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_turn_is_answered(server: Served, name: str) -> None:
    """As a stream that ends as its API says, and whole with the same text."""
    path, body = AGENTS[name]
    sent = post(server, path, body)
    assert sent.status_code == 200, sent.text
    events = [line.removeprefix("data: ") for line in sent.text.splitlines() if line.startswith("data: ")]
    if path in LAST:
        assert json.loads(events[-1])["type"] == LAST[path]
    else:
        assert events.pop() == "[DONE]"
        assert bool(json.loads(events[-1]).get("usage")) == ("stream_options" in body)
    whole = post(
        server, path, {key: value for key, value in body.items() if key != "stream_options"} | {"stream": False}
    )
    assert whole.status_code == 200, whole.text
    assert whole.json()["usage"]


@pytest.mark.parametrize("name", AGENTS)
def test_an_image_is_refused_clearly(server: Served, name: str) -> None:
    path, body = AGENTS[name]
    body, url = deepcopy(body), f"data:image/png;base64,{PIXEL}"
    if path == "/v1/responses":
        body["input"][1]["content"].append({"type": "input_image", "image_url": url})
    elif name == "claude code":
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        body["messages"][0]["content"].append({"type": "image", "source": source})
    else:
        body["messages"][1]["content"] = [{"type": "image_url", "image_url": {"url": url}}]
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert "this model reads text alone" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", [name for name, (_, body) in AGENTS.items() if "tools" in body])
def test_an_agents_tools_can_be_called(server: Served, name: str) -> None:
    """The grammar follows the agent's own schemas; calls of a namespace return both names."""
    path, body = AGENTS[name]
    body = body | {"stream": False, "temperature": 0, "parallel_tool_calls": False}
    body.pop("stream_options", None)
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    choice: Any = {"type": "any", "disable_parallel_tool_use": True} if name == "claude code" else "required"
    if name == "claude code":
        del body["parallel_tool_calls"]
    answer = post(server, path, body | {most: 200, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if name == "codex":
        calls = [(one["name"], one["arguments"]) for one in found["output"] if one["type"] == "function_call"]
        known = {"exec_command": CODEX["tools"][0]["parameters"], "find": CODEX["tools"][2]["tools"][0]["parameters"]}
        assert [tool["type"] for tool in found["tools"]] == ["function", "namespace"]
    elif name == "claude code":
        calls = [(one["name"], json.dumps(one["input"])) for one in found["content"] if one["type"] == "tool_use"]
        known = {tool["name"]: tool["input_schema"] for tool in CLAUDE["tools"]}
    else:
        made = found["choices"][0]["message"]["tool_calls"]
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in made]
        known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    assert calls
    for which, arguments in calls:
        jsonschema.validate(json.loads(arguments), known[which])


def test_a_function_of_a_namespace_is_called_by_both_names(server: Served) -> None:
    """Alone, so that it is the one that is called; streamed as well."""
    body = CODEX | {"tools": CODEX["tools"][2:], "tool_choice": "required", "max_output_tokens": 200}
    items = [one for one in post(server, "/v1/responses", body | {"stream": False}).json()["output"] if "name" in one]
    assert {(one["name"], one["namespace"]) for one in items} == {("find", "mcp__notes")}
    events = [line.removeprefix("data: ") for line in post(server, "/v1/responses", body).text.splitlines()]
    done = [json.loads(line)["item"] for line in events if line.startswith('{"type": "response.output_item.done"')]
    assert {(one["name"], one["namespace"]) for one in done if "name" in one} == {("find", "mcp__notes")}


def kept(body: Body, form: type[MessagesRequest | ResponsesRequest]) -> Body:
    """Leave out the fields that change nothing, as the reader of requests does."""
    return {name: value for name, value in body.items() if name not in form.ignored}


def test_what_a_template_is_given(chat_bundle: Path) -> None:
    """The client's header, which is never the same, is left out; this template knows the system between turns."""
    codec = TextCodec(chat_bundle)
    claude = said(MessagesRequest.model_validate(kept(CLAUDE, MessagesRequest)).asked(), codec)
    assert [one["role"] for one in claude] == ["system", "user", "system", "assistant", "tool", "tool", "user"]
    assert claude[0]["content"] == f"You help in a terminal.\n\n{LONG}"
    assert claude[1]["content"].endswith("Fix the test.")
    assert claude[2]["content"] == "<total_tokens>900 tokens left</total_tokens>"
    assert [one["name"] for one in claude[4:6]] == ["Read", "Bash"]
    codex = said(ResponsesRequest.model_validate(kept(CODEX, ResponsesRequest)).asked(), codec)
    assert [one["role"] for one in codex] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert codex[0]["content"].startswith(LONG)
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in codex[2]["tool_calls"]]
    assert calls == [("exec_command", {"cmd": "ls"}), ("mcp__notes__find", {"what": "test"})]


def test_a_prompt_that_is_too_long_is_told_so_that_an_agent_shortens_it(server: Served) -> None:
    """In the words and by the code that each API's clients know."""
    talk = [{"role": "user", "content": "king " * 3000}]
    answer = post(server, "/v1/messages", CLAUDE | {"messages": talk})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")
    answer = post(server, "/v1/chat/completions", OPENCODE | {"messages": talk})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
