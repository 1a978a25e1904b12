"""Take images, or recordings, out of messages for a chat template, and put their text into its output."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import ImageWords

THINGS = {"image": "picture", "audio": "recording"}
"""What a part of a type holds."""


class Shown(NamedTuple):
    """Content of a part of a message, with the type of the part."""

    kind: str
    content: Any


def apart(
    messages: Sequence[Mapping[str, Any]], kinds: Collection[str] = ("image",)
) -> tuple[list[dict[str, Any]], list[Shown]]:
    """Take images, or recordings, out of a conversation, in the form that a template expects.

    Args:
        messages: the content of one is a text, or parts such as ``{"type": "text", "text": ...}`` and
            ``{"type": "image", "image": ...}``.
        kinds: of parts that the model reads, ``image`` and ``audio``.

    Returns:
        the messages, whose parts of that type hold nothing, and what they held, in order.

    Raises:
        InvalidRequest: such a part that holds nothing, or one of another type.
    """
    held: list[Shown] = []
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [_emptied(part, held, kinds) for part in content]}
        made.append(dict(message))
    return made, held


def _emptied(part: Any, held: list[Shown], kinds: Collection[str]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in THINGS:
        return part
    if kind not in kinds:
        raise InvalidRequest(f"got a {THINGS[kind]}, and this model reads text and {' and '.join(kinds)} alone")
    if part.get(kind) is None:
        raise InvalidRequest(f"a part of type {kind} holds no {THINGS[kind]}", f"expected it under the key `{kind}`")
    held.append(Shown(kind, part[kind]))
    return {key: value for key, value in part.items() if key != kind}


def seeing(messages: Sequence[Mapping[str, Any]], shown: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Put images and recordings, by the types of parts, back into a conversation that ``apart`` took them out of."""
    left: dict[str, Iterator[Any]] = {kind: iter(some) for kind, some in shown.items()}

    def filled(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        return {**part, kind: next(left.get(kind, iter(())), None)} if kind in THINGS else part

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
