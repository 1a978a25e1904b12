"""Pictures within messages and texts: taken out for a chat template, and what stands for them put into its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import ImageWords


def apart(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Take pictures out of a conversation, as a template wants to see it.

    Args:
        messages: the content of one is a text, or parts such as ``{"type": "text", "text": ...}`` and
            ``{"type": "image", "image": ...}``.

    Returns:
        the messages, whose parts of type image hold nothing, and what they held, in order.

    Raises:
        InvalidRequest: a part of type image without a picture.
    """
    held: list[Any] = []
    made = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            message = {**message, "content": [_emptied(part, held) for part in content]}
        made.append(dict(message))
    return made, held


def _emptied(part: Any, held: list[Any]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    if part.get("image") is None:
        raise InvalidRequest("a part of type image holds no picture", "expected it under the key `image`")
    held.append(part["image"])
    return {key: value for key, value in part.items() if key != "image"}


def seeing(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Put pictures back into a conversation that they were taken out of by ``apart``, which says how many."""
    left = iter(images)

    def filled(part: Any) -> Any:
        shown = isinstance(part, Mapping) and part.get("type") == "image"
        return {**part, "image": next(left, None)} if shown else part

    contents = (message.get("content") for message in messages)
    return [
        {**message, "content": [filled(part) for part in content]}
        if isinstance(content, (list, tuple))
        else dict(message)
        for message, content in zip(messages, contents, strict=True)
    ]


def expanded(text: str, words: ImageWords, texts: Sequence[str]) -> str:
    """Put what stands for each picture into a text, in the places that a template has marked.

    Args:
        text: with ``words.placeholder`` for each picture.
        words: of the model.
        texts: of each picture, as its preprocessing gives them.

    Raises:
        InvalidRequest: other places than pictures, as where somebody wrote the placeholder.
    """
    pieces = text.split(words.placeholder)
    if len(pieces) != len(texts) + 1:
        raise InvalidRequest(
            f"the text has {words.placeholder!r} {len(pieces) - 1} times for {len(texts)} pictures: expected one each",
            "leave it out of what you write; the model's template puts it in",
        )
    return "".join(piece + given for piece, given in zip(pieces, [*texts, ""], strict=True))
