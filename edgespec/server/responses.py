"""OpenAI's Responses API: items become a chat, answers are written as items, and stored responses can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from edgespec.engine.result import Chunk
from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.call_syntax import Event as Piece
from edgespec.server.answers import Choice, Part, extension
from edgespec.server.errors import Failure
from edgespec.server.pictures import part as picture
from edgespec.server.pictures import parts
from edgespec.server.requests import (
    MOST_MESSAGES,
    MOST_TOOLS,
    NO_TOOLS,
    ChatRequest,
    Most,
    Name,
    SamplingFields,
)
from edgespec.server.writer import Body, Writer, as_bytes, as_json, sse

MOST_METADATA = 16  # pairs, as OpenAI takes
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES)]
_ROLES = ("user", "assistant", "system", "developer")
JOINED = "__"  # between the names of a namespace and of its function
LEFT_OUT = ("web_search",)  # tools of hosted services that agents always offer: the prompt does not list them
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``."""

    ignored: ClassVar[Sequence[str]] = (
        "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "include",
        "client_metadata",
    )  # fmt: skip
    input: str | Items
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    max_output_tokens: Most | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MOST_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # a conversation that is too long is refused in both
    background: Literal[False] | None = None

    def asked(self, earlier: bytes = b"") -> ChatRequest:
        """Convert the request to a chat request.

        Args:
            earlier: messages of the response that it continues, as JSON.

        Raises:
            InvalidRequest: content other than text, or a tool that the client does not run.
        """
        instructed = [{"role": "system", "content": self.instructions}] if self.instructions else []
        made = self.common | {
            "messages": [*instructed, *self.conversation(earlier)],
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [made for tool in self.tools for made in _tools(tool)],
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        made["tool_choice"] = _choice(self.tool_choice)
        form = (self.text or {}).get("format")
        if isinstance(form, dict) and form.get("type") != "text":
            made["response_format"] = form
        return ChatRequest.model_validate(made)

    def conversation(self, earlier: bytes = b"") -> list[dict[str, Any]]:
        """List the messages of a chat, without the instructions."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        made: list[dict[str, Any]] = json.loads(earlier) if earlier else []
        for item in items:
            _add(made, item)
        return made

    def echo(self, earlier: bytes) -> Body:
        """Give what the answer repeats, and the conversation that is stored (None = it is not), both as JSON.

        The process that answers only copies them: parsing them there would keep all other requests waiting.
        """
        return {
            "namespaces": [str(tool.get("name")) for tool in self.tools or [] if tool.get("type") == "namespace"],
            "conversation": None if self.store is False else as_bytes(self.conversation(earlier)),
            "said": as_bytes(
                {
                    "instructions": self.instructions,
                    "max_output_tokens": self.max_output_tokens,
                    "metadata": self.metadata or {},
                    "parallel_tool_calls": self.parallel_tool_calls is not False,
                    "previous_response_id": self.previous_response_id,
                    "reasoning": {"effort": None, "summary": None} | (self.reasoning or {}),
                    "store": self.store is not False,
                    "temperature": self.temperature,
                    "text": {"format": {"type": "text"}} | (self.text or {}),
                    "tool_choice": self.tool_choice or "auto",
                    "tools": [tool for tool in self.tools or [] if tool.get("type") not in LEFT_OUT],
                    "top_p": self.top_p,
                    "truncation": "disabled",
                }
            ),
        }


def _choice(choice: Any) -> Any:
    """Write a choice of tools as chats have it."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice  # a chat also takes it in these words
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": choice.get("tools")}}


def _add(made: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item to the messages of a chat; what the model said, thought and called in one turn is one message."""
    kind = item.get("type") or "message"
    turn = made[-1] if made and made[-1]["role"] == "assistant" else None
    if kind == "message":
        role = str(item.get("role"))
        text = _content(item.get("content"))
        if role not in _ROLES:
            raise InvalidRequest(f"a message of role {role[:80]!r}: expected {', '.join(_ROLES)}")
        if role == "assistant" and turn and turn.get("content") is None and "tool_calls" not in turn:
            turn["content"] = text
        else:
            made.append({"role": role, "content": text})
    elif kind == "function_call":
        function = {"name": _flat(item.get("namespace"), item.get("name")), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if turn:
            turn.setdefault("tool_calls", []).append(call)
        else:
            made.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))})
    elif kind == "reasoning":
        thoughts = _text(item.get("content") or item.get("summary") or "")
        made.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
    else:
        raise InvalidRequest(
            f"an item of type {str(kind)[:80]!r}: expected message, function_call, function_call_output or reasoning"
        )


def _content(content: Any) -> Any:
    """Convert an item's content to that of a chat message."""
    return parts(content, "input_image", lambda one: picture(one.get("image_url")))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(one, dict) and one.get("type") in _TEXTS for one in content):
        return "".join(str(one.get("text") or "") for one in content)
    raise InvalidRequest("a reasoning item's content is neither text nor parts of text")


def _tools(tool: dict[str, Any], namespace: str | None = None) -> Iterator[dict[str, Any]]:
    """Write a tool as chats have it; those of a namespace are called by both names."""
    kind = tool.get("type")
    if kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
        for one in tool["tools"]:
            yield from _tools(one if isinstance(one, dict) else {}, str(tool.get("name")))
    elif kind == "function":
        fields = {name: value for name, value in tool.items() if name != "type"}
        yield {"type": "function", "function": fields | {"name": _flat(namespace, tool.get("name"))}}
    elif kind not in LEFT_OUT:
        raise InvalidRequest(f"a tool of type {str(kind)[:80]!r}: expected functions", NO_TOOLS)


def _flat(namespace: Any, name: Any) -> Any:
    return f"{namespace}{JOINED}{name}" if namespace else name


class ResponseWriter(Writer):
    """Responses of ``/v1/responses``."""

    _open: Part | None = None  # of a stream
    _number = 0

    def whole(self) -> Iterator[str]:
        yield self._json(self.response())

    def opening(self) -> Iterator[bytes]:
        begun = self._response("in_progress", [])
        yield self._whole_event("response.created", begun)
        yield self._whole_event("response.in_progress", begun)

    def piece(self, choice: Choice, found: Sequence[tuple[Piece, Part]], chunk: Chunk | None) -> Iterator[bytes]:
        for piece, part in found:
            if part is not self._open:
                yield from self._close(choice, "completed")
                self._open = part
                yield from self._begin(choice, part)
            if piece.text and piece.kind != "call":
                yield self._event(
                    f"{_NAMES[part.kind]}.delta", **self._place(choice, part), delta=piece.text, **_more(part)
                )
        if chunk is None:
            cut = choice.finish == "length"
            yield from self._close(choice, "incomplete" if cut else "completed")

    def closing(self) -> Iterator[bytes]:
        made = self.response()
        yield self._whole_event(f"response.{made['status']}", made)

    def failed(self, failure: Failure) -> Iterator[bytes]:
        error = {"code": failure.code or "server_error", "message": failure.message}
        yield self._whole_event("response.failed", self._response("failed", []) | {"error": error})

    def response(self) -> Body:
        """Write the response as it is now, without what it repeats of the request."""
        (choice,) = self.choices
        cut = choice.finish == "length"
        items = [self._item(choice, part, "completed") for part in choice.parts]
        if cut and items:
            items[-1]["status"] = "incomplete"
        made = self._response("incomplete" if cut else "completed", items)
        used = self.used
        made["usage"] = {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached},
            "output_tokens": used.written,
            "output_tokens_details": {"reasoning_tokens": used.thought},
            "total_tokens": used.prompt + used.written,
        }
        return made | {"edgespec": extension(self.choices)}

    def stored(self) -> tuple[bytes, bytes] | None:
        """Return the response and its conversation as stored JSON; None = it is not stored."""
        before: bytes | None = self.echo["conversation"]
        if before is None:
            return None
        separator = b", " if len(before) > len(b"[]") else b""
        said = before[:-1] + separator + as_bytes(self.choices[0].said()) + b"]"
        return self._json(self.response()).encode("utf-8", "replace"), said

    def _response(self, status: str, items: list[Body]) -> Body:
        known: Body = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        known |= {"error": None, "incomplete_details": None, "model": self.model, "output": items, "usage": None}
        if status == "incomplete":
            known["incomplete_details"] = {"reason": "max_output_tokens"}
        return known

    def _json(self, response: Body) -> str:
        """Write a response with what it repeats of the request."""
        return f"{as_json(response)[:-1]}, {self.echo['said'][1:].decode()}"

    def _item(self, choice: Choice, part: Part, status: str) -> Body:
        number = f"{self.id[-16:]}{choice.parts.index(part)}"
        if part.kind == "call":
            call: Body = {"type": "function_call", "id": f"fc_{number}", "call_id": part.id, **self._named(part.name)}
            return call | {"arguments": part.text, "status": status}
        if part.kind == "reasoning":
            thought = [{"type": "reasoning_text", "text": part.text}] if part.text else []
            return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thought, "status": status}
        said = [_said(part.text)] if part.text else []
        return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": said}

    def _named(self, name: str) -> Body:
        """Write the name of a function, split from that of its namespace."""
        for namespace in self.echo["namespaces"]:
            if name.startswith(f"{namespace}{JOINED}"):
                return {"name": name[len(namespace) + len(JOINED) :], "namespace": namespace}
        return {"name": name}

    def _place(self, choice: Choice, part: Part) -> Body:
        item = self._item(choice, part, "")
        return {"item_id": item["id"], "output_index": choice.parts.index(part)} | (
            {} if part.kind == "call" else {"content_index": 0}
        )

    def _begin(self, choice: Choice, part: Part) -> Iterator[bytes]:
        empty = self._item(choice, part, "in_progress")
        empty |= {"arguments" if part.kind == "call" else "content": "" if part.kind == "call" else []}
        index = choice.parts.index(part)
        yield self._event("response.output_item.added", output_index=index, item=empty)
        if part.kind != "call":
            yield self._event("response.content_part.added", **self._place(choice, part), part=_part(part, ""))

    def _close(self, choice: Choice, status: str) -> Iterator[bytes]:
        part, self._open = self._open, None
        if part is None:
            return
        whole: Body = {"arguments": part.text} | self._named(part.name) if part.kind == "call" else {"text": part.text}
        yield self._event(f"{_NAMES[part.kind]}.done", **self._place(choice, part), **whole, **_more(part))
        if part.kind != "call":
            yield self._event("response.content_part.done", **self._place(choice, part), part=_part(part, part.text))
        item = self._item(choice, part, status)
        yield self._event("response.output_item.done", output_index=choice.parts.index(part), item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number - 1} | fields, kind)

    def _whole_event(self, kind: str, response: Body) -> bytes:
        head = as_json({"type": kind, "sequence_number": self._number})[:-1]
        self._number += 1
        text = f'event: {kind}\ndata: {head}, "response": {self._json(response)}}}\n\n'
        return text.encode("utf-8", "replace")


_NAMES = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def _said(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _part(part: Part, text: str) -> Body:
    return _said(text) if part.kind == "text" else {"type": "reasoning_text", "text": text}


def _more(part: Part) -> Body:
    return {"logprobs": []} if part.kind == "text" else {}
