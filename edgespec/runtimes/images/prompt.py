"""Take images, or recordings, out of messages for a chat template, and put their text into its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import ImageWords

THINGS = {"image": "picture", "audio": "recording"}
"""What a part of a type holds."""


def apart(messages: Sequence[Mapping[str, Any]], kind: str = "image") -> tuple[list[dict[str, Any]], list[Any]]:
    """Take images, or recordings, out of a conversation, in the form that a template expects.

    Args:
        messages: the content of one is a text, or parts such as ``{"type": "text", "text": ...}`` and
            ``{"type": "image", "image": ...}``.
        kind: of parts that the model reads, ``image`` or ``audio``.

    Returns:
        the messages, whose parts of that type hold nothing, and what they held, in order.

    Raises:
        InvalidRequest: such a part that holds nothing, or one of the other type.
    """
    held: list[Any] = []
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [_emptied(part, held, kind) for part in content]}
        made.append(dict(message))
    return made, held


def _emptied(part: Any, held: list[Any], kind: str) -> Any:
    got = part.get("type") if isinstance(part, Mapping) else None
    if got in THINGS and got != kind:
        raise InvalidRequest(f"got a {THINGS[got]}, and this model reads text and {kind} alone")
    if got != kind:
        return part
    if part.get(kind) is None:
        raise InvalidRequest(f"a part of type {kind} holds no {THINGS[kind]}", f"expected it under the key `{kind}`")
    held.append(part[kind])
    return {key: value for key, value in part.items() if key != kind}


def seeing(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Put images, or recordings, back into a conversation that ``apart`` separated them from."""
    left = iter(images)

    def filled(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        return {**part, kind: next(left, None)} if kind in THINGS else part

    contents = (message.get("content") for message in messages)
    return [
        {**message, "content": [filled(part) for part in content]}
        if isinstance(content, (list, tuple))
        else dict(message)
        for message, content in zip(messages, contents, strict=True)
    ]


def expanded(text: str, words: ImageWords, texts: Sequence[str]) -> str:
    """Put the ``texts`` of images into a text, at the places where a template has written ``words.placeholder``.

    Raises:
        InvalidRequest: the number of places differs from that of images, as when a message contains the placeholder.
    """
    pieces = text.split(words.placeholder)
    if len(pieces) != len(texts) + 1:
        raise InvalidRequest(
            f"the text has {words.placeholder!r} {len(pieces) - 1} times for {len(texts)} parts: expected one each",
            "leave it out of what you write; the model's template puts it in",
        )
    return "".join(piece + given for piece, given in zip(pieces, [*texts, ""], strict=True))
