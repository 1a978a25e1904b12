"""Anthropic's messages: what is asked becomes a chat, and the answer is written in blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from edgespec.engine.result import Chunk
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.call_syntax import Event as Piece
from edgespec.server.answers import Choice, Part, extension
from edgespec.server.errors import MESSAGES, NO_THREAD, Failure
from edgespec.server.pictures import as_parts, parts
from edgespec.server.pictures import part as picture
from edgespec.server.requests import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    NO_TOOLS,
    ChatRequest,
    Count,
    Most,
    OpaqueObject,
    SamplingFields,
    Stop,
    some,
)
from edgespec.server.writer import Body, Writer, as_json, sse

Blocks = str | list[Any]
HEADER = "x-anthropic-"  # begins a block that a client writes for the service's accounts
_CHOICES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


class Turn(OpaqueObject):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks | None = None


class MessagesRequest(SamplingFields):
    """``POST /v1/messages``; ``max_tokens`` beyond the server's limit is that limit."""

    ignored: ClassVar[Sequence[str]] = (
        "metadata", "service_tier", "context_management", "inference_geo", "cache_control", "betas", "speed",
        "diagnostics", "user_profile_id", "workspace_id",
    )  # fmt: skip
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[Most, Field(ge=1)]
    system: Blocks | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(some)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # its earlier name
    thread: dict[str, Any] | None = None  # asks the server to keep the conversation

    def asked(self, earlier: bytes = b"") -> ChatRequest:
        """Convert the request to a chat request.

        Raises:
            InvalidRequest: content other than text, or a tool that the client does not run.
            Failure: it continues a stored thread.  No messages are stored; clients then send all of them.
        """
        if self.thread and self.thread.get("type") != "create":
            raise Failure("thread: no messages are kept here; send all of them", 404, param="thread", code=NO_THREAD)
        output = self.output_config or {}
        thinks = {"enabled": True, "adaptive": True, "disabled": False}.get(str((self.thinking or {}).get("type")))
        made = self.common | {
            "messages": self._messages(),
            "max_completion_tokens": self.max_tokens,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "reasoning_effort": output.get("effort"),
            "chat_template_kwargs": None if thinks is None else {"enable_thinking": thinks, "thinking": thinks},
        }
        if isinstance(form := output.get("format") or self.output_format, dict):
            made["response_format"] = form
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.get("name")}}
            made["tool_choice"] = named if choice.get("type") == "tool" else _CHOICES.get(str(choice.get("type")), "?")
            made["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        chat = ChatRequest.model_validate(made)
        last = made["messages"][-1]
        return chat.goes_on(last["role"] == "assistant" and bool(last["content"]))

    def _messages(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if system := _system(self.system or ""):
            made.append({"role": "system", "content": system})
        for turn in self.messages:
            blocks = as_parts(turn.content)
            if turn.role == "system":
                made.append({"role": "system", "content": _text(blocks)})
            else:
                made += _assistant(blocks) if turn.role == "assistant" else _user(blocks)
        return made


class CountRequest(MessagesRequest):
    """``POST /v1/messages/count_tokens``."""

    max_tokens: Annotated[Most, Field(ge=1)] = 1


def _system(content: Blocks) -> str:
    """Join blocks of instructions; without the client's own header, which is another one in every request."""
    if isinstance(content, str):
        return content
    return _text([one for one in content if not (_kind(one) == "text" and str(one.get("text")).startswith(HEADER))])


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _text(content: Any) -> Any:
    """Join blocks, if all of them are text; ``said`` of a chat reports errors in the others."""
    blocks = [_readable(one) for one in parts(content, "image", _picture)] if isinstance(content, list) else content
    if isinstance(blocks, list) and all(_kind(one) == "text" for one in blocks):
        texts = [one.get("text") or "" for one in blocks]
        if all(isinstance(text, str) for text in texts):
            return "\n\n".join(text for text in texts if text)
    return blocks


def _readable(block: Any) -> Any:
    """Write a document of text, or what a search found, as a text; any other block is as it is."""
    kind = _kind(block)
    source = {"type": "content", "content": block.get("content")} if kind == "search_result" else None
    source = block.get("source") if kind == "document" else source
    if not isinstance(source, dict):
        return block
    text = source.get("data") if source.get("type") == "text" else None
    text = _text(as_parts(source.get("content"))) if source.get("type") == "content" else text
    texts = [block.get("title"), block.get("context"), text]
    if not isinstance(text, str):
        return block
    return {"type": "text", "text": "\n".join(one for one in texts if isinstance(one, str) and one)}


def _picture(block: dict[str, Any]) -> dict[str, Any]:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64":
        return picture(f"data:{source.get('media_type')};base64,{source.get('data')}")
    if source.get("type") == "url":
        return picture(source.get("url"))
    kind = str(source.get("type"))[:80]
    raise InvalidRequest(f"an image with a source of type {kind!r}: expected base64, with media_type and data")


def _user(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the tool results of a user message, then its own content."""
    said = [block for block in blocks if _kind(block) != "tool_result"]
    for block in blocks:
        if _kind(block) == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
    if said or not blocks:
        yield {"role": "user", "content": _text(said)}


def _assistant(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the model's text, thoughts and tool calls."""
    texts, thoughts, calls = [], "", []
    for block in blocks:
        if (kind := _kind(block)) == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(block)
    made: dict[str, Any] = {"role": "assistant", "content": _text(texts) or None}
    if thoughts:
        made["reasoning_content"] = thoughts
    yield made | ({"tool_calls": calls} if calls else {})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        raise InvalidRequest(f"a tool of type {str(kind)[:80]!r}: expected custom ones", NO_TOOLS)
    names = {"name": "name", "description": "description", "parameters": "input_schema"}
    return {"type": "function", "function": {ours: tool.get(theirs) for ours, theirs in names.items()}}


class MessageWriter(Writer):
    """Messages of ``/v1/messages``."""

    _open: Part | None = None  # of a stream

    def whole(self) -> Iterator[str]:
        (choice,) = self.choices
        blocks = [_block(part) for part in choice.parts]
        yield as_json(self._message(blocks) | self._end(choice) | {"usage": self._usage()} | self._own(choice))

    def opening(self) -> Iterator[bytes]:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message([]) | {"usage": usage})
        yield _event("ping")

    def piece(self, choice: Choice, found: Sequence[tuple[Piece, Part]], chunk: Chunk | None) -> Iterator[bytes]:
        for piece, part in found:
            if part is not self._open:
                yield from self._close(choice)
                self._open = part
                yield _event("content_block_start", index=choice.parts.index(part), content_block=_empty(part))
            if delta := _delta(piece):
                yield _event("content_block_delta", index=choice.parts.index(part), delta=delta)
        if chunk is None:
            yield from self._close(choice)
            yield _event("message_delta", delta=self._end(choice), usage=self._usage(), **self._own(choice))

    def closing(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def failed(self, failure: Failure) -> Iterator[bytes]:
        yield sse(failure.body(MESSAGES), "error")

    def _close(self, choice: Choice) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=choice.parts.index(self._open))

    def _message(self, blocks: list[Body]) -> Body:
        known: Body = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}
        return known | {"stop_reason": None, "stop_sequence": None}

    def _usage(self) -> Body:
        used = self.used
        return {
            "input_tokens": used.prompt - used.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": used.cached,
            "output_tokens": used.written,
        }

    def _end(self, choice: Choice) -> Body:
        result, finish = choice.result, choice.finish
        stop = result.stop if result and result.finish == "stop" and finish != "tool_calls" else None
        why = {"tool_calls": "tool_use", "length": "max_tokens"}.get(finish or "", "end_turn")
        return {"stop_reason": "stop_sequence" if stop is not None else why, "stop_sequence": stop}

    def _own(self, choice: Choice) -> Body:
        return {"edgespec": extension([choice])}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind} | fields, kind)


def _empty(part: Part) -> Body:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _block(part: Part) -> Body:
    if part.kind != "call":
        name = "text" if part.kind == "text" else "thinking"
        return _empty(part) | {name: part.text}
    return _empty(part) | {"input": _input(part.text)}


def _input(text: str) -> Any:
    """Read a call's arguments; of those that were cut the members that are whole, as clients of a stream read them."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}


def _delta(piece: Piece) -> Body | None:
    if piece.kind == "text":
        return {"type": "text_delta", "text": piece.text}
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text} if piece.kind == "arguments" else None
