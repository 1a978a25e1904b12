"""What a chat template writes, as data: for runtimes that run no templates.

In most templates the text between two messages depends on their roles alone.  Those gaps are read off, and the template
is compared with them on a battery of conversations: a template that does anything else is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.chat import Message
from edgespec.runtimes.text.codec import TextCodec

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

    Gaps are texts by "before>after": roles, ``start``, and ``answer`` for what stands before an answer.  ``trimmed``:
    roles whose contents lose the white space around them; ``thoughts``: earlier answers lose what is before </think>.
    """
    template = codec.chat_template
    if template is None:
        return {"version": VERSION, "refused": "it has no default template"}
    if "strftime_now" in template:
        return {"version": VERSION, "refused": "it writes the date"}
    try:
        gaps = _gaps(codec)
        trimmed = [role for role in _ROLES if f"start>{role}" in gaps or role == "assistant" if _trims(codec, role)]
        thoughts = "thought" not in _render(codec, _chat("x", "<think>thought</think>y", "z"))
        for messages in _battery("start>system" in gaps):
            if _render(codec, messages) != _write(gaps, trimmed, thoughts, messages):
                shown = ", ".join(message["role"] for message in messages)
                raise ValueError(f"it writes more than contents and what stands between them ({shown})")
    except (InvalidRequest, ValueError) as error:
        return {"version": VERSION, "refused": str(error)}
    return {"version": VERSION, "gaps": gaps, "trimmed": trimmed, "thoughts": thoughts}


def _render(codec: TextCodec, messages: list[Message]) -> str:
    return codec.write_chat(messages)


def _chat(*contents: str, system: str | None = None) -> list[Message]:
    """Return a conversation in which user and assistant take turns."""
    found = [{"role": _ROLES[1 + at % 2], "content": text} for at, text in enumerate(contents)]
    return found if system is None else [{"role": "system", "content": system}, *found]


def _write(gaps: dict[str, str], trimmed: list[str], thoughts: bool, messages: list[Message]) -> str:
    """Return the text that the data give."""
    text, before = "", "start"
    for message in messages:
        role, content = message["role"], message["content"]
        if thoughts and role == "assistant":
            content = content.split("</think>")[-1].lstrip("\n")
        text += gaps[f"{before}>{role}"] + (content.strip() if role in trimmed else content)
        before = role
    return text + gaps[f"{before}>answer"]


def _gaps(codec: TextCodec) -> dict[str, str]:
    """Read the gaps off a few conversations; a template may know no system message."""
    gaps: dict[str, str] = {}
    for turns, system in ((1, False), (3, False), (5, False), (1, True), (3, True)):
        first = _MARK.format("S") if system else None
        messages = _chat(*map(_MARK.format, range(turns)), system=first)
        names = [message["role"] for message in messages]
        try:
            rest = _render(codec, messages)
        except InvalidRequest:
            if system:
                continue
            raise
        marks = [*(message["content"] for message in messages), ""]
        for (before, after), mark in zip(pairwise(["start", *names, "answer"]), marks, strict=True):
            gap, found, rest = rest.partition(mark) if mark else (rest, "", "")
            if mark and not found:
                raise ValueError(f"it leaves out a message of role {after}")
            if gaps.setdefault(f"{before}>{after}", gap) != gap:
                raise ValueError(f"what stands between {before} and {after} depends on more than that")
    return gaps


def _trims(codec: TextCodec, role: str) -> bool:
    """Whether the white space around a role's content is left out."""
    padded = f" \n{_MARK.format(0)} \n"
    chats = {"system": _chat("x", system=padded), "user": _chat(padded, "x", "y"), "assistant": _chat("x", padded, "y")}
    return padded not in _render(codec, chats[role])


def _battery(system: bool) -> Iterator[list[Message]]:
    """Conversations of one to four turns, with and without system message."""
    for start in range(len(_CONTENTS)):
        for turns in (1, 3, 5, 7):
            contents = [_CONTENTS[(start + 5 * at) % len(_CONTENTS)] for at in range(turns)]
            yield _chat(*contents)
            if system:
                yield _chat(*contents, system=_CONTENTS[(start + 7) % len(_CONTENTS)])
