"""Pictures of requests: what may be named, what is refused, and the shapes of three APIs."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import InvalidRequest
from edgespec.server import pictures
from edgespec.server.messages import MessagesRequest
from edgespec.server.pictures import Opener, part
from edgespec.server.responses import ResponsesRequest

pytest.importorskip("PIL", reason="needs edgespec[images]")
from PIL import Image


def png(width: int = 6, height: int = 4) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), (9, 80, 200)).save(file, "png")
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


DATA = base64.b64encode(png()).decode()
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
SHAPES: dict[str, Any] = {
    "messages": lambda: MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [
            {"role": "user", "content": [ANTHROPIC, {"type": "text", "text": "What?"}]},
            {"role": "system", "content": "Short."}]}
    ),
    "responses": lambda: ResponsesRequest.model_validate(
        {"model": "m", "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": url(png()), "detail": "auto"},
            {"type": "input_text", "text": "What?"}]}]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_every_api_are_openais(name: str) -> None:
    first = SHAPES[name]().asked().messages[0]["content"]
    assert first == [part(url(png())), {"type": "text", "text": "What?"}]
    made = Opener().parts(first)
    assert [one["type"] for one in made[:2]] == ["image", "text"]
    assert (made[0]["image"] == np.full((4, 6, 3), (9, 80, 200))).all()


@pytest.mark.parametrize("content", [
    [{"type": "image", "source": {"type": "file", "file_id": "x"}}], [{"type": "document", "source": {}}, ANTHROPIC],
])  # fmt: skip
def test_blocks_that_are_no_pictures(content: Any) -> None:
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    with pytest.raises(InvalidRequest, match=r"source of type|document"):
        Opener().parts(MessagesRequest.model_validate(asked).asked().messages[0]["content"])


def test_files_are_read_from_the_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "in-side"
    for folder in (inside / "more", outside):
        folder.mkdir(parents=True)
    (inside / "more" / "a b.png").write_bytes(png())
    (outside / "x.png").write_bytes(png())
    (inside / "link.png").symlink_to(outside / "x.png")
    (inside / "loop.png").symlink_to(inside / "loop.png")
    for name in ("file:more/a%20b.png", f"file://{inside}/more/a%20b.png", f"FILE://localhost{inside}/more/a%20b.png"):
        assert Opener(str(inside)).parts([part(name)])[0]["image"].shape == (4, 6, 3)
    for name in (f"file://{outside}/x.png", "file:../in-side/x.png", "file:link.png", "file:loop.png", "file:none.png",
                 "file:", "file:more", "file://elsewhere/x.png", "file:%00.png", f"file:{'a' * 5000}"):  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"no picture .* in the folder"):
            Opener(str(inside)).parts([part(name)])
    with pytest.raises(InvalidRequest, match="not started with --image-folder"):
        Opener().parts([part("file:x.png")])


@pytest.mark.parametrize(
    "found, message",
    [
        (part("https://example.org/x.png"), "fetches nothing"),
        (part("x.png"), "fetches nothing"),
        (part(None), "expected an object with `url`"),
        ({"type": "image_url"}, "expected an object with `url`"),
        (part("data:image/png;base64,AAAA"), "no picture of a known kind"),
        ({"type": "input_audio"}, "expected text and image_url"),
        ("text", "expected text and image_url"),
    ],
)
def test_what_is_no_picture_is_refused(found: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Opener().parts([found])


def test_pictures_of_a_request_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_PICTURES", 3)
    opener = Opener(_left=60)
    opener.parts([part(url(png()))] * 2)
    with pytest.raises(InvalidRequest, match="6 x 4 pixels: expected at most 12"):
        opener.parts([part(url(png()))])
    with pytest.raises(InvalidRequest, match="more than 3 pictures"):
        opener.parts([part(url(png(1, 1)))])
