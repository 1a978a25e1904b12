"""``--image`` and ``/image``: pictures that go along with a question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import COUNT, PATH, option
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image

image_option = option(
    "--image",
    "A picture in front of the first prompt: png, jpeg, webp, gif or bmp; may be repeated.",
    PATH,
    dest="images",
    multiple=True,
    metavar="FILE",
)


image_rows_option = option(
    "--max-image-tokens",
    "Maximum number of tokens per picture: smaller pictures, fewer tiles.  [default: the bundle's]",
    COUNT,
    dest="image_rows",
)


def read_images(files: Iterable[Path]) -> list[Image]:
    """Read pictures, and report the parts of them that are ignored.

    Raises:
        InvalidRequest: a picture that cannot be read.
    """
    from edgespec.runtimes.images.image import Image
    from edgespec.runtimes.images.reading import open_picture

    made = []
    for file in files:
        found = open_picture(file)
        if found.note:
            click.echo(f"note: {found.note}", err=True)
        made.append(Image.of(found.pixels))
    return made


def require_sight(engine: Engine, kind: str = "image") -> None:
    """Refuse pictures, or recordings in questions, where a model does not read them.

    Raises:
        InvalidRequest: it does not.
    """
    target = engine.bundle.manifest.target
    if (target.image if kind == "image" else target.hearing) is None:
        if kind == "audio":
            hint = "export a decoder with an audio encoder, such as Qwen3-ASR; to transcribe, leave --chat out"
            raise InvalidRequest("this bundle answers no questions about a recording", hint)
        hint = "export a model that reads images; `edgespec info` says what a bundle reads"
        raise InvalidRequest("this bundle reads only text, and a picture was given", hint)


def with_images(images: Sequence[Image | Audio], text: str) -> Any:
    """Return the content of a message: the text, after pictures or recordings if there are any."""
    if not images:
        return text
    parts: list[dict[str, Any]] = [{"type": image.kind, image.kind: image} for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts


def text_of(content: Any) -> str:
    """Return what a message says, as a line shows it: ``[picture]`` or ``[recording]`` for each."""
    if not isinstance(content, (list, tuple)):
        return str(content)
    shown = {"image": "[picture] ", "audio": "[recording] "}
    return "".join(shown.get(part.get("type"), str(part.get("text", ""))) for part in content)
