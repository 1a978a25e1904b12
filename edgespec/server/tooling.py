"""A chat's prompt by the model's template, and how its answer will be read: notation of calls, thoughts, grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.decoding.settings import Grammar
from edgespec.errors import InvalidRequest
from edgespec.runtimes.images.prompt import apart
from edgespec.runtimes.text.call_formats import AnswerShape
from edgespec.runtimes.text.call_grammar import after_thoughts, calls_grammar
from edgespec.runtimes.text.chat import REASONING, choose_template
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.control_tokens import ChatText
from edgespec.server.pictures import Given, VisionConfig, as_parts, has_pictures
from edgespec.server.requests import TEXT_ALONE, TEXT_AND_PICTURES, TEXTS, THOUGHTS, ChatRequest, NamedTool


@dataclass(frozen=True)
class Plan:
    """How an answer is read."""

    shape: AnswerShape = field(default_factory=AnswerShape)  # of it
    grammar: Grammar | None = None  # of the whole answer
    markers: tuple[str, ...] = ()  # special tokens that its text must keep
    single: bool = False  # one call ends it
    pictures: Sequence[Given] = ()  # uint8 [h, w, 3] each; their embeddings replace the image tokens of the prompt


def plan_chat(
    asked: ChatRequest, codec: TextCodec, calls: str | None, sight: VisionConfig | None = None
) -> tuple[list[int], Plan]:
    """Write the prompt of a chat -> its token ids, and how the answer is read.

    Args:
        asked: the request.
        codec: of the bundle.
        calls: notation of tool calls; None = that of the chat template.
        sight: of the model; None = it reads only text.

    Raises:
        InvalidRequest: no template, one that rejects the conversation, pictures that cannot be read, or tools that
            cannot be asked for.
    """
    tools = asked.offered
    if asked.forces_call and not tools:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools")
    called = [tool["function"] for tool in tools or ()]
    written, pictures = write_chat(asked, codec, sight)
    prompt = written.text
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
        shape = replace(shape, forced=True)
        grammar = calls_grammar(shape, called, not single and not isinstance(asked.tool_choice, NamedTool), special)
    if sight is not None:
        written = written.changed(lambda text: sight.written(text, pictures))
    return codec.encode_chat(written), Plan(shape, grammar, tuple(special), single, pictures)


def write_chat(asked: ChatRequest, codec: TextCodec, sight: VisionConfig | None = None) -> tuple[ChatText, list[Given]]:
    """Render a chat with the model's template -> the text, and the pictures or recordings for its placeholders.

    Raises:
        InvalidRequest: see ``plan_chat``.
    """
    messages, pictures = apart(said(asked, codec, sight), sight.kinds if sight else ("image",))
    places, goes_on = sight.placeholders if sight else [], asked.continued
    how = {"nulls": True, "options": _options(asked), "generation_prompt": not goes_on, "continue_final": goes_on}
    return codec.render_chat(messages, asked.offered, also=places, **how), [one.content for one in pictures]


def _options(asked: ChatRequest) -> dict[str, Any]:
    """Collect a template's variables other than messages; reasoning effort gets each name that templates use for it."""
    options: dict[str, Any] = {}
    if asked.reasoning_effort is not None:
        thinks = asked.reasoning_effort != "none"
        options = {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            options["reasoning_effort"] = asked.reasoning_effort
    return options | (asked.chat_template_kwargs or {})


def said(asked: ChatRequest, codec: TextCodec, sight: VisionConfig | None = None) -> list[dict[str, Any]]:
    """Write the messages for the model's template.

    Text parts are joined, except in messages with pictures.  Parts that are thoughts become the message's thoughts.
    Pictures from a tool go into a user message after the tool's.  ``TextCodec.adapted`` adapts the rest to the
    template, and joins system messages at the beginning.

    Raises:
        InvalidRequest: content other than text, or a picture or recording that this model cannot read.
    """
    made: list[dict[str, Any]] = []
    opener = sight.opener() if sight else None
    seen: list[dict[str, Any]] = []  # pictures that tools gave
    for message in asked.messages:
        content: Any = message.get("content")
        role = message.get("role")
        if seen and role != "tool":
            if role == "user":
                content = [*seen, *as_parts(content)]
            else:
                made.append({"role": "user", "content": opener.parts(seen) if opener else ""})
            seen = []
        if has_pictures(content):
            if opener is None or role not in ("user", "tool"):
                hint = TEXT_ALONE if opener is None else "pictures and recordings are read in messages of the user"
                raise InvalidRequest("a message has a picture or a recording: expected text", hint)
            if role == "user":
                made.append(message | {"content": opener.parts(content)})
                continue
            seen += [one for one in content if has_pictures([one])]
            content = [one for one in content if not has_pictures([one])]
        text, thoughts = plain(content, TEXT_ALONE if sight is None else TEXT_AND_PICTURES)
        if not text and isinstance(refusal := message.get("refusal"), str):
            text = refusal
        known = any(message.get(name) for name in REASONING)
        made.append(message | {"content": text} | ({"reasoning_content": thoughts} if thoughts and not known else {}))
    if seen and opener:
        made.append({"role": "user", "content": opener.parts(seen)})
    return _one_system(codec.adapted(made, asked.offered))


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join system messages at the beginning."""
    count = next((at for at, one in enumerate(messages) if one.get("role") != "system"), len(messages))
    texts = [one.get("content") for one in messages[:count]]
    if count < 2 or not all(isinstance(text, str) for text in texts):
        return messages
    return [messages[0] | {"content": "\n\n".join(text for text in texts if text)}, *messages[count:]]


def plain(content: Any, hint: str = TEXT_ALONE) -> tuple[str | None, str]:
    """Join text parts -> the text, and the thoughts among them.

    Raises:
        InvalidRequest: content other than text; ``hint``: what the model accepts.
    """
    if content is None or isinstance(content, str):
        return content, ""
    text, thoughts = "", ""
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        said = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind in TEXTS and (said is None or isinstance(said, str)):
            text += said or ""
        elif kind in THOUGHTS:
            thoughts += _thought(part)
        else:
            named = f"a part of type {str(kind)[:80]!r}" if kind else f"content of type {type(part).__name__}"
            raise InvalidRequest(f"a message has {named}: expected text, or parts of type text", hint)
    return text, thoughts


def _thought(part: dict[str, Any]) -> str:
    """Read a part that is a thought: a text, or parts of text, as Mistral's API has it."""
    said = next((part[name] for name in ("thinking", "reasoning", "text") if part.get(name) is not None), "")
    if isinstance(said, list):
        return "".join(str(one.get("text") or "") for one in said if isinstance(one, dict))
    return str(said)
