"""Describe the output of a chat template as data, for runtimes that run no templates.

In most templates the text between two messages depends only on their roles.  Those gaps are extracted, and the template
is compared with them on a battery of conversations.  Any other template is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.chat import Message
from edgespec.runtimes.text.codec import TextCodec

Render = Callable[..., str]  # of messages, and arguments of ``chat.render``
CHAT_FILE = "chat.json"
VERSION = 1
_ROLES = ("system", "user", "assistant")
_MARK = "EDGESPEC{}TEXT"
_CONTENTS = (
    "Hello there.", "  white space \n\n", "two\nlines\n\nand more", "Zo\u00eb \u2603 \U0001f389 \u4f60\u597d",
    "<|im_start|>user", "[INST] x [/INST]", "<think>a thought</think>words", "{{ messages }} {% if %}", "\u00a0x\u00a0",
    "def f(x):\n    return x\n", "0", "'quoted' \"twice\" \\n",
)  # fmt: skip


def chat_data(codec: TextCodec) -> dict[str, Any]:
    """Return the template of a model as ``gaps``, or why it is ``refused``.

    Gaps are texts by "before>after": roles, ``start``, and ``answer`` for the text before an answer.  "user>continued"
    is there if an answer that is continued can also be written so: its text ends with what it says.  ``trimmed``:
    roles whose contents lose the white space around them; ``thoughts``: earlier answers lose their text before
    </think>. In a template that knows images, "before>user+image" is the text before a message that begins with one.
    """
    template = codec.chat_template
    if template is None:
        return {"version": VERSION, "refused": "it has no default template"}
    if "strftime_now" in template:
        return {"version": VERSION, "refused": "it writes the date"}
    shows = "image" in template
    try:
        return _data(codec.write_chat, shows)
    except (InvalidRequest, ValueError) as error:
        data = {"version": VERSION, "refused": str(error)}
        if shows:  # it may leave out contents that are not given as parts
            with suppress(InvalidRequest, ValueError):
                return _data(lambda messages, **how: codec.write_chat(_in_parts(messages), **how), shows)
    return data


def _data(render: Render, shows: bool) -> dict[str, Any]:
    gaps = _gaps(render)
    system = "start>system" in gaps
    trimmed = [role for role in _ROLES if f"start>{role}" in gaps or role == "assistant" if _trims(render, role)]
    thoughts = "thought" not in render(_chat("x", "<think>thought</think>y", "z"))
    for messages in _battery(system):
        if render(messages) != _write(gaps, trimmed, thoughts, messages):
            shown = ", ".join(message["role"] for message in messages)
            raise ValueError(f"it writes more than contents and what stands between them ({shown})")
    if shows:
        with suppress(InvalidRequest, ValueError):
            both = gaps | {name: gap for name, gap in _gaps(render, _shown).items() if "+" in name}
            if all(render(one) == _write(both, trimmed, thoughts, one) for one in map(_shown, _battery(system))):
                gaps = both
    with suppress(InvalidRequest, ValueError):
        gaps = _with_continued(render, gaps, trimmed, thoughts, system)
    return {"version": VERSION, "gaps": gaps, "trimmed": trimmed, "thoughts": thoughts}


def _with_continued(
    render: Render, gaps: dict[str, str], trimmed: list[str], thoughts: bool, system: bool
) -> dict[str, str]:
    """Add the gap before an answer that is continued, if the rules of earlier answers also hold for it."""
    marks = [_MARK.format(at) for at in range(2)]
    gap = render(_chat(*marks), continue_final=True).removesuffix(marks[1]).rpartition(marks[0])[2]
    found = gaps | {"user>continued": gap}
    for number, messages in enumerate(_battery(system)):
        whole: list[Message] = [*messages, {"role": "assistant", "content": _CONTENTS[5 * number % len(_CONTENTS)]}]
        if render(whole, continue_final=True) != _write(found, trimmed, thoughts, whole, continued=True):
            return gaps
    return found


def _chat(*contents: str, system: str | None = None) -> list[Message]:
    found = [{"role": _ROLES[1 + at % 2], "content": text} for at, text in enumerate(contents)]
    return found if system is None else [{"role": "system", "content": system}, *found]


def _in_parts(messages: list[Message]) -> list[Message]:
    texts = ([{"type": "text", "text": message["content"]}] for message in messages)
    return [
        message if isinstance(message["content"], list) else {**message, "content": parts}
        for message, parts in zip(messages, texts, strict=True)
    ]


def _shown(messages: list[Message]) -> list[Message]:
    whole = _in_parts(messages)
    return [
        {**message, "content": [{"type": "image"}, *message["content"]]} if message["role"] == "user" else plain
        for message, plain in zip(whole, messages, strict=True)
    ]


def _named(message: Message) -> tuple[str, str]:
    """Return the name of a message in gaps, and its text."""
    content = message["content"]
    if isinstance(content, list):
        return f"{message['role']}+image", content[-1]["text"]
    return message["role"], content


def _write(
    gaps: dict[str, str], trimmed: list[str], thoughts: bool, messages: list[Message], continued: bool = False
) -> str:
    text, before = "", "start"
    for at, message in enumerate(messages, 1):
        role, (name, content) = message["role"], _named(message)
        if continued and at == len(messages):
            name = "continued"
        if thoughts and role == "assistant":
            content = content.split("</think>")[-1].lstrip("\n")
        text += gaps[f"{before}>{name}"] + (content.strip() if role in trimmed else content)
        before = role
    if continued:
        return text.rstrip() if before in trimmed else text
    return text + gaps[f"{before}>answer"]


def _gaps(render: Render, shown: Callable[[list[Message]], list[Message]] = list) -> dict[str, str]:
    """Read the gaps off a few conversations; a template may know no system message."""
    gaps: dict[str, str] = {}
    for turns, system in ((1, False), (3, False), (5, False), (1, True), (3, True)):
        first = _MARK.format("S") if system else None
        messages = shown(_chat(*map(_MARK.format, range(turns)), system=first))
        roles, named = [message["role"] for message in messages], list(map(_named, messages))
        try:
            rest = render(messages)
        except InvalidRequest:
            if system:
                continue
            raise
        marks = [*(content for _, content in named), ""]
        for before, after, mark in zip(["start", *roles], [*(name for name, _ in named), "answer"], marks, strict=True):
            gap, found, rest = rest.partition(mark) if mark else (rest, "", "")
            if mark and not found:
                raise ValueError(f"it leaves out a message of role {after}")
            if gaps.setdefault(f"{before}>{after}", gap) != gap:
                raise ValueError(f"what stands between {before} and {after} depends on more than that")
    return gaps


def _trims(render: Render, role: str) -> bool:
    padded = f" \n{_MARK.format(0)} \n"
    chats = {"system": _chat("x", system=padded), "user": _chat(padded, "x", "y"), "assistant": _chat("x", padded, "y")}
    return padded not in render(chats[role])


def _battery(system: bool) -> Iterator[list[Message]]:
    """Conversations of one to four turns, with and without system message."""
    for start in range(len(_CONTENTS)):
        for turns in (1, 3, 5, 7):
            contents = [_CONTENTS[(start + 5 * at) % len(_CONTENTS)] for at in range(turns)]
            yield _chat(*contents)
            if system:
                yield _chat(*contents, system=_CONTENTS[(start + 7) % len(_CONTENTS)])
