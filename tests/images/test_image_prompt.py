"""Pictures are taken out of messages for templates, and what stands for them is put into the text."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.images import ImageWords
from edgespec.runtimes.images.prompt import apart, expanded, seeing

WORDS = ImageWords(placeholder="<image>", token="<image>", id=4)


def test_pictures_leave_messages_in_order() -> None:
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": [{"type": "image", "image": b"1"}, {"type": "text", "text": "and"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ({"type": "image", "image": b"2", "detail": "low"},)},
    ]
    made, held = apart(said)
    assert held == [("image", b"1"), ("image", b"2")]
    assert [message["content"] for message in made] == [
        "Short.", [{"type": "image"}, {"type": "text", "text": "and"}], None, [{"type": "image", "detail": "low"}]
    ]  # fmt: skip
    assert said[1]["content"][0] == {"type": "image", "image": b"1"}
    with pytest.raises(InvalidRequest, match="holds no picture"):
        apart([{"role": "user", "content": [{"type": "image"}]}])


def test_pictures_and_recordings_go_back_where_they_were() -> None:
    content = [{"type": "audio", "audio": b"1"}, {"type": "image", "image": b"2"}, {"type": "audio", "audio": b"3"}]
    said: list[dict[str, Any]] = [{"role": "user", "content": content}]
    made, held = apart(said, ("image", "audio"))
    assert held == [("audio", b"1"), ("image", b"2"), ("audio", b"3")]
    assert seeing(made, {"image": [b"2"], "audio": [b"1", b"3"]}) == said
    with pytest.raises(InvalidRequest, match="got a picture, and this model reads text and audio alone"):
        apart(said, ("audio",))


def test_what_stands_for_pictures_may_hold_the_placeholder_itself() -> None:
    assert expanded("a<image>b<image>", WORDS, ["[<image><image>]", "[<image>]"]) == "a[<image><image>]b[<image>]"
    assert expanded("nothing", WORDS, []) == "nothing"
    for text, texts in (("<image>", []), ("", ["x"]), ("<image><image>", ["x"])):
        with pytest.raises(InvalidRequest, match="expected one each"):
            expanded(text, WORDS, texts)
