"""A chat's prompt by the model's template, and how its answer will be read: notation of calls, thoughts, grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.decoding.settings import Grammar
from edgespec.errors import InvalidRequest
from edgespec.runtimes.images.prompt import apart
from edgespec.runtimes.text.call_formats import AnswerShape
from edgespec.runtimes.text.call_grammar import after_thoughts, calls_grammar
from edgespec.runtimes.text.chat import choose_template
from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.pictures import Given, Sight, has_pictures
from edgespec.server.requests import TEXT_ALONE, TEXT_AND_PICTURES, ChatRequest, NamedTool


@dataclass(frozen=True)
class Plan:
    """How an answer is read."""

    shape: AnswerShape = field(default_factory=AnswerShape)  # of it
    grammar: Grammar | None = None  # of the whole answer
    markers: tuple[str, ...] = ()  # special tokens that its text must keep
    single: bool = False  # one call ends it
    pictures: Sequence[Given] = ()  # uint8 [h, w, 3] each, whose rows stand in the prompt by the image's token


def plan_chat(
    asked: ChatRequest, codec: TextCodec, calls: str | None, sight: Sight | None = None
) -> tuple[list[int], Plan]:
    """Write the prompt of a chat -> its token ids, and how the answer is read.

    Args:
        asked: the request.
        codec: of the bundle.
        calls: the notation of calls; None = that of the model's template.
        sight: of the model; None = it reads text alone.

    Raises:
        InvalidRequest: no template, one that refuses the conversation, pictures that cannot be read, or tools that
            cannot be asked for.
    """
    offered = asked.tools if asked.tool_choice != "none" else None
    if asked.forces_call and not offered:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools")
    tools = None if offered is None else [tool.model_dump(exclude_none=True) for tool in offered]
    called = [tool["function"] for tool in tools or ()]
    messages, pictures = apart(said(asked, codec, sight), sight.kind if sight else "image")
    goes_on = asked.continued
    prompt = codec.write_chat(
        messages, tools, options=_options(asked), generation_prompt=not goes_on, continue_final=goes_on
    )
    template = choose_template(codec.templates, tools)
    shape = AnswerShape.of(template, prompt, called, asked.edgespec.tool_format or calls, asked.edgespec.reasoning)
    special = codec.special_ids(shape.markers)
    single = bool(called) and asked.parallel_tool_calls is False
    grammar = asked.grammar
    if grammar is not None and shape.opened and not asked.forces_call:
        grammar = after_thoughts(grammar, shape, special)
    if asked.forces_call:
        if grammar is not None:
            raise InvalidRequest("tool_choice forces a call and response_format a text: expected one of them")
        if isinstance(asked.tool_choice, NamedTool):
            name = asked.tool_choice.function.name
            called = [tool for tool in called if tool["name"] == name]
            if not called:
                raise InvalidRequest(f"tool_choice names {name!r}, and no tool is called so")
        grammar = calls_grammar(shape, called, not single and not isinstance(asked.tool_choice, NamedTool), special)
    text = prompt if sight is None else sight.written(prompt, pictures)
    return codec.encode(text, special=False), Plan(shape, grammar, tuple(special), single, pictures)


def _options(asked: ChatRequest) -> dict[str, Any]:
    """Collect what a template knows beside the messages, the effort under the names that templates have for it."""
    options: dict[str, Any] = {}
    if asked.reasoning_effort is not None:
        thinks = asked.reasoning_effort != "none"
        options = {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            options["reasoning_effort"] = asked.reasoning_effort
    return options | (asked.chat_template_kwargs or {})


def said(asked: ChatRequest, codec: TextCodec, sight: Sight | None = None) -> list[dict[str, Any]]:
    """Write the messages for the model's template.

    Parts of text are joined; beside pictures they stay apart.  Arguments of calls are objects, as templates want them.
    What developers say is the system's word where the template does not know them, and such messages at the beginning
    are one.

    Raises:
        InvalidRequest: a part that is no text, or a picture or a recording that this model does not read.
    """
    made: list[dict[str, Any]] = []
    developers = "developer" in "".join(codec.templates.values())
    opener = sight.opener() if sight else None
    for message in asked.messages:
        content: Any = message.get("content")
        if has_pictures(content):
            if opener is None or message.get("role") != "user":
                hint = TEXT_ALONE if opener is None else "pictures and recordings are read in messages of the user"
                raise InvalidRequest("a message has a picture or a recording: expected text", hint)
            made.append(message | {"content": opener.parts(content)})
            continue
        one = message | {"content": plain(content)}
        if one.get("role") == "developer" and not developers:
            one["role"] = "system"
        if isinstance(calls := one.get("tool_calls"), list):
            one["tool_calls"] = [_with_object(call) for call in calls]
        if one.get("role") == "system" and len(made) == 1 and made[0].get("role") == "system":
            made[0]["content"] = "\n\n".join(text for text in (made[0]["content"], one["content"]) if text)
        else:
            made.append(one)
    return made


def _with_object(call: Any) -> Any:
    """Copy a call with its arguments as an object, where they are one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": found}} if isinstance(found, dict) else call


def plain(content: Any) -> str | None:
    """Join parts of text.

    Raises:
        InvalidRequest: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise InvalidRequest("a message's content is neither text nor parts of type text", TEXT_AND_PICTURES)
