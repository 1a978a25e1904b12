"""Find the message format that a chat template expects, from its output.

Clients write the same history in many forms, and a template reads few of them.  ``ChatForm.of`` renders short
conversations once for each template, and checks in which forms nothing is lost.  ``ChatForm.write`` writes every later
conversation in those.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from edgespec.runtimes.text.sandbox_process import SandboxError, render_sandboxed

Content = Literal["absent", "none", "empty"]
CONTENTS: tuple[Content, ...] = ("absent", "none", "empty")  # the first that a template takes
Message = dict[str, Any]
SHORT_ID = 9  # letters and digits of a call's id, where a template requires this length
_LETTERS = string.digits + string.ascii_letters
_NAME, _KEY, _SAID, _RESULT = "edgespec_tool", "edgespec_key", "edgespec words", "edgespec result"
_ASKED: Message = {"role": "user", "content": _SAID}
_PROPERTIES = {_KEY: {"type": "string", "description": "a text"}}
_FUNCTION = {
    "name": _NAME, "description": "a tool", "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
}  # fmt: skip
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_ARGUMENTS = {_KEY: "edgespec value"}
_NOTHING = re.compile(r"\b(?:None|null)\b")
_LONG, _SHORT = "call_edgespec0123456789", "edgespec1"


@dataclass(frozen=True)
class ChatForm:
    """The forms that a template expects.

    Attributes:
        text_arguments: arguments of a call are text, not an object.
        content: the content of a message that has only calls.
        short_ids: ids of calls have nine letters and digits.
        developer: the template accepts the role ``developer``.
        late_system: a system message may come between turns.
        parts: the content is a list of parts, not a text.
    """

    text_arguments: bool = False
    content: Content = "absent"
    short_ids: bool = False
    developer: bool = False
    late_system: bool = True
    parts: bool = False

    @classmethod
    def of(cls, template: str, names: Mapping[str, str]) -> ChatForm:
        """Find the forms of ``template``; ``names``: its special tokens, such as ``bos_token``."""
        return _found(template, tuple(sorted(names.items())))

    def write(self, messages: Sequence[Any]) -> list[Message]:
        """Write a copy of a history in these forms.

        Fields without a value are left out.  Calls and their results get ids, results the name of their tool.
        Values that are not messages, calls or texts at all stay unchanged.
        """
        history = _History(self)
        for message in messages:
            if isinstance(message, Mapping):
                history.add({key: value for key, value in message.items() if value is not None})
            else:
                history.made.append(message)
        if self.parts:
            for made in history.made:
                if isinstance(made, dict) and isinstance(text := made.get("content"), str):
                    made["content"] = _parts(text)
        return history.made


class _History:
    """Messages that are written one after the other."""

    def __init__(self, form: ChatForm) -> None:
        self.form = form
        self.made: list[Message] = []
        self._names: dict[str, str] = {}  # of tools, by the ids of calls as they came
        self._open: list[str] = []  # ids of calls without a result
        self._joins = False  # the next message of the user belongs to the last one

    def add(self, message: Message) -> None:
        role = message.get("role")
        if role == "developer" and not self.form.developer:
            role = "system"
        moved = role in ("system", "developer") and not self.form.late_system and self._begun()
        if moved:
            role = "user"
        if role is not None:
            message["role"] = role
        if "function_call" in message and "tool_calls" not in message:  # as they were before tools
            message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
        if role == "function":
            message["role"] = role = "tool"
        calls = message.get("tool_calls")
        if isinstance(calls, (list, tuple)):
            message["tool_calls"] = [self._call(call, at) for at, call in enumerate(calls)]
            if not calls:
                del message["tool_calls"]
        if role == "tool":
            self._result(message)
        if not (content := message.pop("content", None)):
            content = self._nothing("tool_calls" in message)
        if content is not None or (self.form.content == "none" and "tool_calls" in message):
            message["content"] = content
        if role == "user" and self.made and (moved or self._joins) and _role(self.made[-1]) == "user":
            self.made[-1]["content"] = _joined(self.made[-1]["content"], content)
            return
        self._joins = moved
        self.made.append(message)

    def _begun(self) -> bool:
        """Whether any message has a role other than system and developer."""
        return any(_role(one) not in ("system", "developer") for one in self.made)

    def _nothing(self, calls: bool) -> str | None:
        """Return the content of a message without text."""
        return "" if not calls or self.form.content == "empty" else None

    def _call(self, call: Any, at: int) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        given = call.get("id")
        id_ = str(given) if given is not None else f"call_{len(self.made)}_{at}"
        self._names[id_] = str(function.get("name"))
        self._open.append(id_)
        arguments = self._arguments(function.get("arguments"))
        return {"type": "function", **call, "id": self._id(id_), "function": {**function, "arguments": arguments}}

    def _arguments(self, given: Any) -> Any:
        """Write the arguments of a call; text that is not an object, as in a call that was cut, is wrapped in one."""
        found = given
        if isinstance(given, str):
            try:
                found = json.loads(given or "{}", parse_constant=_no_number)
            except (ValueError, RecursionError):
                found = {"unfinished": given}
        if found is None:
            found = {}
        if not isinstance(found, Mapping):
            found = {"unfinished": given if isinstance(given, str) else json.dumps(found)}
        return json.dumps(found, ensure_ascii=False) if self.form.text_arguments else found

    def _result(self, message: Message) -> None:
        """Complete a tool's result."""
        given = message.get("tool_call_id")
        id_ = str(given) if given is not None else next(iter(self._open), None)
        if id_ is None:
            return
        if id_ in self._open:
            self._open.remove(id_)
        if id_ in self._names:
            message.setdefault("name", self._names[id_])
        message["tool_call_id"] = self._id(id_)

    def _id(self, id_: str) -> str:
        if not self.form.short_ids or re.fullmatch(rf"[0-9A-Za-z]{{{SHORT_ID}}}", id_):
            return id_
        number = int.from_bytes(hashlib.sha256(id_.encode("utf-8", "surrogatepass")).digest(), "little")
        return "".join(_LETTERS[number // len(_LETTERS) ** at % len(_LETTERS)] for at in range(SHORT_ID))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _joined(before: Any, after: Any) -> Any:
    """Join the contents of two messages."""
    if isinstance(before, str) and isinstance(after, str):
        return "\n\n".join(text for text in (before, after) if text)
    return [*_parts(before), *_parts(after)]


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


# -- what a template does with short conversations ---------------------------------------------------------------------


@lru_cache(maxsize=32)
def _found(template: str, names: tuple[tuple[str, str], ...]) -> ChatForm:
    """Find the forms of a template; if none renders, return those of most templates."""

    def rendered(*messages: Message) -> str | None:
        values = {"messages": list(messages), "tools": _TOOLS, "documents": None, "add_generation_prompt": True}
        try:
            return render_sandboxed(template, dict(names) | values)
        except SandboxError:
            return None

    def shows(text: str, *messages: Message) -> bool:
        return text in (rendered(*messages) or "")

    parts = [{"type": "text", "text": _SAID}]
    if not shows(_SAID, _ASKED):
        return ChatForm(parts=shows(_SAID, {"role": "user", "content": parts}))

    def called(arguments: Any, content: Content, short: bool) -> str | None:
        """Render a call and its result, without the text before them."""
        id_ = _SHORT if short else _LONG
        call = {"id": id_, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        turn: Message = {"role": "assistant", "tool_calls": [call]}
        turn |= {} if content == "absent" else {"content": None if content == "none" else ""}
        result = {"role": "tool", "tool_call_id": id_, "name": _NAME, "content": _RESULT}
        text = rendered(_ASKED, turn, result)
        return None if text is None else text.partition(_SAID)[2]

    as_text = json.dumps(_ARGUMENTS)
    tried = {
        (short, text, content): found
        for short in (False, True)
        for text in (False, True)
        for content in CONTENTS
        if (found := called(as_text if text else _ARGUMENTS, content, short)) is not None
    }
    short = bool(tried) and not any(not short for short, _, _ in tried)
    chosen = min(
        ((text, content) for short_, text, content in tried if short_ == short),
        key=lambda form: _faults(tried, short, *form),
        default=(False, "empty"),
    )
    earlier, rule = {"role": "assistant", "content": "edgespec answer"}, {"content": "edgespec rule"}
    return ChatForm(
        text_arguments=chosen[0],
        content=chosen[1],
        short_ids=short,
        developer="developer" in template and shows("edgespec rule", {"role": "developer", **rule}, _ASKED),
        late_system=shows("edgespec rule", _ASKED, earlier, {"role": "system", **rule}, _ASKED),
    )


def _faults(
    tried: Mapping[tuple[bool, bool, Content], str], short: bool, text: bool, content: Content
) -> tuple[int, ...]:
    """Count the faults of a form: the worst first; then prefer objects over text, and no content over others.

    Faults are a lost call, its arguments written as a text within JSON or in Python's form, and a missing content
    written by its name.
    """
    found = tried[short, text, content]
    nothing = len(_NOTHING.findall(found))
    least = min(len(_NOTHING.findall(other)) for key, other in tried.items() if key[:2] == (short, text))
    quoted = f'\\"{_KEY}' in found or (f"'{_KEY}'" in found and f'"{_KEY}"' not in found)
    return (_KEY not in found, quoted, nothing > least, text, CONTENTS.index(content))
