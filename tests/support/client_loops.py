"""Run three turns of unmodified clients, each with the types of its library: a call, another one, and an answer.

``python client_loops.py URL MODEL`` runs in an environment that has the clients.  The first two turns must call a tool,
so that any model completes them; the client's version of an answer goes back unchanged.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
ASK = "Which words are in the file?"
SCHEMA = {
    "type": "object",
    "properties": {"lines": {"enum": [1, 2]}},
    "required": ["lines"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read", "description": "Reads the file.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FORCED = (True, True, False)
RESULT = "Good night"
Turns = list[Any]


def openai_chat(url: str, model: str) -> Turns:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    ask = {"model": model, "max_tokens": 32000, "extra_body": {"stop": ["\n"]}}
    return chat(client.chat.completions.create, lambda message: message, **ask)


def chat(complete: Callable[..., Any], kept: Callable[[Any], Any], **ask: Any) -> Turns:
    """Run three turns of a client that completes chats.

    Args:
        complete: asks for a completion.
        kept: makes what goes back of a message.
        ask: its other arguments.
    """
    messages: list[Any] = [{"role": "user", "content": ASK}]
    found: Turns = []
    for forced in FORCED:
        choice = "required" if forced else "none"
        message = complete(messages=messages, tools=[TOOL], tool_choice=choice, **ask).choices[0].message
        messages.append(kept(message))
        for call in message.tool_calls or ():
            found.append(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    return [*found, message.content or ""]


def openai_responses(url: str, model: str) -> Turns:
    import openai

    client, found = openai.OpenAI(base_url=f"{url}/v1", max_retries=0), []
    items: list[Any] = [{"role": "user", "content": ASK}]
    for forced in FORCED:
        ask: Any = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required" if forced else "none"}
        answer = client.responses.create(model=model, input=items, max_output_tokens=40, **ask)
        items += answer.output
        for item in answer.output:
            if item.type == "function_call":
                found.append(json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": RESULT})
    return [*found, answer.output_text]


def anthropic_messages(url: str, model: str) -> Turns:
    import anthropic

    client, found = anthropic.Anthropic(base_url=url, max_retries=0), []
    messages: list[Any] = [{"role": "user", "content": ASK}]
    tools: Any = [{"name": "read", "description": "Reads the file.", "input_schema": SCHEMA}]
    for forced in FORCED:
        choice: Any = {"type": "any" if forced else "none"}
        answer = client.messages.create(model=model, messages=messages, tools=tools, tool_choice=choice, max_tokens=40)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        found += [call.input for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        if results:
            messages.append({"role": "user", "content": results})
    return [*found, "".join(block.text for block in answer.content if block.type == "text")]


def anthropic_tool_runner(url: str, model: str) -> Turns:
    import anthropic
    from anthropic import beta_tool

    found: list[Any] = []

    def read(lines: Literal[1, 2]) -> str:
        """Read the file."""
        found.append({"lines": lines})
        return RESULT

    client = anthropic.Anthropic(base_url=url, max_retries=0)
    talk: Any = {"messages": [{"role": "user", "content": ASK}], "tools": [beta_tool(read)], "max_iterations": 3}
    talk["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    for _ in client.beta.messages.tool_runner(model=model, max_tokens=40, **talk):
        pass
    return [*found[:2], ""]


def litellm_openai(url: str, model: str) -> Turns:
    return _litellm(f"openai/{model}", f"{url}/v1")


def litellm_anthropic(url: str, model: str) -> Turns:
    return _litellm(f"anthropic/{model}", url)


def _litellm(model: str, base: str) -> Turns:
    import litellm

    ask = {"model": model, "api_base": base, "max_tokens": 40, "temperature": 0}
    return chat(litellm.completion, lambda message: message.model_dump(), **ask)


def langchain(url: str, model: str) -> Turns:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", model=model, temperature=0, max_tokens=40)
    messages: list[Any] = [HumanMessage(ASK)]
    found = []
    for forced in FORCED:
        answer = chat.bind_tools([TOOL], tool_choice="any" if forced else "none").invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            found.append(call["args"])
            messages.append(ToolMessage(RESULT, tool_call_id=call["id"]))
    return [*found, answer.content]


def pydantic_ai(url: str, model: str) -> Turns:
    from pydantic_ai.direct import model_request_sync
    from pydantic_ai.messages import ModelRequest, ToolReturnPart, UserPromptPart
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.tools import ToolDefinition

    asked = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    tool = ToolDefinition(name="read", description="Reads the file.", parameters_json_schema=SCHEMA)
    messages: list[Any] = [ModelRequest([UserPromptPart(ASK)])]
    found = []
    for forced in FORCED:
        how = ModelRequestParameters(function_tools=[tool] if forced else [], allow_text_output=not forced)
        settings: Any = {"temperature": 0, "max_tokens": 40}
        answer = model_request_sync(asked, messages, model_settings=settings, model_request_parameters=how)
        messages.append(answer)
        calls = [part for part in answer.parts if part.part_kind == "tool-call"]
        found += [call.args_as_dict() for call in calls]
        if calls:
            results = [ToolReturnPart("read", RESULT, tool_call_id=call.tool_call_id) for call in calls]
            messages.append(ModelRequest(results))
    return [*found, "".join(part.content for part in answer.parts if part.part_kind == "text")]


CLIENTS = (
    openai_chat, openai_responses, anthropic_messages, anthropic_tool_runner, litellm_openai, litellm_anthropic,
    langchain, pydantic_ai,
)  # fmt: skip

if __name__ == "__main__":
    sys.stdout.write(json.dumps({client.__name__: client(sys.argv[1], sys.argv[2]) for client in CLIENTS}) + "\n")
